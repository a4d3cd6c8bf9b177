"""How long steps take, learnt from those that ran, and how long rows that have not run will take.

A step's time is a sum of what it does, with a coefficient for each part fitted by least squares. The forecast plays the
scheduler's own decisions over the rows and adds up the steps; nothing is computed. No torch but for the fit.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from engine.budget import Budget
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence

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
    """A row to forecast: its prompt's tokens, those of its answer, and the pages it reserves."""

    prompt_tokens: int
    new_tokens: int
    num_pages: int


class _Pages:
    """Stand for a row's cache in what the scheduler asks of it."""

    whole_chunks = False

    def __init__(self, sequence: Sequence, chunk_tokens: int | None):
        self._sequence, self._chunk_tokens = sequence, chunk_tokens

    @property
    def open_chunk_tokens(self) -> int:
        """See `SequenceHandle`."""
        if self._chunk_tokens is None:
            return self._sequence.num_prompt_tokens
        return self._chunk_tokens - self._sequence.num_computed_tokens % self._chunk_tokens


def forecast_s(
    rows: Iterable[PlannedRow],
    budget: Budget,
    coefficients: Items[float],
    *,
    shared_tokens: int = 0,
    chunk_tokens: int | None = None,
    alone: bool = False,
) -> float:
    """Return the seconds of all steps that the rows need, in their order.

    Args:
        shared_tokens: of every prompt, those that are found computed.
        alone: as `Scheduler` takes it.
        chunk_tokens: where a compressing cache lets a prompt advance at most so many at a time.
    """
    scheduler = Scheduler(budget.step_tokens, budget.max_sequences, alone=alone)
    source = iter(rows)
    free_pages, seconds = budget.capacity_pages, 0.0

    def fits(pages: int) -> bool:
        num_prefills = sum(sequence.in_prefill for sequence in scheduler.running)
        return pages <= free_pages and (not budget.num_arenas or num_prefills < budget.num_arenas)

    while True:
        while True:
            if not scheduler.waiting:
                row = next(source, None)
                if row is None:
                    break
                request = Request(
                    0, range(row.prompt_tokens), SamplingParams(max_new_tokens=max(1, row.new_tokens))
                )
                scheduler.add(Sequence(request, row.num_pages))
            admitted = scheduler.admit(fits)
            if admitted is None:
                break
            free_pages -= admitted.num_pages
            admitted.cache = _Pages(admitted, chunk_tokens)
            if shared_tokens:
                admitted.reuse(min(shared_tokens, admitted.num_prompt_tokens - 1))
        plan = scheduler.plan_step()
        if not plan.num_tokens:
            return seconds
        seconds += sum(c * x for c, x in zip(coefficients, step_parts(plan, after=False), strict=True))
        for sequence, count in [(s, 1) for s in plan.decodes] + [
            (c.sequence, c.num_tokens) for c in plan.chunks
        ]:
            sequence.advance(count)
            if not sequence.in_prefill:
                sequence.token_ids.append(0)
                if sequence.num_generated >= sequence.request.sampling.max_new_tokens:
                    scheduler.finish(sequence)
                    free_pages += sequence.num_pages
