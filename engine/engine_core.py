"""The engine: requests in, results out as their sequences finish."""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager
from itertools import accumulate

from torch import Tensor

from engine.cache.registry import make_cache
from engine.config import EngineConfig
from engine.constraint import constrain
from engine.errors import EngineError
from engine.key_basis import in_basis_of
from engine.memory_division import MIN_STEP_TOKENS, divide_budget
from engine.models.decoder import Decoder
from engine.monitoring import Monitor
from engine.position_rebasing import positions_left
from engine.prefix_cache import PrefixCache
from engine.prompt_lookup import NgramProposer
from engine.request import EngineStats, Request, Result
from engine.request_pages import prefix_pages, request_pages
from engine.runner import Runner
from engine.sampling import make_random, sample
from engine.scheduler import ALONE_DECODES, Scheduler, StepPlan
from engine.sequence import Sequence
from engine.stopping import cut_at_stop, finish_reason


class EngineCore:
    """Generate for many requests over one page pool.

    Args:
        model: a loaded decoder.
        config: memory and step sizes.
        decode: token ids → text, special tokens left out (`engine.detokenizer.Detokenizer`).

    Attributes:
        monitor: what the pool held and the lanes kept since the engine was made.

    Raises:
        BudgetError: The byte budget does not hold a step and a sequence.
        EngineError: `cache` quantizes, and the model was loaded in the plain basis.
        EngineError: It is to be deterministic, and the device cannot be.
    """

    def __init__(self, model: Decoder, config: EngineConfig, decode: Callable[[Tokens[int]], str]):
        self.model = model = in_basis_of(config.cache, model, config.calibration_token_ids)
        self.config = config
        self.decode = decode
        self.budget = budget = divide_budget(model.config, config, model.dtype.itemsize, str(model.device))
        self.cache = make_cache(self.budget, config, model)
        self.runner = Runner(model, self.cache, ALONE_DECODES if config.deterministic else 0)
        self.scheduler = Scheduler(
            budget.step_tokens, budget.max_sequences, budget.layout.chunks, alone=config.deterministic
        )
        if config.deterministic and not self.runner.is_batch_invariant():
            raise EngineError(
                f"matrix products on {model.device} in {model.dtype} depend on a row's place in a step: "
                "the engine cannot be deterministic here; try another dtype"
            )
        self.monitor = Monitor(self.cache, self.budget.layout.page_bytes)
        self.prefixes = PrefixCache(
            self.cache, self.budget.layout, self.runner, self.budget.step_tokens, self.monitor.speed
        )
        self.proposer: NgramProposer | None = None
        if config.prompt_lookup and not config.deterministic:
            self.proposer = NgramProposer(self.budget.num_logits)
        self._draining = False
        self._end_token_ids = frozenset(model.config.eos_token_ids)
        self._totals = dict.fromkeys(
            (
                "num_rows",
                "prompt_tokens",
                "cached_prompt_tokens",
                "computed_prompt_tokens",
                "completion_tokens",
            ),
            0,
        )

    def generate(
        self, requests: Iterable[Request | None], observe: Callable[[Hashable, Tensor], None] | None = None
    ) -> Iterator[Result]:
        """Yield a result for every request as it finishes.

        Requests are pulled in order and only as far as there is room, so a generator of any length may be given.
        After a None among them, the next one is pulled when every sequence has finished.
        A request that can never run yields a result with finish reason `error`; others are not affected.
        When the iterator is closed early, every page is given back.

        Args:
            observe: called with a request's id and the logits `[V]` that choose its next token, unconstrained.
        """
        source = iter(requests)
        try:
            while True:
                yield from self._fill(source)
                plan = self.scheduler.plan_step()
                if not plan.num_tokens:
                    assert not self.scheduler.waiting, "a sequence waits though nothing runs"
                    return
                if self.proposer and not self.scheduler.waiting:
                    plan = self.proposer.propose(plan)
                yield from self._step(plan, observe)
        finally:
            self.clear_cache()

    def prefill(self, request: Request) -> tuple[Sequence, Tensor]:
        """Read a prompt, alone, and keep it until `clear_cache`.

        Returns:
            its sequence, and the logits `[1, V]` that would choose its first token.

        Raises:
            ValueError: The request can never run; the message says why.
        """
        assert not self.scheduler.running and not self.scheduler.waiting, "other sequences are in the engine"
        problem = self._problem(request)
        if problem:
            raise ValueError(problem)
        self.scheduler.add(Sequence(request, self._pages(request)))
        if not self._admit():
            raise ValueError("the pool has no room for the prompt and its prefix together")
        [sequence] = self.scheduler.running
        while sequence.in_prefill:
            _, logits = self.runner.execute(self.scheduler.plan_step())
        return sequence, logits

    def stats(self) -> EngineStats:
        """Return the totals since the engine was made."""
        totals = dict(self._totals)
        totals["computed_prompt_tokens"] += self.prefixes.computed_tokens
        return EngineStats(
            **totals,
            num_steps=self.monitor.num_steps,
            kv_pool_bytes=self.monitor.pool_bytes,
            kv_allocated_bytes=self.cache.allocated_bytes,
            kv_used_bytes=self.cache.used_bytes,
            kv_mean_bytes=self.monitor.mean_used_bytes,
            kv_peak_bytes=self.cache.peak_bytes,
            drafted_tokens=self.proposer.drafted_tokens if self.proposer else 0,
            accepted_tokens=self.proposer.accepted_tokens if self.proposer else 0,
        )

    @contextmanager
    def limited(self, step_ratio: float, max_sequences: int) -> Iterator[None]:
        """Lower what is computed and held at once in a block: the step's tokens by a ratio, and the sequences.

        Enter it only while nothing is generated.
        """
        whole = self.scheduler.step_tokens, self.scheduler.max_sequences
        fewest = self.config.cache.chunk_size if self.config.cache.compresses else MIN_STEP_TOKENS
        tokens = max(min(whole[0], fewest), int(whole[0] * step_ratio))
        self._limit(tokens, min(whole[1], max_sequences))
        try:
            yield
        finally:
            self._limit(*whole)

    def _limit(self, step_tokens: int, max_sequences: int) -> None:
        self.scheduler.step_tokens = self.prefixes.step_tokens = step_tokens
        self.scheduler.max_sequences = max_sequences

    def clear_cache(self) -> None:
        """Drop every sequence and give every page back."""
        for sequence in list(self.scheduler.running):
            self.scheduler.finish(sequence)
            if sequence.cache is not None:  # None: stopped while its prefix was computed
                sequence.cache.free()
        self.scheduler.waiting.clear()
        self._draining = False
        self.prefixes.clear()
        self.cache.check()

    def _fill(self, source: Iterator[Request | None]) -> Iterator[Result]:
        """Admit sequences until one has to wait, pulling requests as needed."""
        while True:
            if not self.scheduler.waiting:
                if self._draining and self.scheduler.running:
                    return
                try:
                    request = next(source)
                except StopIteration:
                    self._draining = False
                    return
                self._draining = request is None
                if request is None:
                    continue
                problem = self._problem(request)
                if problem:
                    yield Result.failed(request, problem)
                    continue
                self.scheduler.add(Sequence(request, self._pages(request)))
            if not self._admit():
                return

    def _admit(self) -> bool:
        """Admit the first waiting sequence if it fits; prefixes that none reads are dropped for it."""
        head = self.scheduler.waiting[0]
        tokens = head.request.prefix

        def fits(num_pages: int) -> bool:
            missing = self.prefixes.missing_pages(tokens)
            return self.cache.can_open(num_pages + missing, 2 if missing else 1)

        if not fits(head.num_pages):
            self.prefixes.drop_idle(
                {tokens} | {sequence.request.prefix for sequence in self.scheduler.running}
            )
        sequence = self.scheduler.admit(fits)
        if sequence is None:
            return False
        prefix = self.prefixes.get(tokens, sequence) if tokens else None
        sequence.cache = self.cache.open(sequence.num_pages, sequence.request.max_tokens, prefix)
        sequence.random = make_random(sequence.request.sampling, self.model.device)
        sequence.constraint = sequence.request.constraint and sequence.request.constraint()
        if prefix:
            sequence.reuse(len(tokens))
        return True

    def _problem(self, request: Request) -> str | None:
        """Return why a request can never run, or None."""
        prompt, new = len(request.prompt_token_ids), request.sampling.max_new_tokens
        if not prompt:
            return "the prompt is empty"
        if not 0 <= request.prefix_tokens < prompt:
            return f"a prompt of {prompt} tokens cannot share a prefix of {request.prefix_tokens}"
        context = self.model.config.max_context
        if request.streams:
            if not self.config.cache.can_stream or request.prefix_tokens:
                return "a streamed prompt needs a cache policy that scores by chunk, and shares no prefix"
            buffered = self.budget.prefill_buffer_tokens
            left = positions_left(context, buffered, new, len(request.probe_token_ids))
            if left < self.config.cache.chunk_size:
                return (
                    f"the model's context of {context:,} is too short to stream: the newest "
                    f"{buffered:,} tokens and an answer leave {left:,} positions to all others"
                )
        elif request.max_tokens > context:
            return f"{prompt:,} prompt tokens and up to {new:,} new ones exceed the model's context of {context:,}"
        vocab_size = self.model.config.vocab_size
        unknown = next((t for t in request.prompt_token_ids if not 0 <= t < vocab_size), None)
        if unknown is not None:
            return f"token {unknown} of the prompt is outside the model's vocabulary of {vocab_size:,}"
        layout = self.budget.layout
        pages = self._pages(request) + prefix_pages(layout, request.prefix_tokens)
        if pages > self.cache.num_blocks:
            return (
                f"{prompt:,} prompt tokens and up to {new:,} new ones need {pages * layout.page_bytes:,} bytes of KV "
                f"cache, the pool has {self.cache.allocated_bytes:,}"
            )
        return None

    def _pages(self, request: Request) -> int:
        prompt, new = len(request.prompt_token_ids), request.sampling.max_new_tokens
        longest = self.model.config.max_context - new if request.streams else None
        return request_pages(
            self.budget.layout, prompt, new, prefix_tokens=request.prefix_tokens, longest_prompt=longest
        )

    def _step(self, plan: StepPlan, observe: Callable[[Hashable, Tensor], None] | None) -> Iterator[Result]:
        """Execute a plan, append the chosen tokens and yield the results of sequences that end."""
        started_s = time.perf_counter()
        ready, logits = self.runner.execute(plan)
        step_s = time.perf_counter() - started_s
        self.monitor.note_step(plan, len(self.scheduler.running), step_s)
        self._totals["computed_prompt_tokens"] += sum(chunk.num_tokens for chunk in plan.chunks)
        for sequence, seconds in plan.shares(step_s):
            sequence.spend(seconds)
        drafted = {draft.sequence: draft.draft_tokens for draft in plan.drafts}
        firsts = accumulate((1 + len(drafted.get(sequence, ())) for sequence in ready), initial=0)
        rows = dict(zip(ready, firsts, strict=False))
        num_accepted = 0
        while ready:
            yield from self._choose(ready, logits[[rows[s] for s in ready]] if drafted else logits, observe)
            # A sequence whose draft token was chosen takes the next token from the same step.
            ready = [s for s in ready if not s.finish_reason and drafted.get(s, ())[:1] == (s.token_ids[-1],)]
            for sequence in ready:
                self.runner.count_draft_token(sequence)
                drafted[sequence] = drafted[sequence][1:]
                rows[sequence] += 1
            num_accepted += len(ready)
        if self.proposer:
            self.proposer.note(plan, num_accepted, step_s)

    def _choose(
        self,
        ready: list[Sequence],
        logits: Tensor,  # [N, V]
        observe: Callable[[Hashable, Tensor], None] | None,
    ) -> Iterator[Result]:
        """Choose each sequence's next token, append it, and yield the results of sequences that end."""
        if observe:
            for sequence, row in zip(ready, logits, strict=True):
                observe(sequence.request.request_id, row)
        logits = constrain(logits, [s.constraint for s in ready])
        tokens = sample(logits, [s.request.sampling for s in ready], [s.random for s in ready])
        for sequence, token in zip(ready, tokens, strict=True):
            if token is None:
                sequence.finish_reason = "error"
                sequence.error_message = "the model's logits are not finite numbers"
            else:
                sequence.token_ids.append(token)
                sequence.finish_reason = finish_reason(
                    sequence.generated, sequence.request.sampling, self._end_token_ids, self.decode
                )
                if sequence.constraint:
                    sequence.constraint.advance(token)
                    if sequence.constraint.finished:
                        sequence.finish_reason = "stop"
            if sequence.finish_reason:
                yield self._finish(sequence)

    def _finish(self, sequence: Sequence) -> Result:
        layout = self.budget.layout
        generated = sequence.generated
        assert sequence.finish_reason is not None
        text = cut_at_stop(self.decode(generated), sequence.request.sampling.stop)
        self.monitor.note_end(sequence.cache.lane_usage)
        self._totals["num_rows"] += 1
        self._totals["prompt_tokens"] += sequence.num_prompt_tokens
        self._totals["cached_prompt_tokens"] += sequence.cached_prompt_tokens
        self._totals["completion_tokens"] += len(generated)
        result = Result(
            request_id=sequence.request.request_id,
            token_ids=generated,
            text=text,
            finish_reason=sequence.finish_reason,
            error_message=sequence.error_message,
            prompt_tokens=sequence.num_prompt_tokens,
            completion_tokens=len(generated),
            cached_prompt_tokens=sequence.cached_prompt_tokens,
            num_chunks=sequence.num_chunks,
            kv_full_bytes=sequence.kv_len * layout.token_bytes,
            kv_kept_bytes=sequence.cache.kept_bytes,
            kv_peak_bytes=sequence.cache.held_bytes,
            prefill_s=sequence.prefill_s,
            decode_s=sequence.decode_s,
            wait_s=sequence.wait_s(),
        )
        self.scheduler.finish(sequence)
        sequence.cache.free()
        return result
