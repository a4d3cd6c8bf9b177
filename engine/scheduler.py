"""What the next step computes and who may enter: decisions alone, no torch.

A row enters in order, when its whole need is free: all pages of prompt and longest output. So nothing is ever
preempted. A step takes one token of every decoding row first; prompt chunks fill the rest of the token budget.

Most libraries' matrix products round a row in a way that depends on how many rows there are. Where results must not
depend on who shares the step, a step is therefore a chunk of one row, as long as the row alone would have it, or one
token of at most `ALONE_DECODES` rows, which the runner fills up to that number.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.sequence import Sequence

MIN_CHUNK_TOKENS = 64
ALONE_DECODES = 16


@dataclass(frozen=True)
class Chunk:
    """The next `num_tokens` prompt tokens of a sequence."""

    sequence: Sequence
    num_tokens: int

    @property
    def token_ids(self) -> list[int]:
        start = self.sequence.num_computed_tokens
        return self.sequence.token_ids[start : start + self.num_tokens]

    @property
    def num_choices(self) -> int:
        """After how many of its last tokens one is chosen: 1 where the prompt ends with this chunk."""
        ends = self.sequence.num_computed_tokens + self.num_tokens >= self.sequence.num_prompt_tokens
        return int(ends and not self.sequence.is_prefix)


@dataclass(frozen=True)
class Draft:
    """The next token of a sequence in decode, and what is guessed to follow it."""

    sequence: Sequence
    guesses: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return 1 + len(self.guesses)

    @property
    def num_choices(self) -> int:
        """After how many of its last tokens one is chosen: after each."""
        return self.num_tokens

    @property
    def token_ids(self) -> list[int]:
        return [self.sequence.token_ids[-1], *self.guesses]


@dataclass(frozen=True)
class StepPlan:
    """What one step computes: one token of some rows in decode, several of others, and chunks of prompts."""

    decodes: tuple[Sequence, ...]
    chunks: tuple[Chunk, ...]
    drafts: tuple[Draft, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(span.num_tokens for span in self.drafts + self.chunks)

    def shares(self, seconds: float) -> list[tuple[Sequence, float]]:
        """Divide the seconds of the step among its sequences, by their tokens."""
        counts = [(sequence, 1) for sequence in self.decodes]
        counts += [(span.sequence, span.num_tokens) for span in self.drafts + self.chunks]
        return [(sequence, seconds * count / self.num_tokens) for sequence, count in counts]


def chunk_size(num_prompt_tokens: int) -> int:
    """Return the tokens a prompt advances in a step that it shares with others."""
    return max(MIN_CHUNK_TOKENS, num_prompt_tokens // 16)


class Scheduler:
    """Keep the waiting and the running rows.

    Args:
        step_tokens: token budget of a step.
        max_sequences: the most rows running at once.
        alone: let no row's arithmetic depend on the others.
    """

    def __init__(self, step_tokens: int, max_sequences: int, *, alone: bool = False):
        self.step_tokens = step_tokens
        self.max_sequences = max_sequences
        self.alone = alone
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a row behind those that wait."""
        self.waiting.append(sequence)

    def admit(self, fits: Callable[[int], bool]) -> Sequence | None:
        """Move the first waiting row to the running ones if its whole need `fits`, else return None."""
        if not self.waiting or len(self.running) >= self.max_sequences:
            return None
        if not fits(self.waiting[0].num_pages):
            return None
        self.running.append(self.waiting.popleft())
        return self.running[-1]

    def finish(self, sequence: Sequence) -> None:
        """Take a row off the running ones."""
        self.running.remove(sequence)

    def plan_step(self) -> StepPlan:
        """Choose the next step's tokens; an empty plan means that nothing runs."""
        decodes = tuple(s for s in self.running if not s.in_prefill)
        prefills = [s for s in self.running if s.in_prefill]
        if not self.alone:
            return StepPlan(decodes, plan_chunks(prefills, self.step_tokens - len(decodes)))
        if prefills:  # first, so that many rows decode together
            return StepPlan((), plan_chunks(prefills[:1], self.step_tokens))
        return StepPlan(decodes[:ALONE_DECODES], ())


def plan_chunks(prefills: list[Sequence], budget_tokens: int) -> tuple[Chunk, ...]:
    """Divide a step's prompt tokens among rows in prefill, oldest first.

    Each takes its adaptive chunk while the budget lasts. What is left then lengthens the oldest rows' chunks: a
    short step wastes the matrix units, and earlier rows that decode sooner share their steps with later prefills.
    """
    sizes: list[int] = []
    for sequence in prefills:
        size = min(sequence.chunk_limit, chunk_size(sequence.num_prompt_tokens), budget_tokens)
        if sequence.whole_chunks and size < sequence.chunk_limit:
            size = sequence.chunk_limit if sequence.chunk_limit <= budget_tokens else 0
        if size <= 0:
            break
        sizes.append(size)
        budget_tokens -= size
    for i, sequence in enumerate(prefills[: len(sizes)]):
        more = min(sequence.chunk_limit - sizes[i], budget_tokens)
        sizes[i] += more
        budget_tokens -= more
    return tuple(Chunk(sequence, size) for sequence, size in zip(prefills, sizes, strict=False))
