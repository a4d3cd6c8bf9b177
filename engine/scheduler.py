"""What the next step computes and which sequence is admitted: decisions alone, no torch.

Sequences are admitted in order, each when all pages of its prompt and its longest answer are free, so none is ever
preempted. A step first takes one token of every sequence in decode; prompt chunks fill the rest of the token budget.

In most libraries a matrix product rounds a row in a way that depends on the number of rows. Where results must be
batch-invariant, a step is therefore a chunk of one sequence, as long as that sequence would have it alone, or one
token of at most `ALONE_DECODES` sequences, which the runner pads to that number.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.sequence import Sequence
from kvcache.sizes.chunk_schedule import ChunkSchedule

MIN_CHUNK_TOKENS = 64
ALONE_DECODES = 16


@dataclass(frozen=True)
class Chunk:
    """The next `num_tokens` prompt tokens of a sequence."""

    sequence: Sequence
    num_tokens: int

    @property
    def token_ids(self) -> list[int]:
        """The prompt tokens."""
        start = self.sequence.num_computed_tokens
        return self.sequence.token_ids[start : start + self.num_tokens]

    @property
    def num_choices(self) -> int:
        """How many of its last tokens a token is chosen after: 1 where the prompt ends with this chunk, else 0."""
        ends = self.sequence.num_computed_tokens + self.num_tokens >= self.sequence.num_prompt_tokens
        return int(ends and not self.sequence.is_prefix)


@dataclass(frozen=True)
class Draft:
    """The last token of a sequence in decode, and draft tokens after it."""

    sequence: Sequence
    draft_tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return 1 + len(self.draft_tokens)

    @property
    def num_choices(self) -> int:
        """How many of its last tokens a token is chosen after: all."""
        return self.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute."""
        return [self.sequence.token_ids[-1], *self.draft_tokens]


@dataclass(frozen=True)
class StepPlan:
    """What one step computes: one token of each sequence in `decodes`, several of each in `drafts`, prompt chunks."""

    decodes: tuple[Sequence, ...]
    chunks: tuple[Chunk, ...]
    drafts: tuple[Draft, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, draft tokens included."""
        return len(self.decodes) + sum(span.num_tokens for span in self.drafts + self.chunks)

    def shares(self, seconds: float) -> list[tuple[Sequence, float]]:
        """Divide a step's seconds among its sequences in proportion to their tokens."""
        counts = [(sequence, 1) for sequence in self.decodes]
        counts += [(span.sequence, span.num_tokens) for span in self.drafts + self.chunks]
        return [(sequence, seconds * count / self.num_tokens) for sequence, count in counts]


def step_chunk_tokens(num_prompt_tokens: int) -> int:
    """Return how many tokens a prompt advances in a step that it shares with other sequences."""
    return max(MIN_CHUNK_TOKENS, num_prompt_tokens // 16)


class Scheduler:
    """Keep the waiting and the running sequences.

    Args:
        step_tokens: token budget of a step.
        max_sequences: the most sequences running at once.
        chunks: where a prompt may be cut.
        alone: let no sequence's arithmetic depend on the others.
    """

    def __init__(
        self,
        step_tokens: int,
        max_sequences: int,
        chunks: ChunkSchedule = ChunkSchedule(),  # noqa: B008 - frozen
        *,
        alone: bool = False,
    ) -> None:
        self.step_tokens = step_tokens
        self.max_sequences = max_sequences
        self.chunks = chunks
        self.alone = alone
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to the waiting ones."""
        self.waiting.append(sequence)

    def admit(self, fits: Callable[[int], bool]) -> Sequence | None:
        """Move the first waiting sequence to the running ones if all its pages `fits`, and return it; else None."""
        if not self.waiting or len(self.running) >= self.max_sequences:
            return None
        if not fits(self.waiting[0].num_pages):
            return None
        self.running.append(self.waiting.popleft())
        return self.running[-1]

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence from the running ones."""
        self.running.remove(sequence)

    def plan_step(self) -> StepPlan:
        """Choose the next step's tokens; an empty plan means that nothing runs."""
        decodes = tuple(s for s in self.running if not s.in_prefill)
        prefills = [s for s in self.running if s.in_prefill]
        if not self.alone:
            return StepPlan(decodes, plan_chunks(prefills, self.step_tokens - len(decodes), self.chunks))
        if prefills:  # first, so that many sequences decode together
            return StepPlan((), plan_chunks(prefills[:1], self.step_tokens, self.chunks))
        return StepPlan(decodes[:ALONE_DECODES], ())


def plan_chunks(prefills: list[Sequence], budget_tokens: int, chunks: ChunkSchedule) -> tuple[Chunk, ...]:
    """Divide a step's prompt tokens among sequences in prefill, oldest first.

    Each takes its adaptive chunk while the budget lasts. The rest of the budget then lengthens the chunks of the
    oldest: a short step wastes the matrix units, and a sequence that decodes sooner shares its steps with later
    prefills.
    """
    limits = [chunks.step_limit(s.num_computed_tokens, s.num_prompt_tokens) for s in prefills]
    sizes: list[int] = []
    for sequence, limit in zip(prefills, limits, strict=True):
        size = min(limit, step_chunk_tokens(sequence.num_prompt_tokens), budget_tokens)
        if chunks.whole_chunks and size < limit:
            size = limit if limit <= budget_tokens else 0
        if size <= 0:
            break
        sizes.append(size)
        budget_tokens -= size
    for i in range(len(sizes)):
        more = min(limits[i] - sizes[i], budget_tokens)
        sizes[i] += more
        budget_tokens -= more
    return tuple(Chunk(sequence, size) for sequence, size in zip(prefills, sizes, strict=False))
