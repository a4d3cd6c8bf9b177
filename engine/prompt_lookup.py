"""Prompt lookup: draft tokens from n-grams of a sequence's own prompt and output, in steps where they save time.

When few sequences are left in decode, a step mostly reads the model's weights, and more tokens cost little. The tokens
that followed the same n-gram before are then computed together with the token before them. Every draft token that the
sequence would have chosen saves a step (Saxena, 2023, "Prompt lookup decoding"). Each token is still chosen from the
logits before it, so draft tokens change an output no more than other sequences in the step do: through the rounding of
longer steps. A sequence that samples draws as many random numbers as without them. Decisions alone, no torch.
"""

from dataclasses import dataclass, replace
from itertools import takewhile

from engine.scheduler import Draft, StepPlan
from engine.sequence import Sequence

STEP_TOKENS = 16  # in a step with draft tokens: with more, a CPU's arithmetic outweighs reading the weights
MAX_DRAFT_TOKENS = 7
NGRAM_TOKENS = (3, 2)
RETRY_STEPS = 64
INDEXED_TOKENS = 16_384  # the last tokens of a longer sequence: the index takes some 300 bytes a token


class Lookup:
    """Find what followed the last n-gram of a sequence before, and measure how often it follows again.

    Args:
        tokens: of prompt and output; the owner appends to the list.
    """

    def __init__(self, tokens: list[int]):
        self._tokens = tokens
        self._starts: dict[tuple[int, ...], int] = {}  # n-gram → index of the token after its last occurrence
        self._num_indexed = max(0, len(tokens) - INDEXED_TOKENS)
        self._watched: tuple[int, ...] = ()
        self._watched_from = 0

    def propose(self, num_tokens: int) -> tuple[int, ...]:
        """Return the tokens that followed the sequence's last n-gram before, the longest one found, or nothing.

        Where fewer than `num_tokens` follow, they repeat as a cycle.
        """
        tokens, end = self._tokens, len(self._tokens)
        for start in range(self._num_indexed, end):
            for size in NGRAM_TOKENS:
                if start >= size:
                    self._starts[tuple(tokens[start - size : start])] = start
        self._num_indexed = end
        for size in NGRAM_TOKENS:
            found = self._starts.get(tuple(tokens[end - size :]))
            if found is not None:
                return tuple(tokens[found + i % (end - found)] for i in range(num_tokens))
        return ()

    def watch(self, draft_tokens: tuple[int, ...]) -> None:
        """Compare draft tokens, computed or not, with the tokens that are chosen from now on."""
        self._watched, self._watched_from = draft_tokens, len(self._tokens)

    @property
    def is_watching(self) -> bool:
        return bool(self._watched)

    def settle(self) -> float | None:
        """Return the share of the watched draft tokens that were chosen, and stop watching.

        None: no tokens are watched, or those chosen so far do not decide it.
        """
        chosen = self._tokens[self._watched_from : self._watched_from + len(self._watched)]
        right = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, self._watched, strict=False))
        )
        if right == len(chosen) < len(self._watched) or not self._watched:
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
    """Whether draft tokens pay in steps of one number of sequences, by the measured seconds without and with them.

    Until a step with draft tokens has been measured, it is assumed to take as long as one without; so again
    `RETRY_STEPS` steps after the last one.
    """

    plain_s: Mean = Mean()
    drafted_s: Mean = Mean()
    num_plain: int = 0  # steps since the last one with draft tokens

    def opens(self, num_sequences: int, num_expected: float) -> bool:
        """Whether a step with draft tokens, `num_expected` of which are accepted, gives more tokens a second."""
        if not self.plain_s.count:
            return False
        is_known = self.drafted_s.count and self.num_plain < RETRY_STEPS
        drafted_s = self.drafted_s.value if is_known else self.plain_s.value
        return (num_sequences + num_expected) * self.plain_s.value > num_sequences * drafted_s

    def after(self, step_s: float, *, drafted: bool) -> "Gate":
        """Return the gate with one more step measured."""
        if not drafted:
            return replace(self, plain_s=self.plain_s.after(step_s), num_plain=self.num_plain + 1)
        known = self.drafted_s if self.num_plain < RETRY_STEPS else Mean()
        return replace(self, drafted_s=known.after(step_s), num_plain=0)


class NgramProposer:
    """Add draft tokens to steps of few decodes and no prompt chunk, where that pays.

    The share of draft tokens that are chosen is measured whether they are computed or not; their cost only when they
    are.

    Args:
        num_logits: the most tokens of a step whose logits are computed.

    Attributes:
        drafted_tokens: draft tokens computed.
        accepted_tokens: those of them that were chosen and saved a step.
    """

    def __init__(self, num_logits: int):
        self._step_tokens = min(STEP_TOKENS, num_logits)
        self.drafted_tokens = self.accepted_tokens = 0
        self._share = Mean()  # of the draft tokens that are chosen
        self._gates: dict[int, Gate] = {}  # by the number of sequences

    def propose(self, plan: StepPlan) -> StepPlan:
        """Return the plan with draft tokens for the sequences that have some, if that pays."""
        num_sequences = len(plan.decodes)
        if plan.chunks or not 0 < num_sequences <= self._step_tokens // 2:
            return plan
        most = min(MAX_DRAFT_TOKENS, self._step_tokens // num_sequences - 1)
        drafts = [Draft(sequence, self._draft_tokens(sequence, most)) for sequence in plan.decodes]
        num_expected = self._share.value * sum(len(draft.draft_tokens) for draft in drafts)
        opens = self._gate(num_sequences).opens(num_sequences, num_expected)
        for draft in drafts:
            lookup = draft.sequence.lookup
            if draft.draft_tokens and (opens or not lookup.is_watching):
                lookup.watch(draft.draft_tokens)
        if not opens:
            return plan
        plain = tuple(draft.sequence for draft in drafts if not draft.draft_tokens)
        return StepPlan(plain, (), tuple(draft for draft in drafts if draft.draft_tokens))

    def note(self, plan: StepPlan, num_accepted: int, step_s: float) -> None:
        """Measure a step that was computed: how many draft tokens were accepted, and how long it took."""
        self.drafted_tokens += sum(len(draft.draft_tokens) for draft in plan.drafts)
        self.accepted_tokens += num_accepted
        if not plan.chunks:
            num_sequences = len(plan.decodes) + len(plan.drafts)
            self._gates[num_sequences] = self._gate(num_sequences).after(step_s, drafted=bool(plan.drafts))

    def _gate(self, num_sequences: int) -> Gate:
        return self._gates.get(num_sequences, Gate())

    def _draft_tokens(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Return draft tokens for a sequence, within its `max_new_tokens` and the room of its open pages."""
        sequence.lookup = sequence.lookup or Lookup(sequence.token_ids)
        share = sequence.lookup.settle()
        if share is not None:
            self._share = self._share.after(share)
        left = sequence.request.sampling.max_new_tokens - sequence.num_generated
        most = min(most, left - 1, sequence.cache.open_tokens - 1)
        return sequence.lookup.propose(most) if most > 0 else ()
