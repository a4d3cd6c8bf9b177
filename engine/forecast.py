"""How long planned requests will take, and how many pages they will hold.

A step's time is modelled as a sum over what it does, with one coefficient for each part, fitted by least squares to
the steps that ran. The forecast replays the scheduler's decisions over the planned requests and adds up the steps'
times and the pages held; no model runs. Only the fit imports torch.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from engine.memory_division import Budget
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence
from kvcache.sizes.compressed import WHOLE_PAGE_TOKENS

NUM_PARTS = 5


def step_parts(plan: StepPlan, *, after: bool) -> tuple[float, ...]:
    """Return what a step does: 1, prompt tokens, thousands of keys these attend to, decoded tokens, thousands of keys.

    Args:
        after: the sequences count the step's tokens already.
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
    """The normal equations of the fit, summed over steps. Relative errors are fitted, so that short steps count too."""

    products: list[list[float]] = field(default_factory=lambda: [[0.0] * NUM_PARTS for _ in range(NUM_PARTS)])
    targets: list[float] = field(default_factory=lambda: [0.0] * NUM_PARTS)
    num_steps: int = 0
    steps_s: float = 0.0

    def add(self, parts: tuple[float, ...], step_s: float) -> None:
        """Add a step to the fit."""
        weight = 1 / max(step_s, 1e-6)
        for i, x in enumerate(parts):
            self.targets[i] += x * step_s * weight
            for j, y in enumerate(parts):
                self.products[i][j] += x * y * weight
        self.num_steps += 1
        self.steps_s += step_s

    def coefficients(self) -> tuple[float, ...]:
        """Return the seconds of one unit of each part, none of them negative.

        As long as a coefficient comes out negative, the part with the most negative one is left out.
        """
        import torch

        used = [i for i in range(NUM_PARTS) if self.products[i][i] > 0]
        while used:
            matrix = torch.tensor(
                [[self.products[i][j] for j in used] for i in used], dtype=torch.float64, device="cpu"
            )
            scale = matrix.diagonal().sqrt()
            target = torch.tensor([self.targets[i] for i in used], dtype=torch.float64, device="cpu") / scale
            # A little of the identity decides between parts that always occurred together.
            scaled = matrix / scale[:, None] / scale + 1e-9 * torch.eye(
                len(used), dtype=torch.float64, device="cpu"
            )
            found = torch.linalg.solve(scaled, target) / scale
            if found.min() >= 0:
                values = dict(zip(used, found.tolist(), strict=True))
                return tuple(values.get(i, 0.0) for i in range(NUM_PARTS))
            used.pop(int((found * scale).argmin()))
        return (0.0,) * NUM_PARTS


@dataclass(frozen=True)
class PlannedRow:
    """A request to forecast.

    Args:
        prompt_tokens: tokens of its prompt.
        new_tokens: tokens of its answer.
        num_pages: pages reserved for it (`request_pages`).
        shared_tokens: prompt tokens whose keys and values a shared prefix holds.
        pages_after: the pages that it holds after so many tokens are computed (`held_pages`); None: all pages are
            held from the beginning.
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
    """Count the pages that a sequence holds, in place of its cache."""

    def __init__(self, sequence: Sequence, row: PlannedRow) -> None:
        self._sequence, self._row = sequence, row
        self.num_pages = 0 if row.pages_after else row.num_pages
        self.shares = row.shared_tokens > 0

    def update(self) -> None:
        """Count again if the last tokens computed may have changed the number."""
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
    alone: bool = False,
) -> Forecast:
    """Replay the steps that requests need in their order; draft tokens are not foreseen.

    Args:
        coefficients: seconds of one unit of each part of a step (`step_parts`).
        prefix: the prefix that the requests share. It holds pages of its own and, where there are prefill buffers,
            one of these.
        alone: as in `Scheduler`.
    """
    scheduler = Scheduler(budget.step_tokens, budget.max_sequences, budget.layout.chunks, alone=alone)
    source = iter(rows)
    free_pages, prefix_pages, num_prefill_buffers = budget.capacity_pages, 0, budget.num_prefill_buffers
    if prefix:
        free_pages, num_prefill_buffers = free_pages - prefix.num_pages, num_prefill_buffers - 1
        prefix_pages = prefix.pages_after(prefix.prompt_tokens) if prefix.pages_after else prefix.num_pages
    seconds, peak_pages = 0.0, 0

    def fits(pages: int) -> bool:
        if not scheduler.running:  # the plan made sure of it; the engine frees a prefix that no sequence uses
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
            admitted.cache = _Pages(admitted, waiting)
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
