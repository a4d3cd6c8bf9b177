"""What the pool held in each step and what the lanes kept: counts only, no tensor of a step is read."""

import time
from dataclasses import dataclass

from engine.cache.base import CacheBackend
from engine.forecast import SpeedFit, step_parts
from engine.scheduler import StepPlan
from kvcache.sequence.lane_usage import LaneUsage

MAX_SAMPLES = 4096  # even


@dataclass(frozen=True)
class StepSample:
    """One step: sequences at its beginning, bytes at its end, before the sequences that ended were freed.

    Attributes:
        step: its number, from 1.
        elapsed_s: seconds from the start of the engine to the end of the step.
        step_s: seconds that the step took.
        num_tokens: tokens computed, rejected draft tokens included.
        num_prefills: sequences in prefill, those without a token in the step included.
        num_decodes: sequences in decode.
        num_prefill_buffers: prefill buffers in use, those of shared prefixes included; 0 where nothing is compressed.
        kv_used_bytes: bytes of the pool in use; if the peak rose since the step before, the peak.
        kv_reserved_bytes: bytes of the pool reserved for running sequences.
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

    A long run has more steps than samples: steps are divided into equal spans, and each span keeps the sample of its
    fullest step. Spans have 1 step, then 2, 4, 8 and so on, so there are at most `MAX_SAMPLES`, the peak among them.

    Args:
        cache: the cache to sample.
        block_bytes: bytes of one of its blocks.

    Attributes:
        samples: the samples, in order of their steps.
        lanes: what the lanes of all ended sequences kept, added up; None where nothing is compressed or no sequence
            has ended.
        num_steps: steps so far.
        speed: the fit of the steps' times.
    """

    def __init__(self, cache: CacheBackend, block_bytes: int) -> None:
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
        """Bytes of the pool in use, averaged over the time of all steps, with a sample or without."""
        return self._used_byte_s / self._steps_s if self._steps_s else 0.0

    def note_step(self, plan: StepPlan, num_sequences: int, step_s: float) -> None:
        """Sample the pool at the end of a step.

        Args:
            num_sequences: sequences that were running, with a token in the step or without.
        """
        cache, num_decodes = self._cache, len(plan.decodes) + len(plan.drafts)
        used, peak = cache.used_bytes, cache.peak_bytes
        if peak > self._peak_bytes:  # perhaps at admission, before a prefix was freed
            used = self._peak_bytes = peak
        self.speed.add(step_parts(plan, after=True), step_s)
        self._steps_s += step_s
        self._used_byte_s += used * step_s
        sample = StepSample(
            step=self.num_steps + 1,
            elapsed_s=time.perf_counter() - self._started_s,
            step_s=step_s,
            num_tokens=plan.num_tokens,
            num_prefills=num_sequences - num_decodes,
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

    def note_end(self, usage: LaneUsage | None) -> None:
        """Add what the lanes of a sequence keep when it ends."""
        if usage:
            self.lanes = self.lanes + usage if self.lanes else usage


def _fuller(first: StepSample, second: StepSample) -> StepSample:
    return second if second.kv_used_bytes > first.kv_used_bytes else first
