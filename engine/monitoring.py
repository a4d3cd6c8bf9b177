"""What the pool held, step by step, and what the lanes kept: counts alone, no tensor of a step is touched."""

import time
from dataclasses import dataclass

from engine.cache.base import CacheBackend
from engine.forecast import SpeedFit, step_parts
from engine.scheduler import StepPlan
from kvcache.sequence.lane_usage import LaneUsage

MAX_SAMPLES = 4096  # even


@dataclass(frozen=True)
class StepSample:
    """One step: the rows as it found them, the bytes as it left them, before rows that ended were freed.

    Attributes:
        step: its number, from 1.
        elapsed_s: seconds from the making of the engine to the end of the step.
        step_s: seconds the step took.
        num_tokens: computed, guesses that did not come true included.
        num_prefills: rows in prefill, those that had to sit out the step included.
        num_decodes: rows in decode.
        num_prefill_buffers: prefill buffers held, shared prefixes' included; 0 where nothing is compressed.
        kv_used_bytes: of the pool; where the pool was never fuller, the most since the step before.
        kv_reserved_bytes: of the pool, for the rows there are.
    """

    step: int
    elapsed_s: float
    step_s: float
    num_tokens: int
    num_prefills: int
    num_decodes: int
    num_prefill_buffers: int
    kv_used_bytes: int
    kv_reserved_bytes: int


class Monitor:
    """Keep samples of an engine's steps and the totals of its lanes.

    Of a long run not every step is kept: the steps are cut into equal spans, and a span's fullest step stands for it.
    Spans are of one step, then of 2, 4, 8…, so that there are never more than `MAX_SAMPLES`, and the peak is always
    among them.

    Args:
        cache: what is sampled.
        block_bytes: size of its blocks.

    Attributes:
        samples: of the steps, in order.
        lanes: what the rows that ended kept, added up; None where nothing is compressed or no row ended yet.
        num_steps: steps noted.
        speed: what the steps tell of how long others will take.
    """

    def __init__(self, cache: CacheBackend, block_bytes: int):
        self._cache = cache
        self._block_bytes = block_bytes
        self._started_s = time.perf_counter()
        self._span_steps = 1
        self._peak_bytes = 0
        self._steps_s = self._used_byte_s = 0.0
        self.samples: list[StepSample] = []
        self.lanes: LaneUsage | None = None
        self.speed = SpeedFit()
        self.num_steps = 0

    @property
    def pool_bytes(self) -> int:
        """Bytes of all blocks."""
        return self._cache.num_blocks * self._block_bytes

    @property
    def mean_used_bytes(self) -> float:
        """Bytes of the pool in use, averaged over the time of all steps, those without a sample included."""
        return self._used_byte_s / self._steps_s if self._steps_s else 0.0

    def note_step(self, plan: StepPlan, num_rows: int, step_s: float) -> None:
        """Sample the pool at the end of a step.

        Args:
            num_rows: that were running, whether the step computed a token of theirs or not.
        """
        cache, num_decodes = self._cache, len(plan.decodes) + len(plan.drafts)
        used, peak = cache.used_bytes, cache.peak_bytes
        if peak > self._peak_bytes:  # while rows were admitted, perhaps, and a prefix was dropped after it
            used = self._peak_bytes = peak
        self.speed.add(step_parts(plan, after=True), step_s)
        self._steps_s += step_s
        self._used_byte_s += used * step_s
        sample = StepSample(
            step=self.num_steps + 1,
            elapsed_s=time.perf_counter() - self._started_s,
            step_s=step_s,
            num_tokens=plan.num_tokens,
            num_prefills=num_rows - num_decodes,
            num_decodes=num_decodes,
            num_prefill_buffers=cache.num_prefill_buffers,
            kv_used_bytes=used,
            kv_reserved_bytes=(cache.num_blocks - cache.num_available) * self._block_bytes,
        )
        if self.num_steps % self._span_steps:
            self.samples[-1] = _fuller(self.samples[-1], sample)
        else:
            if len(self.samples) == MAX_SAMPLES:
                self.samples = [
                    _fuller(*pair) for pair in zip(self.samples[::2], self.samples[1::2], strict=True)
                ]
                self._span_steps *= 2
            self.samples.append(sample)
        self.num_steps += 1

    def note_row(self, usage: LaneUsage | None) -> None:
        """Add what the lanes of a row that ends keep."""
        if usage:
            self.lanes = self.lanes + usage if self.lanes else usage


def _fuller(first: StepSample, second: StepSample) -> StepSample:
    return second if second.kv_used_bytes > first.kv_used_bytes else first
