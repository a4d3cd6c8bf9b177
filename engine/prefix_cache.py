"""Prompt prefixes that several requests share: each is computed once, and held as long as its pages are not needed."""

import time

from engine.cache.base import CacheBackend, SequenceHandle
from engine.forecast import SpeedFit, step_parts
from engine.request import Request, SamplingParams
from engine.request_pages import prefix_pages
from engine.runner import Runner
from engine.scheduler import StepPlan, plan_chunks
from engine.sequence import Sequence
from kvcache.sizes.compressed import CompressedLayout
from kvcache.sizes.full import CacheLayout


class PrefixCache:
    """Hold the caches of prefixes by their token ids.

    Args:
        step_tokens: the most tokens of one step.
        speed: fitted to the steps that compute prefixes, too.

    Attributes:
        computed_tokens: tokens of all prefixes computed so far.
    """

    def __init__(
        self,
        cache: CacheBackend,
        layout: CacheLayout | CompressedLayout,
        runner: Runner,
        step_tokens: int,
        speed: SpeedFit,
    ) -> None:
        self._cache = cache
        self._speed = speed
        self._layout = layout
        self._runner = runner
        self.step_tokens = step_tokens
        self.computed_tokens = 0
        self._caches: dict[tuple[int, ...], SequenceHandle] = {}

    def missing_pages(self, tokens: tuple[int, ...]) -> int:
        """Return the pages that `get(tokens)` would take from the pool."""
        return 0 if tokens in self._caches else prefix_pages(self._layout, len(tokens))

    def get(self, tokens: tuple[int, ...], first: Sequence) -> SequenceHandle:
        """Return a prefix's cache; the first time, compute it.

        Args:
            first: the sequence that needs the prefix; if it has to be computed, the time counts as its prefill.

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
                    plan = StepPlan((), plan_chunks([sequence], self.step_tokens, self._layout.chunks))
                    self._runner.execute(plan)
                    step_s = time.perf_counter() - started_s
                    self._speed.add(step_parts(plan, after=True), step_s)
                    first.spend(step_s)
            except BaseException:
                sequence.cache.free()
                raise
            self._caches[tokens] = sequence.cache
            self.computed_tokens += len(tokens)
        return self._caches[tokens]

    def drop_idle(self, keep: set[tuple[int, ...]]) -> None:
        """Free the prefixes other than those to `keep`, whose pages running sequences read.

        A prefix reserves more pages than the sequences share, so it is kept whole until the last of them ends.
        """
        for tokens in self._caches.keys() - keep:
            self._caches.pop(tokens).free()

    def clear(self) -> None:
        """Free every prefix."""
        self.drop_idle(keep=set())
