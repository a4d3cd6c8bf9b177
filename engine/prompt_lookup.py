"""Guesses at what rows will say, taken from what they have read and said (prompt lookup), where that saves time.

When few rows are left in decode, a step is mostly the reading of the model's weights, and more tokens cost little. What
an answer copies from its prompt is then guessed and computed together with the token before it: every guess that is
what the row would have chosen saves a step (Saxena, 2023, "Prompt lookup decoding"). The row chooses each token from
the logits that stand before it, as ever, so what it says depends on guesses no more than on the rows beside it: steps
of more tokens round otherwise. A row that samples draws as often as without them. Decisions alone, no torch.
"""

from dataclasses import dataclass, replace
from itertools import takewhile

from engine.scheduler import Draft, StepPlan
from engine.sequence import Sequence

STEP_TOKENS = 16  # of a step with guesses: where on a CPU arithmetic begins to outweigh the weights
MAX_GUESSES = 7
NGRAM_TOKENS = (3, 2)
RETRY_STEPS = 64
INDEXED_TOKENS = 16_384  # of a longer row the last ones: an index takes some 300 bytes a token


class Lookup:
    """Find what followed the last tokens of a row where they stood before, and see whether it follows again.

    Args:
        tokens: of prompt and answer, which the owner goes on appending to.
    """

    def __init__(self, tokens: list[int]):
        self._tokens = tokens
        self._starts: dict[tuple[int, ...], int] = {}  # of what followed an n-gram the last time
        self._num_indexed = max(0, len(tokens) - INDEXED_TOKENS)
        self._watched: tuple[int, ...] = ()
        self._watched_from = 0

    def guess(self, num_tokens: int) -> tuple[int, ...]:
        """Return what followed the longest n-gram the row ends with, or nothing; a cycle is gone round again."""
        tokens, end = self._tokens, len(self._tokens)
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

    def watch(self, guesses: tuple[int, ...]) -> None:
        """See from now on whether guesses come true, computed or not."""
        self._watched, self._watched_from = guesses, len(self._tokens)

    @property
    def is_watching(self) -> bool:
        return bool(self._watched)

    def settle(self) -> float | None:
        """Return the share of the watched guesses that came true, and watch no more; None as long as that is open."""
        said = self._tokens[self._watched_from : self._watched_from + len(self._watched)]
        right = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(said, self._watched, strict=False))
        )
        if right == len(said) < len(self._watched) or not self._watched:
            return None
        share, self._watched = right / len(self._watched), ()
        return share


@dataclass(frozen=True)
class Mean:
    """A mean in which later values count more."""

    value: float = 0.0
    count: int = 0

    def after(self, value: float) -> "Mean":
        """Return the mean with one more value."""
        weight = max(1 / 8, 1 / (self.count + 1))
        return Mean(self.value + weight * (value - self.value), self.count + 1)


@dataclass(frozen=True)
class Gate:
    """Whether guesses pay, for steps of one number of rows, by the seconds that steps without and with them take.

    What a step with guesses takes is hoped to be little until it has been measured, and so again after `RETRY_STEPS`.
    """

    plain_s: Mean = Mean()
    guessed_s: Mean = Mean()
    num_plain: int = 0  # steps since the last one with guesses

    def opens(self, num_rows: int, num_expected: float) -> bool:
        """Whether a step that gets so many tokens more than rows gets more of them in a second."""
        if not self.plain_s.count:
            return False
        is_known = self.guessed_s.count and self.num_plain < RETRY_STEPS
        guessed_s = self.guessed_s.value if is_known else self.plain_s.value
        return (num_rows + num_expected) * self.plain_s.value > num_rows * guessed_s

    def after(self, step_s: float, *, guessed: bool) -> "Gate":
        """Return the gate with one more step."""
        if not guessed:
            return replace(self, plain_s=self.plain_s.after(step_s), num_plain=self.num_plain + 1)
        known = self.guessed_s if self.num_plain < RETRY_STEPS else Mean()
        return replace(self, guessed_s=known.after(step_s), num_plain=0)


class Drafter:
    """Add guesses to steps of few decodes and nothing else, where that pays.

    How many guesses come true is seen whether they are computed or not; what they cost, only when they are.

    Args:
        num_logits: after how many tokens of a step the next one may be chosen.

    Attributes:
        drafted_tokens: guesses computed.
        accepted_tokens: of these, those that were chosen and saved a step.
    """

    def __init__(self, num_logits: int):
        self._step_tokens = min(STEP_TOKENS, num_logits)
        self.drafted_tokens = self.accepted_tokens = 0
        self._share = Mean()  # of the guesses that come true
        self._gates: dict[int, Gate] = {}  # by the number of rows

    def draft(self, plan: StepPlan) -> StepPlan:
        """Return the plan with guesses behind the tokens of those rows that have some, if that pays."""
        num_rows = len(plan.decodes)
        if plan.chunks or not 0 < num_rows <= self._step_tokens // 2:
            return plan
        most = min(MAX_GUESSES, self._step_tokens // num_rows - 1)
        drafts = [Draft(sequence, self._guess(sequence, most)) for sequence in plan.decodes]
        num_expected = self._share.value * sum(len(draft.draft_tokens) for draft in drafts)
        opens = self._gate(num_rows).opens(num_rows, num_expected)
        for draft in drafts:
            lookup = draft.sequence.lookup
            if draft.draft_tokens and (opens or not lookup.is_watching):
                lookup.watch(draft.draft_tokens)
        if not opens:
            return plan
        plain = tuple(draft.sequence for draft in drafts if not draft.draft_tokens)
        return StepPlan(plain, (), tuple(draft for draft in drafts if draft.draft_tokens))

    def note(self, plan: StepPlan, num_accepted: int, step_s: float) -> None:
        """Hear how many guesses of a step were accepted and how long it took."""
        self.drafted_tokens += sum(len(draft.draft_tokens) for draft in plan.drafts)
        self.accepted_tokens += num_accepted
        if not plan.chunks:
            num_rows = len(plan.decodes) + len(plan.drafts)
            self._gates[num_rows] = self._gate(num_rows).after(step_s, guessed=bool(plan.drafts))

    def _gate(self, num_rows: int) -> Gate:
        return self._gates.get(num_rows, Gate())

    def _guess(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Return guesses at what follows a row's last token: no more than it may say, or its open pages hold."""
        sequence.lookup = sequence.lookup or Lookup(sequence.token_ids)
        share = sequence.lookup.settle()
        if share is not None:
            self._share = self._share.after(share)
        left = sequence.request.sampling.max_new_tokens - sequence.num_generated
        most = min(most, left - 1, sequence.cache.open_tokens - 1)
        return sequence.lookup.guess(most) if most > 0 else ()
