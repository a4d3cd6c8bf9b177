"""Attention of one step over compressed caches: prompt chunks and decoded tokens, layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.compressed import LayerPages, attend_chunk, attend_uncached
from engine.models.decoder import Attend
from kvcache.kernels.page_table import PageTable
from kvcache.kernels.registry import kernels_for
from kvcache.pages.block_pool import BlockPool
from kvcache.pages.prefill_buffer import PrefillBuffer
from kvcache.scorers.protocol import Scorer
from kvcache.sequence.compressed import CompressedCache
from kvcache.sizes.compressed import CompressedLayout


@dataclass(frozen=True)
class ChunkSpan:
    """A prompt chunk in a step, followed by probes that are not cached.

    Attributes:
        cache: the sequence's cache, in prefill.
        num_tokens: tokens of the chunk.
        num_probes: probe tokens behind it.
        last_layer_queries: the chunk's tokens that attend in the last layer.
    """

    cache: CompressedCache
    num_tokens: int
    num_probes: int
    last_layer_queries: Sequence[slice]

    @property
    def prefill_buffer(self) -> PrefillBuffer:
        """The sequence's prefill buffer."""
        assert self.cache.prefill_buffer is not None, "the prompt has ended"
        return self.cache.prefill_buffer


class CompressedAttention:
    """Attend to pages in a block pool and to prefill buffers.

    Args:
        blocks: the pool that holds all pages.
        whole_dtype: of tokens kept whole.
    """

    def __init__(self, layout: CompressedLayout, blocks: BlockPool, whole_dtype: torch.dtype) -> None:
        self._layout, self._slab = layout, blocks.slab
        self._kernels = kernels_for(blocks.slab.device, layout.whole, *layout.tiers)
        self._drops = layout.config.drops
        self._rounds = layout.config.quantizes or whole_dtype == torch.bfloat16
        self._buffer: Tensor | None = None

    def step(
        self,
        decodes: Sequence[tuple[CompressedCache, int]],
        chunks: Sequence[ChunkSpan],
        scorer: Scorer | None,
    ) -> Attend:
        """Return the function by which the layers of a step store keys and values and attend.

        Args:
            decodes: sequences in decode, with the number of consecutive tokens that each computes.
            chunks: prompt chunks, whose tokens follow those of `decodes`.
            scorer: updates the scores of the prefill buffers' keys.
        """
        decode = self._decode(decodes) if decodes else None
        num_decodes = sum(count for _, count in decodes)
        spans = [(chunk, chunk.prefill_buffer, self._pages(chunk.cache)) for chunk in chunks]
        last_layer = self._layout.num_layers - 1

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = q.new_empty(q.shape)  # [T, H, D]
            if decode:
                out[:num_decodes] = decode(layer, q[:num_decodes], k[:num_decodes], v[:num_decodes])
            start = num_decodes
            for chunk, prefill_buffer, pages in spans:
                span = slice(start, start + chunk.num_tokens + chunk.num_probes)
                attend_chunk(
                    layer,
                    (q[span], k[span], v[span]),
                    prefill_buffer,
                    pages(layer),
                    out[span],
                    scorer,
                    queries=chunk.last_layer_queries if layer == last_layer else [slice(0, chunk.num_tokens)],
                    num_probes=chunk.num_probes,
                )
                start = span.stop
            return out

        return attend

    def uncached(self, cache: CompressedCache, scorer: Scorer | None = None) -> Attend:
        """Return `attend_uncached` over one sequence, for each layer."""
        pages = self._pages(cache)
        return lambda layer, q, k, v: attend_uncached(
            layer, (q, k, v), cache.prefill_buffer, pages(layer), scorer
        )

    def _decode(self, decodes: Sequence[tuple[CompressedCache, int]]) -> Attend:
        """Return the function that stores and attends the next tokens of each sequence in decode.

        Several tokens of one sequence are separate decodes over its pages and the tokens before, so that it is known
        for each of them which pages it attends to.
        """
        slots, pages = zip(*(cache.open_slots(count) for cache, count in decodes), strict=True)
        num_layers = self._layout.num_layers
        key_slots, value_slots = (  # each layer's [KVH, T]
            torch.cat(x, 1).unflatten(0, (num_layers, -1)).unbind() for x in zip(*slots, strict=True)
        )
        table = PageTable.join(self._slab, [each for part in pages for each in part])
        caches = [cache for cache, count in decodes for _ in range(count)]
        tables, write = table.by_layer(num_layers), caches[0].recent.write_rows
        largest_of_layers: list[Tensor] = []

        def decode(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            write(key_slots[layer], k)
            write(value_slots[layer], v)
            out, _, largest = self._kernels.decode_attention(
                q,
                tables[layer],
                scale=q.shape[2] ** -0.5,
                want_largest=self._drops,
                num_threads=torch.get_num_threads(),
            )
            if largest is not None:
                largest_of_layers.append(largest)
                # All layers at once: layer by layer, calls cost more than the work (6 against 1 ms, 8 sequences).
                if len(largest_of_layers) == num_layers:
                    self._note_attention(caches, table, torch.cat(largest_of_layers))
            return out

        return decode

    def _note_attention(self, caches: list[CompressedCache], table: PageTable, largest: Tensor) -> None:
        """Give each cache the largest attention that the token of a decode step gave each of its pages.

        Args:
            caches: the cache of each token.
            largest: of every token and page, one layer after the other.
        """
        num_layers, num_lanes = self._layout.num_layers, self._layout.num_lanes
        widths = table.num_pages[:, 0].tolist()
        parts = table.counts.split([width * num_lanes for width in widths])
        counts = torch.cat([part.view(num_layers, -1) for part in parts], 1).long()
        # 980,000 tokens in 20,000 pages take 2.3 ms on one core, a scattered maximum 4.5 ms
        maxima = torch.segment_reduce(largest, "max", lengths=counts.flatten(), unsafe=True).view_as(counts)
        of_sequence = maxima.split([part.numel() // num_layers for part in parts], 1)
        for cache, part in zip(caches, of_sequence, strict=True):
            cache.note_attention(part.reshape(num_lanes, -1))

    def _pages(self, cache: CompressedCache) -> Callable[[int], LayerPages]:
        """Return a function that gives one layer's pages of a sequence."""
        tables = PageTable.of(self._slab, [cache.page_lists]).by_layer(self._layout.num_layers)
        return lambda layer: LayerPages(self._kernels, tables[layer], self._workspace, self._rounds)

    def _workspace(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return float32 `[num_tokens, D]` for keys and for values, from a buffer that is kept between calls."""
        if self._buffer is None or self._buffer.shape[1] < num_tokens:
            self._buffer = torch.empty(
                2, num_tokens * 5 // 4, self._layout.head_dim, dtype=torch.float32, device=self._slab.device
            )
        return self._buffer[0, :num_tokens], self._buffer[1, :num_tokens]
