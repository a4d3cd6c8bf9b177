"""Guesses at what rows will say, taken from what they have read and said (prompt lookup), where that saves time.

When few rows are left in decode, a step is mostly the reading of the model's weights, and more tokens cost little. What
an answer copies from its prompt is then guessed and computed together with the token before it: every guess that is
what the row would have chosen saves a step (Saxena, 2023, "Prompt lookup decoding"). The row chooses each token from
the logits that stand before it, as ever, so nothing it says depends on guesses; a row that samples draws as often as
without them. Decisions alone, no torch.
"""

from dataclasses import dataclass, replace

from engine.scheduler import Draft, StepPlan
from engine.sequence import Sequence

STEP_TOKENS = 16  # of a step with guesses: where on a CPU arithmetic begins to outweigh the weights
MAX_GUESSES = 7
NGRAM_TOKENS = (3, 2)
TRIAL_STEPS = 4
RETRY_STEPS = 128


class NGramIndex:
    """Find what followed the last tokens of a list that only grows, where they stood in it before.

    Args:
        tokens: the list, which the owner goes on filling.
    """

    def __init__(self, tokens: list[int]):
        self._tokens = tokens
        self._starts: dict[tuple[int, ...], int] = {}  # of what followed an n-gram the last time
        self._num_indexed = 0

    def guess(self, num_tokens: int) -> tuple[int, ...]:
        """Return what followed the longest n-gram the list ends with, or nothing; a cycle is gone round again."""
        tokens = self._tokens
        end = len(tokens)
        for start in range(self._num_indexed, end):
            for size in NGRAM_TOKENS:
                if start >= size:
                    self._starts[tuple(tokens[start - size : start])] = start
        self._num_indexed = end
        for size in NGRAM_TOKENS:
            start = self._starts.get(tuple(tokens[end - size :]))
            if start is not None:
                return tuple(tokens[start + i % (end - start)] for i in range(num_tokens))
        return ()


@dataclass(frozen=True)
class Pace:
    """What a kind of step gets done: tokens and seconds of a step, on average, later steps counting more."""

    tokens: float = 0.0
    seconds: float = 0.0
    num_steps: int = 0

    def after(self, num_tokens: int, step_s: float) -> "Pace":
        """Return the pace with one more step."""
        weight = max(1 / 8, 1 / (self.num_steps + 1))
        return Pace(
            self.tokens + weight * (num_tokens - self.tokens),
            self.seconds + weight * (step_s - self.seconds),
            self.num_steps + 1,
        )

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Gate:
    """Whether guesses pay, for steps of one number of rows: those without and those with them, as measured.

    Each kind is tried first, then the faster one is taken, and the other tried again rarely.
    """

    plain: Pace = Pace()
    guessed: Pace = Pace()

    @property
    def is_open(self) -> bool:
        """Whether the next step should have guesses."""
        if self.plain.num_steps < TRIAL_STEPS:
            return False
        if self.guessed.num_steps < TRIAL_STEPS:
            return True
        retries = (self.plain.num_steps + self.guessed.num_steps) % RETRY_STEPS < TRIAL_STEPS
        return (self.guessed.tokens_per_s > self.plain.tokens_per_s) != retries

    def after(self, num_tokens: int, step_s: float, *, guessed: bool) -> "Gate":
        """Return the gate with one more step."""
        kind = "guessed" if guessed else "plain"
        return replace(self, **{kind: getattr(self, kind).after(num_tokens, step_s)})


class Drafter:
    """Add guesses to steps of few decodes and nothing else.

    Attributes:
        drafted_tokens: guesses computed.
        accepted_tokens: of these, those that were chosen and saved a step.
    """

    def __init__(self):
        self.drafted_tokens = self.accepted_tokens = 0
        self._gates: dict[int, Gate] = {}  # by the number of rows

    def draft(self, plan: StepPlan) -> StepPlan:
        """Return the plan with guesses behind the tokens of those rows that have some, if that pays."""
        num_rows = len(plan.decodes)
        if plan.chunks or not 0 < num_rows <= STEP_TOKENS // 2 or not self._gate(num_rows).is_open:
            return plan
        most = min(MAX_GUESSES, STEP_TOKENS // num_rows - 1)
        drafts = tuple(Draft(sequence, _guess(sequence, most)) for sequence in plan.decodes)
        return StepPlan(
            tuple(draft.sequence for draft in drafts if not draft.guesses),
            (),
            tuple(draft for draft in drafts if draft.guesses),
        )

    def note(self, plan: StepPlan, num_accepted: int, step_s: float) -> None:
        """Hear how many guesses of a step were accepted and how long it took."""
        num_rows = len(plan.decodes) + len(plan.drafts)
        self.drafted_tokens += sum(len(draft.guesses) for draft in plan.drafts)
        self.accepted_tokens += num_accepted
        if not plan.chunks:
            gate = self._gate(num_rows)
            self._gates[num_rows] = gate.after(num_rows + num_accepted, step_s, guessed=bool(plan.drafts))

    def _gate(self, num_rows: int) -> Gate:
        return self._gates.get(num_rows, Gate())


def _guess(sequence: Sequence, most: int) -> tuple[int, ...]:
    """Return guesses at what follows a row's last token: no more than it may say, or its cache takes uncompressed."""
    left = sequence.request.sampling.max_new_tokens - sequence.num_generated
    most = min(most, left - 1, sequence.cache.open_tokens - 1)
    if most < 1:
        return ()
    sequence.ngrams = sequence.ngrams or NGramIndex(sequence.token_ids)
    return sequence.ngrams.guess(most)
