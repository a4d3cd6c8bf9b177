"""What goes into the engine and what comes out. No torch."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from engine.constraint import Constraint

FinishReason = Literal["stop", "length", "repetition", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How a sequence's tokens are chosen, and when it ends.

    Args:
        max_new_tokens: the most tokens generated.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens that together reach this probability.
        min_p: drop tokens less likely than this fraction of the likeliest.
        seed: of the sequence's own random stream, so that its tokens do not depend on other sequences.
        stop: strings that end the sequence; the text is cut before them.
        stop_token_ids: tokens that end the sequence, besides the model's own end tokens.
        ignore_eos: go on after the model's own end tokens.
        repetition_stop: end a sequence that repeats a short cycle (`engine.stopping.is_repeating`).

    Raises:
        ValueError: A value out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_stop: bool = False

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens must be at least 1": self.max_new_tokens >= 1,
            "temperature must not be negative": self.temperature >= 0,
            "top_k must not be negative": self.top_k >= 0,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "min_p must be in [0, 1)": 0 <= self.min_p < 1,
            "stop strings must not be empty": all(self.stop),
        }
        for message, holds in checks.items():
            if not holds:
                raise ValueError(f"{message}: {self}")


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Args:
        request_id: the caller's name for the request; the result has it too.
        prompt_token_ids: the whole prompt.
        sampling: how to generate.
        prefix_tokens: leading prompt tokens shared with other requests; their keys and values are computed once.
        probe_token_ids: the question's own tokens, wherever they stand in the prompt. A compressed cache computes their
            attention over each chunk to score its tokens.
        constraint: makes the constraint of the sequence, when it is admitted.
        streams: the prompt may exceed the model's context. It then takes no more memory than a prompt that fills the
            context: fewer of its tokens are kept, and their positions are re-based (`engine.position_rebasing`).
    """

    request_id: Hashable
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    prefix_tokens: int = 0
    probe_token_ids: Sequence[int] = ()
    constraint: "Callable[[], Constraint] | None" = None
    streams: bool = False

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens shared with other requests."""
        return tuple(self.prompt_token_ids[: self.prefix_tokens])

    @property
    def max_tokens(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.prompt_token_ids) + self.sampling.max_new_tokens


@dataclass(frozen=True)
class Result:
    """What was generated for a request, and its cost.

    `token_ids` holds every generated token, an end token included; `text` leaves out special tokens, whatever
    follows a stop string, and the bytes of a character that was not finished. Byte counts are of KV cache:
    `kv_full_bytes` what all tokens would take at the model's precision, `kv_kept_bytes` what those kept at the end
    take, `kv_peak_bytes` the pages held, a shared prefix included in both. `prefill_s`, to the first token, and
    `decode_s`, from there on, are the sequence's shares of the steps' time: a step's time is divided among its
    sequences by the tokens that each has in it, so these times of all sequences add up to the time of all steps. The
    steps of a shared prefix count as prefill of the sequence that needed it first. `wait_s` is the rest of the time
    between the engine's taking the request and its end: it waited for room, or others were computed.
    """

    request_id: Hashable
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    error_message: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    num_chunks: int
    kv_full_bytes: int
    kv_kept_bytes: int
    kv_peak_bytes: int
    prefill_s: float
    decode_s: float
    wait_s: float

    @classmethod
    def failed(cls, request: Request, message: str) -> "Result":
        """Return the result of a request that did not run."""
        return cls(
            request_id=request.request_id,
            token_ids=[],
            text="",
            finish_reason="error",
            error_message=message,
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=0,
            cached_prompt_tokens=0,
            num_chunks=0,
            kv_full_bytes=0,
            kv_kept_bytes=0,
            kv_peak_bytes=0,
            prefill_s=0.0,
            decode_s=0.0,
            wait_s=0.0,
        )


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine started. Prompt tokens count every prompt, cached ones the part not computed again;
    computed ones are counted as they are computed, once for a shared prefix.

    `kv_allocated_bytes` is all that was allocated, prefill buffers included, `kv_pool_bytes` the pages of it; the
    others are bytes of these pages in use: now, on average over the time of the steps, and at most. Drafted tokens
    are draft tokens that were computed (`engine.prompt_lookup`), accepted ones those that were then chosen.
    """

    num_rows: int
    num_steps: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    kv_allocated_bytes: int
    kv_pool_bytes: int
    kv_used_bytes: int
    kv_mean_bytes: float
    kv_peak_bytes: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    computed_prompt_tokens: int = 0
