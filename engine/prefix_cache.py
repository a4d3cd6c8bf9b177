"""Shared prompt prefixes: computed once, held until the engine is idle or the room is needed."""

import time

from engine.cache.base import CacheBackend, SequenceHandle
from engine.forecast import SpeedFit, step_parts
from engine.request import Request, SamplingParams
from engine.runner import Runner
from engine.scheduler import StepPlan, plan_chunks
from engine.sequence import Sequence


class PrefixCache:
    """Hold the caches of prefixes by their token ids; `speed` is told of the steps that compute them.

    Attributes:
        computed_tokens: of all prefixes so far.
    """

    def __init__(self, cache: CacheBackend, layout, runner: Runner, step_tokens: int, speed: SpeedFit):
        self._cache = cache
        self._speed = speed
        self._layout = layout
        self._runner = runner
        self.step_tokens = step_tokens
        self.computed_tokens = 0
        self._caches: dict[tuple[int, ...], SequenceHandle] = {}

    def missing_pages(self, tokens: tuple[int, ...]) -> int:
        """Return the pages that `get(tokens)` would take from the pool."""
        if not tokens or tokens in self._caches:
            return 0
        return self._layout.sequence_pages(len(tokens))

    def get(self, tokens: tuple[int, ...]) -> SequenceHandle:
        """Return the prefix's cache, computing it the first time.

        Raises:
            PoolExhausted: The pool has too few free pages.
        """
        if tokens not in self._caches:
            request = Request(-1, tokens, SamplingParams(max_new_tokens=1))
            sequence = Sequence(request, self.missing_pages(tokens), is_prefix=True)
            sequence.cache = self._cache.open(sequence.num_pages, len(tokens), None)
            try:
                while sequence.in_prefill:
                    started_s = time.perf_counter()
                    plan = StepPlan((), plan_chunks([sequence], self.step_tokens))
                    self._runner.execute(plan)
                    self._speed.add(step_parts(plan, after=True), time.perf_counter() - started_s)
            except BaseException:
                sequence.cache.free()
                raise
            self._caches[tokens] = sequence.cache
            self.computed_tokens += len(tokens)
        return self._caches[tokens]

    def drop_idle(self, keep: set[tuple[int, ...]]) -> None:
        """Give back the prefixes other than those to keep, on whose pages running rows depend.

        A prefix holds more than its rows share, so its reservation ends with the last of them.
        """
        for tokens in self._caches.keys() - keep:
            self._caches.pop(tokens).free()

    def clear(self) -> None:
        """Give back every prefix."""
        self.drop_idle(keep=set())
