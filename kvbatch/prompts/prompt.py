"""A prompt: its token ids, its parts and questions, or the reason why it cannot run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Outcome = Literal[
    "fits", "truncated", "split", "streamed", "too_long", "missing_column", "empty_prompt", "bad_request"
]
TruncationSide = Literal["left", "middle", "right"]


class PromptDocument(Protocol):
    """What a prompt needs to know of a document."""

    @property
    def row_id(self) -> object:
        """Fills `{id}`."""
        ...

    @property
    def text(self) -> str | None:
        """Fills `{text}`."""
        ...

    @property
    def columns(self) -> Mapping[str, str]:
        """Fill the other placeholders."""
        ...


@dataclass(frozen=True)
class PromptRequest:
    """What the engine is asked: the first `prefix_tokens` are shared, `probe_ids` are the question's own tokens."""

    token_ids: list[int]
    prefix_tokens: int
    probe_ids: list[int]
    streams: bool = False


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to run, or the reason why there is none."""

    token_ids: list[int]  # empty unless it fits; with several questions, what precedes each of them
    num_tokens: int  # of all its requests; for a prompt that does not fit: the tokens it would have
    prefix_tokens: int  # of these, the ones shared with all rows
    dropped_tokens: int = 0
    truncation_side: TruncationSide | None = None  # the part that was left out
    outcome: Outcome = "fits"
    message: str | None = None
    removed_chars: int = 0  # by which prompt.clean made the document shorter
    sampling: Mapping[str, Any] = field(default_factory=dict)  # what the row sets for itself
    probe_ids: list[int] = field(default_factory=list)
    tails: Sequence[list[int]] = ()  # of several questions, each with what follows it
    parts: Sequence["Prompt"] = ()  # of a document that was split
    reduce_tokens: int = 0  # the most tokens of a prompt over the parts' answers

    @property
    def runs(self) -> bool:
        """Whether there are token ids to run."""
        return self.outcome in ("fits", "truncated", "split", "streamed")

    @property
    def part_tokens(self) -> tuple[int, ...]:
        """Tokens of each part's prompt, without the questions if there are several."""
        return tuple(len(part.token_ids) for part in self.parts or (self,))

    @property
    def requests(self) -> list[PromptRequest]:
        """What to ask: each question, of a split document part by part."""
        if self.parts:
            return [request for part in self.parts for request in part.requests]
        if not self.tails:
            streams = self.outcome == "streamed"
            return [PromptRequest(self.token_ids, self.prefix_tokens, self.probe_ids, streams)]
        return [PromptRequest(self.token_ids + tail, len(self.token_ids), []) for tail in self.tails]
