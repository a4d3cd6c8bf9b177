"""One sequence's compressed cache: prefill buffer in prefill, pages of several formats, the open page in decode.

A token goes from the prefill buffer (or, in decode, from the open pages) to one of the tiers or is dropped, once.
Every lane keeps what the budget gave it:

    sinks    the first tokens, whole
    tiers    survivors; a tier of fewer bits gathers 64 of them whole (`pending`) before it quantizes a page
    recent   the newest tokens, whole

Where the policy drops tokens, the tiers stop growing with the prompt: in decode a page that fills takes the place of
the one of its lane and tier that was attended longest ago.
"""

from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcache.compress.background import BackgroundCompressor
from kvcache.compress.compressor import Compressor, TierShare
from kvcache.kernels.page_table import LanePages, PageLists
from kvcache.pages.block_pool import BlockPool, PageStore
from kvcache.pages.page_list import PageList
from kvcache.pages.prefill_buffer import PrefillBuffer, PrefillBufferPool
from kvcache.pages.tier_list import TierList
from kvcache.sequence.lane_usage import LaneUsage
from kvcache.sizes.compressed import TIER_PAGE_TOKENS, WHOLE_PAGE_TOKENS
from kvcache.sizes.page_format import PageFormat

# A page was attended in a decode step if one of its tokens received so many times the attention that each of its
# lane's tokens would receive if all received the same. At 8 a step attends 30 % of the pages and 64 steps 83 % (2: 53
# and 97, 64: 6 and 41; preset `logs`, 2,000 tokens read): what is left are the few that may go. What is generated
# does not depend on it much (benchmarks/compression.md).
ATTENDED_FACTOR = 8


class CompressedCache:
    """Hold one sequence's keys and values.

    Args:
        compressor: the policy at work.
        whole_dtype: of tokens kept whole.
        blocks: where pages come from.
        num_blocks: blocks reserved for this sequence.
        prefill buffers: where the prefill buffer comes from.
        prefix: a cache still in prefill whose tokens this sequence begins with. Quantized pages are shared,
            everything else is copied.
        background: where chunks are compressed while the model goes on; None: at once.
        whole_chunks: a chunk must be computed in one step.
    """

    def __init__(
        self,
        compressor: Compressor,
        whole_dtype: torch.dtype,
        blocks: BlockPool,
        num_blocks: int,
        prefill_buffers: PrefillBufferPool,
        prefix: "CompressedCache | None" = None,
        background: BackgroundCompressor | None = None,
        *,
        whole_chunks: bool = False,
    ):
        layout = self.layout = compressor.layout
        self._compressor = compressor
        self._whole_dtype = whole_dtype
        self.store = PageStore(blocks, num_blocks)
        self.prefill_buffer: PrefillBuffer | None = PrefillBuffer(prefill_buffers)
        self.num_tokens = 0  # ever cached, kept or not
        self._background = background
        self.whole_chunks = whole_chunks
        self._leaving: Future[list[TierShare]] | None = None  # of the prefill buffer's oldest chunk
        self._seen: list[Tensor] = []  # what open tokens looked at, in order
        # The lists before the open pages as they last were, and joined.
        self._joined: tuple[list[Tensor], LanePages] | None = None
        if prefix is None:
            self.sinks, self.recent = self._list(layout.whole), self._list(layout.whole)
            self.pending = [self._list(layout.whole) for _ in layout.tiers]
            self.tiers = [
                TierList(self.store, page_format, layout.num_lanes, whole_dtype)
                for page_format in layout.tiers
            ]
        else:
            try:
                self._begin_with(prefix)
            except BaseException:  # memory ran out, perhaps: what was taken goes back
                self.free()
                raise

    def _begin_with(self, prefix: "CompressedCache") -> None:
        """Share what never changes of another cache, and copy the rest."""
        assert prefix.prefill_buffer is not None, "only a cache in prefill can be a prefix"
        whole = self.layout.whole
        self.store.share(prefix.store)
        self.sinks, self.recent = (
            part.clone_into(self.store, share=False) for part in (prefix.sinks, prefix.recent)
        )
        self.pending = [part.clone_into(self.store, share=False) for part in prefix.pending]
        self.tiers = [part.clone_into(self.store, share=part.format != whole) for part in prefix.tiers]
        self.prefill_buffer.copy_from(prefix.prefill_buffer)
        self.num_tokens = prefix.num_tokens
        self._leaving = prefix._leaving  # each puts the outcome into pages of its own when its time comes

    @property
    def lists(self) -> list[PageList]:
        """Every list of pages that attention reads."""
        return [self.sinks, *self.tiers, *self.pending, self.recent]

    @property
    def page_lists(self) -> PageLists:
        """The lists as kernels take them, the open pages last."""
        return [(part.format, part.addresses, part.counts) for part in self.lists]

    @property
    def own_bytes(self) -> int:
        """Bytes of the blocks this sequence holds alone."""
        return self.store.num_blocks * self.store.pool.block_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of all blocks held, shared ones included."""
        return sum(len(blocks) for blocks in self.store.blocks) * self.store.pool.block_bytes

    @property
    def held_bytes(self) -> int:
        """The same: a block that was taken stays until the end."""
        return self.kept_bytes

    @property
    def lane_usage(self) -> LaneUsage:
        """What the lanes keep, asked of their lists; tokens still in the prefill buffer are in none."""
        kinds = [[self.sinks, *self.pending, self.recent], *([tier] for tier in self.tiers)]
        shape = (len(kinds), self.layout.num_layers, self.layout.num_kv_heads)
        return LaneUsage(
            formats=(self.layout.whole, *self.layout.tiers),
            tokens_seen=self.num_tokens,
            tokens=torch.stack([sum(part.lengths for part in parts) for parts in kinds]).view(shape),
            pages=torch.stack([sum(part.num_pages for part in parts) for parts in kinds]).view(shape),
        )

    @property
    def open_chunk_tokens(self) -> int:
        """The most prompt tokens of one step: the rest of a chunk, since a chunk is judged by those after it."""
        if not self.layout.config.streaming and not self.whole_chunks:
            return self.prefill_buffer.capacity - self.prefill_buffer.length
        size = self.layout.config.chunk_size
        return size - self.num_tokens % size

    def extend(self, num_tokens: int, *, prompt_ends: bool) -> None:
        """Count prompt tokens that all layers have written to the prefill buffer.

        A chunk that was compressed in the background leaves the prefill buffer when the next chunk is complete:
            until then it
        is attended there, whenever the outcome may be ready.
        """
        self.prefill_buffer.extend(num_tokens)
        self.num_tokens += num_tokens
        config = self.layout.config
        if prompt_ends or (config.streaming and self.num_tokens % config.chunk_size == 0):
            self._await_chunk()

    def num_due(self, *, prompt_ends: bool) -> int:
        """Return how many of the prefill buffer's oldest tokens have seen what follows them and are scored now."""
        if prompt_ends:
            return max(0, self.prefill_buffer.length - self.layout.config.recent_tokens)
        config = self.layout.config
        is_full = config.streaming and self.prefill_buffer.length >= (config.delay + 1) * config.chunk_size
        return config.chunk_size if is_full and not self._leaving else 0

    def compress(self, prompt_tokens: int | None, *, thinning: float = 1.0, prompt_ends: bool) -> None:
        """Move the chunk that is old enough to pages, and at the prompt's end everything else.

        Args:
            prompt_tokens: of the whole prompt; None where nobody knows yet how it goes on.
            thinning: of what is kept of chunks, where the prompt is longer than that (`CompressedLayout.thinning`).
        """
        due = self.num_due(prompt_ends=False)
        scale = 1.0 if prompt_tokens is None else self.layout.chunk_scale(prompt_tokens) * thinning
        if due and self._background:
            scores, keys, values = self._judged(due)
            compress = partial(self._compressor.compress, scale=scale)
            self._leaving = self._background.submit(
                compress, scores.clone(), keys, values, self.pending, self.prefill_buffer.key_weights
            )
        elif due:
            self._compress_prefill_buffer(due, scale=scale)
        if prompt_ends:
            self._await_chunk()
            self._leave_prefill_buffer(scale, prompt_tokens)

    @property
    def open_tokens(self) -> int:
        """The most tokens that a decode step may write: to one open page, so that none is held for what never counts.

        Open pages are compressed when one is full, so no such token is.
        """
        return WHOLE_PAGE_TOKENS - int(self.recent.lengths[0]) % WHOLE_PAGE_TOKENS

    def open_slots(self, num_tokens: int) -> tuple[tuple[Tensor, Tensor], list[LanePages]]:
        """Make room for a step's tokens in the open pages. They count, one by one, when all layers have written them.

        Returns:
            Where their keys and their values go, int64 `[lanes, num_tokens]` each, and for each token the pages
            as it sees them, the token itself last.
        """
        self._seen.clear()
        slots, recent = self.recent.open_slots(num_tokens), self.recent
        older = self._older_pages()
        pages = [
            older + LanePages.of([(recent.format, recent.addresses, recent.counts_with(n))])
            for n in range(1, num_tokens + 1)
        ]
        return slots, pages

    def _older_pages(self) -> LanePages:
        """Return all lists but the open pages joined, which most decode steps leave as they are.

        Lists never change their tensors in place, so the same tensors are the same pages.
        """
        tensors = [x for part in self.lists[:-1] for x in (part.addresses, part.lengths)]
        if self._joined is None or any(x is not y for x, y in zip(tensors, self._joined[0], strict=True)):
            self._joined = tensors, LanePages.of(self.page_lists[:-1])
        return self._joined[1]

    def count_decoded(self) -> None:
        """Count the next token that all layers have written to the open pages; compress these when they are full.

        Nothing is dropped there, since the newest tokens are what most heads look at. Where pages may grow, they go to
        the best tier; where each takes the place of another, to the last one.
        """
        self.num_tokens += 1
        self.recent.lengths = self.recent.lengths + 1
        if self._seen:
            self._note_attention(self._seen.pop(0))
        if int(self.recent.lengths[0]) < self.layout.config.recent_tokens + TIER_PAGE_TOKENS:
            return
        _, keys, values = self.recent.take_front(torch.full_like(self.recent.lengths, TIER_PAGE_TOKENS))
        shape = (self.layout.num_lanes, TIER_PAGE_TOKENS, -1)
        tier = self.tiers[-1 if self.layout.config.drops else 0]
        self._append(tier, self._compressor.close_page(tier.format, keys.view(shape), values.view(shape)))

    def note_attention(self, pages: Tensor) -> None:
        """Hear what the next open token looked at: the largest attention in each page, `[lanes, pages of all lists]`.

        Pages are told when the token counts.
        """
        self._seen.append(pages)

    def _note_attention(self, pages: Tensor) -> None:
        num_tokens = sum(part.lengths for part in self.lists)
        attended = (pages >= ATTENDED_FACTOR / num_tokens[:, None]).split(
            [part.addresses.shape[1] for part in self.lists], 1
        )
        for tier, seen in zip(self.tiers, attended[1:], strict=False):  # the sinks are first
            tier.note_attention(seen)

    def free(self) -> None:
        """Give blocks and prefill buffer back."""
        if self._leaving:
            wait([self._leaving])  # it reads both
            self._leaving = None
        self.store.free()
        self._joined = None
        if self.prefill_buffer:
            self.prefill_buffer.free()
            self.prefill_buffer = None

    def _list(self, page_format: PageFormat) -> PageList:
        return PageList(self.store, page_format, self.layout.num_lanes, self._whole_dtype)

    def _await_chunk(self) -> None:
        """Put the chunk that was compressed in the background into pages, if there is one."""
        if self._leaving:
            shares, self._leaving = self._leaving.result(), None
            self._leave(self.layout.config.chunk_size, shares)

    def _compress_prefill_buffer(self, num_tokens: int, **how: Any) -> None:
        """Judge the oldest tokens of the prefill buffer and move them to pages."""
        scores, keys, values = self._judged(num_tokens)
        shares = self._compressor.compress(
            scores, keys, values, self.pending, self.prefill_buffer.key_weights, **how
        )
        self._leave(num_tokens, shares)

    def _judged(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores `[lanes, n]`, keys and values `[lanes, n, D]` of the buffer's oldest tokens, sinks left out."""
        prefill_buffer, sinks = self.prefill_buffer, self._num_sinks(num_tokens)
        return tuple(
            x.flatten(0, 1)[:, sinks:num_tokens]
            for x in (prefill_buffer.scores, prefill_buffer.keys, prefill_buffer.values)
        )

    def _num_sinks(self, num_tokens: int) -> int:
        """Return how many of the prefill buffer's oldest tokens are sinks."""
        first = self.num_tokens - self.prefill_buffer.length  # position of the prefill buffer's first token
        return min(max(self.layout.config.warmup_tokens - first, 0), num_tokens)

    def _leave(self, num_tokens: int, shares: list[TierShare]) -> None:
        """Move the oldest tokens of the prefill buffer to pages."""
        prefill_buffer, sinks = self.prefill_buffer, self._num_sinks(num_tokens)
        self._append_all(
            self.sinks, *(x[:, :, :sinks].flatten(0, 1) for x in (prefill_buffer.keys, prefill_buffer.values))
        )
        self._take(shares)
        prefill_buffer.drop_front(num_tokens)

    def _leave_prefill_buffer(self, scale: float, prompt_tokens: int) -> None:
        """At the end of the prompt: compress all but the recent window, which becomes the open pages."""
        prefill_buffer, layout = self.prefill_buffer, self.layout
        older = max(
            prefill_buffer.length - layout.config.recent_tokens, self._num_sinks(prefill_buffer.length)
        )  # [0, older) leaves
        tail = min(layout.tail_tokens(prompt_tokens), older)
        if older > tail:
            self._compress_prefill_buffer(older - tail, scale=scale)
        if tail:
            self._compress_prefill_buffer(tail, keep_all=True, fill_pages=layout.fills_pages(prompt_tokens))
        self._append_all(
            self.recent,
            prefill_buffer.keys[:, :, : prefill_buffer.length].flatten(0, 1),
            prefill_buffer.values[:, :, : prefill_buffer.length].flatten(0, 1),
        )
        prefill_buffer.free()
        self.prefill_buffer = None

    def _take(self, shares: list[TierShare]) -> None:
        """Put judged tokens into the pages of their tiers, or among those that wait for the next page."""
        for pending, tier, share in zip(self.pending, self.tiers, shares, strict=True):
            self._append(tier, share)
            if tier.format != self.layout.whole:
                pending.clear()
                pending.append_rows(share.lanes, share.keys, share.values)

    def _append(self, tier: TierList, share: TierShare) -> None:
        """Put tokens into a tier's pages; where nothing may grow, old pages make room."""
        whole = tier.format == self.layout.whole
        if self.prefill_buffer is None and self.layout.config.drops:
            lanes = share.lanes if whole else share.page_lanes.repeat_interleave(TIER_PAGE_TOKENS)
            tier.make_room(torch.bincount(lanes, minlength=self.layout.num_lanes))
        if whole:
            tier.append_rows(share.lanes, share.keys, share.values)
        else:
            tier.append_pages(share.page_lanes, share.pages)

    def _append_all(self, part: PageList, keys: Tensor, values: Tensor) -> None:
        """Append the same number of tokens `[lanes, n, D]` to every lane."""
        lanes = torch.arange(keys.shape[0], device="cpu").repeat_interleave(keys.shape[1])
        if len(lanes):
            part.append_rows(lanes, keys.flatten(0, 1), values.flatten(0, 1))
