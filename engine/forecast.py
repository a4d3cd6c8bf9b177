"""How long steps take, learnt from those that ran, and how long rows that have not run will take, and what they hold.

A step's time is a sum of what it does, with a coefficient for each part fitted by least squares. The forecast plays the
scheduler's own decisions over the rows, adds up the steps and the pages held in them; nothing is computed. No torch but
for the fit.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from engine.budget import Budget
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence
from kvcache.sizes.compressed import WHOLE_PAGE_TOKENS

NUM_PARTS = 5


def step_parts(plan: StepPlan, *, after: bool) -> tuple[float, ...]:
    """Return what a step does: itself, prompt tokens, their keys in thousands, decoded tokens, their keys in thousands.

    Args:
        after: the step's tokens are counted already.
    """
    prefill = keys = decode_keys = 0.0
    for chunk in plan.chunks:
        before = chunk.sequence.num_computed_tokens - (chunk.num_tokens if after else 0)
        prefill += chunk.num_tokens
        keys += chunk.num_tokens * (before + chunk.num_tokens / 2)
    decodes = [(sequence, 1) for sequence in plan.decodes]
    decodes += [(draft.sequence, draft.num_tokens) for draft in plan.drafts]
    for sequence, count in decodes:
        decode_keys += count * sequence.num_computed_tokens
    return 1.0, prefill, keys / 1000, float(sum(count for _, count in decodes)), decode_keys / 1000


@dataclass
class SpeedFit:
    """Sums over steps, from which the coefficients follow; steps are weighted so that short ones count as well."""

    products: list[list[float]] = field(default_factory=lambda: [[0.0] * NUM_PARTS for _ in range(NUM_PARTS)])
    targets: list[float] = field(default_factory=lambda: [0.0] * NUM_PARTS)
    num_steps: int = 0
    steps_s: float = 0.0

    def add(self, parts: tuple[float, ...], step_s: float) -> None:
        """Count a step."""
        weight = 1 / max(step_s, 1e-6)
        for i, x in enumerate(parts):
            self.targets[i] += x * step_s * weight
            for j, y in enumerate(parts):
                self.products[i][j] += x * y * weight
        self.num_steps += 1
        self.steps_s += step_s

    def coefficients(self) -> tuple[float, ...]:
        """Return the seconds of one unit of each part, none negative.

        Parts whose coefficient would be negative are left out, one after the other, the most negative first.
        """
        import torch

        used = [i for i in range(NUM_PARTS) if self.products[i][i] > 0]
        while used:
            matrix = torch.tensor([[self.products[i][j] for j in used] for i in used], dtype=torch.float64)
            scale = matrix.diagonal().sqrt()
            target = torch.tensor([self.targets[i] for i in used], dtype=torch.float64) / scale
            # a trace of the identity decides between parts that always came together
            scaled = matrix / scale[:, None] / scale + 1e-9 * torch.eye(len(used), dtype=torch.float64)
            found = torch.linalg.solve(scaled, target) / scale
            if found.min() >= 0:
                values = dict(zip(used, found.tolist(), strict=True))
                return tuple(values.get(i, 0.0) for i in range(NUM_PARTS))
            used.pop(int((found * scale).argmin()))
        return (0.0,) * NUM_PARTS


@dataclass(frozen=True)
class PlannedRow:
    """A row to forecast.

    Args:
        prompt_tokens, new_tokens: of its prompt and its answer.
        num_pages: reserved for it.
        shared_tokens: of its prompt, those that are found computed.
        pages_after: pages it holds when so many tokens are computed; None: all, from the beginning.
    """

    prompt_tokens: int
    new_tokens: int
    num_pages: int
    shared_tokens: int = 0
    pages_after: Callable[[int], int] | None = None


@dataclass(frozen=True)
class Forecast:
    """The seconds of all steps, and the most pages that are held at once."""

    seconds: float
    peak_pages: int


class _Pages:
    """Stand for a row's cache in what the scheduler asks of it, and count the pages it holds."""

    whole_chunks = False

    def __init__(self, sequence: Sequence, row: PlannedRow, chunk_tokens: int | None):
        self._sequence, self._row, self._chunk_tokens = sequence, row, chunk_tokens
        self.num_pages = 0 if row.pages_after else row.num_pages
        self.shares = row.shared_tokens > 0

    @property
    def open_chunk_tokens(self) -> int:
        """See `SequenceHandle`."""
        if self._chunk_tokens is None:
            return self._sequence.num_prompt_tokens
        return self._chunk_tokens - self._sequence.num_computed_tokens % self._chunk_tokens

    def update(self) -> None:
        """Count again, if the tokens computed may have made a difference."""
        sequence, pages_after = self._sequence, self._row.pages_after
        answered = sequence.num_computed_tokens - sequence.num_prompt_tokens
        if pages_after and (answered <= 0 or answered % WHOLE_PAGE_TOKENS == 1):
            self.num_pages = pages_after(sequence.num_computed_tokens)


def forecast(
    rows: Iterable[PlannedRow],
    budget: Budget,
    coefficients: Items[float] = (0.0,) * NUM_PARTS,
    *,
    prefix: PlannedRow | None = None,
    chunk_tokens: int | None = None,
    alone: bool = False,
) -> Forecast:
    """Return what the steps come to that the rows need, in their order; drafts are not foreseen.

    Args:
        coefficients: seconds of each of a step's parts.
        prefix: what the rows share. It is held beside them, where there are prefill buffers with one of its own.
        chunk_tokens: where a compressing cache lets a prompt advance at most so many at a time.
        alone: as `Scheduler` takes it.
    """
    scheduler = Scheduler(budget.step_tokens, budget.max_sequences, alone=alone)
    source = iter(rows)
    free_pages, prefix_pages, num_prefill_buffers = budget.capacity_pages, 0, budget.num_prefill_buffers
    if prefix:
        free_pages, num_prefill_buffers = free_pages - prefix.num_pages, num_prefill_buffers - 1
        prefix_pages = prefix.pages_after(prefix.prompt_tokens) if prefix.pages_after else prefix.num_pages
    seconds, peak_pages = 0.0, 0

    def fits(pages: int) -> bool:
        if not scheduler.running:  # it was planned, so it does: the engine gives up a prefix that nobody uses
            return True
        num_prefills = sum(sequence.in_prefill for sequence in scheduler.running)
        return pages <= free_pages and (not budget.num_prefill_buffers or num_prefills < num_prefill_buffers)

    waiting: PlannedRow | None = None
    while True:
        while True:
            if waiting is None:
                waiting = next(source, None)
                if waiting is None:
                    break
                sampling = SamplingParams(max_new_tokens=max(1, waiting.new_tokens))
                scheduler.add(Sequence(Request(0, range(waiting.prompt_tokens), sampling), waiting.num_pages))
            admitted = scheduler.admit(fits)
            if admitted is None:
                break
            free_pages -= admitted.num_pages
            admitted.cache = _Pages(admitted, waiting, chunk_tokens)
            if waiting.shared_tokens:
                admitted.reuse(min(waiting.shared_tokens, admitted.num_prompt_tokens - 1))
            waiting = None
        plan = scheduler.plan_step()
        if not plan.num_tokens:
            return Forecast(seconds, peak_pages)
        seconds += sum(c * x for c, x in zip(coefficients, step_parts(plan, after=False), strict=True))
        advanced = [(s, 1) for s in plan.decodes] + [(c.sequence, c.num_tokens) for c in plan.chunks]
        for sequence, count in advanced:
            sequence.advance(count)
            sequence.cache.update()
        held = sum(sequence.cache.num_pages for sequence in scheduler.running)
        if any(sequence.cache.shares for sequence in scheduler.running) or free_pages >= 0:
            held += prefix_pages
        peak_pages = max(peak_pages, held)
        for sequence, _ in advanced:
            if not sequence.in_prefill:
                sequence.token_ids.append(0)
                if sequence.num_generated >= sequence.request.sampling.max_new_tokens:
                    scheduler.finish(sequence)
                    free_pages += sequence.num_pages
