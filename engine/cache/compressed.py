"""Scored, tiered, quantized: sequences in a compressed cache."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from engine.attention.compressed import LayerPages, attend_aside, attend_chunk
from engine.cache.base import Attend, LookAhead
from engine.position_rebasing import StreamPositions, positions_left
from engine.scheduler import Chunk, StepPlan
from engine.sequence import Sequence
from kvcache.compress.background import BackgroundCompressor
from kvcache.compress.compressor import Compressor
from kvcache.compress.lane_shares import LaneShares
from kvcache.kernels.page_table import PageTable
from kvcache.kernels.registry import kernels_for
from kvcache.pages.block_pool import BlockPool
from kvcache.pages.prefill_buffer import PrefillBufferPool
from kvcache.quantize.error_compensation import compensation_weights, output_second_moments
from kvcache.scorers.base import Scorer
from kvcache.scorers.registry import get_scorer
from kvcache.sequence.compressed import CompressedCache
from kvcache.sizes.compressed import CompressedLayout

# In the last layer nobody wants what a prompt's tokens attend to, but for the scores of the keys; so there the last
# LAST_LAYER_QUERIES of each LAST_LAYER_EVERY tokens attend, and the one that chooses (benchmarks/compression.md).
LAST_LAYER_QUERIES, LAST_LAYER_EVERY = 16, 64


class CompressedBackend:
    """Keep sequences in a block pool and, while in prefill, in prefill buffers.

    Args:
        prefill_buffer_tokens: size of a prefill buffer; what an eviction in one go at the prompt's end needs is the
            whole prompt.
        num_prefill_buffers: the most sequences in prefill at once.
        overlaps_compression: compress in the background; prefill buffers must hold one chunk more.
        max_context: positions the model has.
        move_keys: see `Decoder.move_keys`.
        repeat_token_ids: see `EngineConfig`.
        lane_shares: what each lane needs, for budget `calibrated`.
        output_weights: of every layer, `[hidden, H D]`, in the basis of the values: how their errors show.
    """

    def __init__(
        self,
        layout: CompressedLayout,
        num_blocks: int,
        *,
        prefill_buffer_tokens: int,
        num_prefill_buffers: int,
        overlaps_compression: bool = False,
        max_context: int,
        move_keys: Callable[[Tensor, Tensor], Tensor],
        repeat_token_ids: tuple[int, ...],
        lane_shares: LaneShares | None,
        output_weights: Iterable[Tensor],
        dtype: torch.dtype,
        whole_dtype: torch.dtype,
        device: torch.device,
    ):
        config = layout.config
        self.layout = layout
        self.blocks = BlockPool(num_blocks, layout.page_bytes, device=device)
        self.prefill_buffers = PrefillBufferPool(
            num_prefill_buffers,
            layout.num_layers,
            layout.num_kv_heads,
            prefill_buffer_tokens,
            layout.head_dim,
            compensates=config.compensates,
            dtype=dtype,
            device=device,
        )
        self._whole_dtype = whole_dtype
        self._max_context, self._move_keys = max_context, move_keys
        self._repeat_token_ids = list(repeat_token_ids)
        self._background = BackgroundCompressor(device) if overlaps_compression else None
        self._kernels = kernels_for(device, layout.whole, *layout.tiers)
        self._room: Tensor | None = None
        self.scorer = get_scorer(config.scorer) if config.needs_scores else None
        value_weights = self._weigh(output_weights) if config.compensates else None
        self._compressor = Compressor(layout, lane_shares, value_weights)

    @property
    def _reconstructs(self) -> bool:
        return self.scorer is not None and self.scorer.reconstructs

    @property
    def num_blocks(self) -> int:
        return self.blocks.num_blocks

    @property
    def num_available(self) -> int:
        return self.blocks.num_available

    @property
    def allocated_bytes(self) -> int:
        return self.blocks.allocated_bytes + self.prefill_buffers.allocated_bytes

    @property
    def used_bytes(self) -> int:
        return self.blocks.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self.blocks.peak_bytes

    @property
    def num_prefill_buffers(self) -> int:
        return self.prefill_buffers.num_used

    def can_open(self, num_blocks: int, num_sequences: int = 1) -> bool:
        """See `CacheBackend.can_open`."""
        return num_blocks <= self.blocks.num_available and self.prefill_buffers.num_free >= num_sequences

    def open(self, num_blocks: int, num_tokens: int, prefix: CompressedCache | None) -> CompressedCache:
        """See `CacheBackend.open`."""
        return CompressedCache(
            self._compressor,
            self._whole_dtype,
            self.blocks,
            num_blocks,
            self.prefill_buffers,
            prefix,
            self._background,
            whole_chunks=self.scorer is not None and self.scorer.needs_whole_chunks,
        )

    def probe_tokens(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """See `CacheBackend.probe_tokens`: the question, just before a chunk is judged."""
        left = sequence.num_prompt_tokens - sequence.num_computed_tokens
        judges = num_tokens in (sequence.cache.open_chunk_tokens, left)
        fits = sequence.position + num_tokens + len(sequence.request.probe_token_ids) <= self._max_context
        if self.scorer is None or not self.layout.config.probe or not judges or not fits:
            return []
        return list(sequence.request.probe_token_ids)

    def attend(self, plan: StepPlan) -> Attend:
        """See `CacheBackend.attend`."""
        spans = [(s.cache, 1) for s in plan.decodes] + [(d.sequence.cache, d.num_tokens) for d in plan.drafts]
        decode = self._decode(spans) if spans else None
        chunks = [
            (
                c.sequence.cache.prefill_buffer,
                self._pages(c.sequence.cache),
                c.num_tokens,
                len(self.probe_tokens(c.sequence, c.num_tokens)),
                self._last_layer_queries(c),
            )
            for c in plan.chunks
        ]
        num_decodes = sum(count for _, count in spans)
        scorer = None if self._reconstructs else self.scorer

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = q.new_empty(q.shape)  # [T, H, D]
            if decode:
                out[:num_decodes] = decode(layer, q[:num_decodes], k[:num_decodes], v[:num_decodes])
            start = num_decodes
            for prefill_buffer, pages, count, num_probes, last_queries in chunks:
                span = slice(start, start + count + num_probes)
                is_last = layer == self.layout.num_layers - 1
                attend_chunk(
                    layer,
                    *(x[span] for x in (q, k, v)),
                    prefill_buffer,
                    pages(layer),
                    out[span],
                    scorer,
                    queries=last_queries if is_last else [slice(0, count)],
                    num_probes=num_probes,
                )
                start = span.stop
            return out

        return attend

    def _last_layer_queries(self, chunk: Chunk) -> list[slice]:
        """Return which of some prompt tokens attend in the last layer: the same, whatever steps they come in."""
        sequence, count = chunk.sequence, chunk.num_tokens
        scorer = None if self._reconstructs else self.scorer
        if scorer and self._needs_all_queries(scorer):
            return [slice(0, count)]
        queries = []
        if scorer:
            end = LAST_LAYER_EVERY - sequence.num_computed_tokens % LAST_LAYER_EVERY
            for last in range(end, count + LAST_LAYER_QUERIES, LAST_LAYER_EVERY):
                queries.append(slice(max(0, last - LAST_LAYER_QUERIES), min(last, count)))
        if chunk.num_choices and (not queries or queries[-1].stop < count):
            queries.append(slice(count - 1, count))
        return queries

    def _needs_all_queries(self, scorer: Scorer) -> bool:
        """Tell whether fewer queries in the last layer would not do for its scores."""
        config = self.layout.config
        is_early = config.streaming and config.delay * config.chunk_size < 2 * LAST_LAYER_EVERY
        # it looks at them together | keys might be judged unseen | layers compete, and fewer queries' maxima are lower
        return scorer.needs_whole_chunks or is_early or config.budget == "global"

    def attend_aside(self, cache: CompressedCache, scorer: Scorer | None = None) -> Attend:
        """See `CacheBackend.attend_aside`; a scorer sees the tokens."""
        pages = self._pages(cache)
        return lambda layer, q, k, v: attend_aside(layer, q, k, v, cache.prefill_buffer, pages(layer), scorer)

    def _weigh(self, output_weights: Iterable[Tensor]) -> Tensor:
        """Return `compensation_weights` of every lane's values."""
        layout = self.layout
        second_moments = (
            output_second_moments(w, layout.num_kv_heads, layout.head_dim) for w in output_weights
        )
        return torch.cat([compensation_weights(m) for m in second_moments])

    def _decode(self, spans: list[tuple[CompressedCache, int]]) -> Attend:
        """Return the part of the callback that stores and attends the next tokens of each sequence.

        Of several tokens of one sequence each is a decode of its own, of the same pages and those before it, so that it
        is known of each what it looks at.
        """
        slots, pages = zip(*(cache.open_slots(count) for cache, count in spans), strict=True)
        num_layers = self.layout.num_layers
        key_places, value_places = (  # each layer's [KVH, T]
            torch.cat(x, 1).unflatten(0, (num_layers, -1)).unbind() for x in zip(*slots, strict=True)
        )
        table = PageTable.join(self.blocks.slab, [each for part in pages for each in part])
        caches = [cache for cache, count in spans for _ in range(count)]
        tables, write = table.by_layer(num_layers), caches[0].recent.write_rows
        seen: list[Tensor] = []

        def decode(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            write(key_places[layer], k)
            write(value_places[layer], v)
            out, _, largest = self._kernels.decode_attention(
                q,
                tables[layer],
                scale=q.shape[2] ** -0.5,
                want_largest=self.layout.config.drops,
                num_threads=torch.get_num_threads(),
            )
            if largest is not None:
                seen.append(largest)
                # All layers at once: one by one the calls take longer than the work (of eight rows, 6 against 1 ms).
                if len(seen) == num_layers:
                    self._note_attention(caches, table, torch.cat(seen))
            return out

        return decode

    def _note_attention(self, caches: list[CompressedCache], table: PageTable, largest: Tensor) -> None:
        """Tell caches what each token of a decode step looked at: `largest` of all layers, behind each other."""
        num_layers, num_lanes = self.layout.num_layers, self.layout.num_lanes
        widths = table.num_pages[:, 0].tolist()
        parts = table.counts.split([width * num_lanes for width in widths])
        counts = torch.cat([part.view(num_layers, -1) for part in parts], 1).long()
        # 980,000 tokens in 20,000 pages take 2.3 ms on one core, a scattered maximum 4.5 ms
        maxima = torch.segment_reduce(largest, "max", lengths=counts.flatten(), unsafe=True).view_as(counts)
        of_sequence = maxima.split([part.numel() // num_layers for part in parts], 1)
        for cache, part in zip(caches, of_sequence, strict=True):
            cache.note_attention(part.reshape(num_lanes, -1))

    def _pages(self, cache: CompressedCache) -> Callable[[int], LayerPages]:
        """Return a function that gives one layer's pages."""
        tables = PageTable.of(self.blocks.slab, [cache.page_lists]).by_layer(self.layout.num_layers)
        rounds = self.layout.config.quantizes or self._whole_dtype == torch.bfloat16
        return lambda layer: LayerPages(self._kernels, tables[layer], self._workspace, rounds)

    def _workspace(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return room for keys and values, float32 `[num_tokens, D]`; it is kept, since fresh memory is dear."""
        if self._room is None or self._room.shape[1] < num_tokens:
            self._room = torch.empty(
                2, num_tokens * 5 // 4, self.layout.head_dim, device=self.blocks.slab.device
            )
        return self._room[0, :num_tokens], self._room[1, :num_tokens]

    def advance(
        self, sequence: Sequence, num_tokens: int, look_ahead: LookAhead, *, prompt_ends: bool
    ) -> None:
        """See `CacheBackend.advance`."""
        cache = sequence.cache
        if not cache.prefill_buffer:
            cache.count_decoded()
            return
        cache.extend(num_tokens, prompt_ends=prompt_ends)
        if self._reconstructs:
            self._reconstruct(sequence, cache.num_due(prompt_ends=prompt_ends), look_ahead)
        num_due = cache.num_due(prompt_ends=False)
        prompt_tokens, thinning = (None if sequence.is_prefix else sequence.num_prompt_tokens), 1.0
        longest = self._max_context - sequence.request.sampling.max_new_tokens
        if sequence.request.streams and sequence.num_prompt_tokens > longest:
            # as much is kept as of the longest prompt that fits
            prompt_tokens, thinning = longest, self.layout.thinning(sequence.num_prompt_tokens, longest)
            if num_due:
                self._rebase(sequence, num_due)
        cache.compress(prompt_tokens, thinning=thinning, prompt_ends=prompt_ends)

    def _rebase(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the prefill buffer's first tokens, which leave it next, their last position, and move up the others."""
        request, cache, prefill_buffer = sequence.request, sequence.cache, sequence.cache.prefill_buffer
        left = positions_left(
            self._max_context,
            prefill_buffer.capacity,
            request.sampling.max_new_tokens,
            len(request.probe_token_ids),
        )
        positions = StreamPositions(sequence.num_prompt_tokens, self.layout.config.warmup_tokens, left)
        first = cache.num_tokens - prefill_buffer.length
        moved = positions.of(first + num_tokens) - positions.of(first) - num_tokens
        offsets = [
            positions.of(first + i) - positions.of(first) - i if i < num_tokens else moved
            for i in range(prefill_buffer.length)
        ]
        if any(offsets):
            shift = torch.tensor(offsets, device=prefill_buffer.keys.device)
            for keys in prefill_buffer.keys[
                :, :, : prefill_buffer.length
            ]:  # a layer at a time: in float32 they are large
                keys.copy_(self._move_keys(keys, shift))
            sequence.position += moved

    def _reconstruct(self, sequence: Sequence, num_tokens: int, look_ahead: LookAhead) -> None:
        """Let the model repeat the prefill buffer's first tokens, a chunk in each pass, and the scorer see what it
        looks at.

        Where the context leaves no room behind the sequence, a pass takes the last positions there are, those of the
        newest tokens once more.
        """
        cache, request = sequence.cache, self._repeat_token_ids
        first = cache.num_tokens - cache.prefill_buffer.length
        end = first + num_tokens
        size = min(self.layout.config.chunk_size, self._max_context - len(request))
        attend = self.attend_aside(cache, self.scorer)
        for start in range(first, end, size):
            tokens = request + sequence.token_ids[start : min(start + size, end)]
            look_ahead(tokens, min(sequence.position, self._max_context - len(tokens)), attend)

    def check(self) -> None:
        """See `CacheBackend.check`."""
        self.blocks.check()
        self.prefill_buffers.check()
        assert self.blocks.num_reserved == 0, "a reservation was not given back"
