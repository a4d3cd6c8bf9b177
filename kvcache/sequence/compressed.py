"""One sequence's compressed cache: a prefill buffer in prefill, pages of several formats, open pages in decode.

A token moves once, from the prefill buffer (in decode from the open pages) to one of the tiers, or it is evicted.
Every lane keeps as many tokens as the budget assigns to it:

    sinks    the first tokens, whole
    tiers    the tokens kept of those in between; a tier of fewer bits collects 64 of them whole (`pending`) before it
             quantizes a page
    recent   the newest tokens, whole

Where the policy evicts tokens, the tiers stop growing at the prompt's end: in decode a new page of a tier replaces the
page of the same lane that was attended longest ago.
"""

from concurrent.futures import Future, wait
from functools import partial

import torch
from torch import Tensor

from kvcache.compress.background import BackgroundCompressor
from kvcache.compress.compressor import Compressor, TierShare
from kvcache.kernels.page_table import LanePages, PageLists
from kvcache.pages.block_pool import BlockPool, PageStore
from kvcache.pages.page_list import PageList
from kvcache.pages.prefill_buffer import PrefillBuffer, PrefillBufferPool
from kvcache.pages.tier_list import TierList
from kvcache.sequence.joined_pages import JoinedPages
from kvcache.sequence.lane_usage import LaneUsage
from kvcache.sizes.compressed import TIER_PAGE_TOKENS, WHOLE_PAGE_TOKENS
from kvcache.sizes.page_format import PageFormat

# A decode step attends a page if one of its tokens receives at least this many times the lane's mean attention. At 8,
# one step attends 30 % of the pages and 64 steps attend 83 % (at 2: 53 and 97 %, at 64: 6 and 41 %; preset `logs`,
# 2,000 tokens read), which leaves a few pages to evict. The generated text hardly depends on it
# (benchmarks/compression.md).
ATTENDED_FACTOR = 8


class CompressedCache:
    """Hold one sequence's keys and values.

    Args:
        compressor: applies the policy.
        whole_dtype: of tokens kept whole.
        blocks: the pool of blocks that pages are carved from.
        num_blocks: blocks reserved for this sequence.
        prefill_buffers: the pool that the prefill buffer is leased from.
        prefix: a cache still in prefill whose tokens this sequence begins with. Quantized pages are shared,
            everything else is copied.
        background: compresses chunks while the model reads on; None: each chunk is compressed at once.
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
    ):
        layout = self.layout = compressor.layout
        self._compressor = compressor
        self._whole_dtype = whole_dtype
        self.store = PageStore(blocks, num_blocks)
        self.prefill_buffer: PrefillBuffer | None = PrefillBuffer(prefill_buffers)
        self.num_tokens = 0  # ever cached, kept or not
        self._background = background
        self._leaving: Future[list[TierShare]] | None = None  # shares of the prefill buffer's oldest chunk
        self._attention: list[Tensor] = []  # of open tokens not yet counted, in order
        self._older = JoinedPages()  # of all lists but the open pages, which most decode steps do not change
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
            except BaseException:  # memory may have run out: blocks and buffer go back
                self.free()
                raise

    def _begin_with(self, prefix: "CompressedCache") -> None:
        """Share another cache's quantized pages, which never change, and copy everything else."""
        assert prefix.prefill_buffer is not None, "only a cache in prefill can be a prefix"
        whole = self.layout.whole
        self.store.share(prefix.store)
        self.sinks, self.recent = (
            part.clone_into(self.store, share=False) for part in (prefix.sinks, prefix.recent)
        )
        self.pending = [part.clone_into(self.store, share=False) for part in prefix.pending]
        self.tiers = [part.clone_into(self.store, share=part.format != whole) for part in prefix.tiers]
        self._buffer.copy_from(prefix.prefill_buffer)
        self.num_tokens = prefix.num_tokens
        self._leaving = prefix._leaving  # each sequence writes the result to pages of its own

    @property
    def _buffer(self) -> PrefillBuffer:
        """The prefill buffer of a sequence in prefill."""
        assert self.prefill_buffer is not None, "the prompt has ended"
        return self.prefill_buffer

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
        """The same as `kept_bytes`: a sequence returns its blocks only at its end."""
        return self.kept_bytes

    @property
    def lane_usage(self) -> LaneUsage:
        """What the lanes keep in pages; tokens in the prefill buffer are not counted."""
        whole = [self.sinks, *self.pending, self.recent]
        return LaneUsage.of(self.layout, self.num_tokens, [whole, *([tier] for tier in self.tiers)])

    def extend(self, num_tokens: int, *, prompt_ends: bool) -> None:
        """Count prompt tokens that all layers have written to the prefill buffer.

        A chunk that is compressed in the background leaves the prefill buffer when the next chunk is complete. Until
        then it is attended in the buffer even if its pages are ready, so that timing changes no result.
        """
        self._buffer.extend(num_tokens)
        self.num_tokens += num_tokens
        if prompt_ends or self.layout.chunks.completes_chunk(self.num_tokens):
            self._await_chunk()

    def num_due(self, *, prompt_ends: bool) -> int:
        """Return how many of the prefill buffer's oldest tokens have their final scores."""
        chunks, num_buffered = self.layout.chunks, self._buffer.length
        if prompt_ends:
            return chunks.due_tokens_at_end(num_buffered)
        return 0 if self._leaving else chunks.due_tokens(num_buffered)

    def compress(self, prompt_tokens: int | None, *, thinning: float = 1.0, prompt_ends: bool) -> None:
        """Move the oldest chunk to pages once its scores are final, and at the prompt's end everything else.

        Args:
            prompt_tokens: of the whole prompt; None of a prefix, whose continuation is not known.
            thinning: factor of the tiers' ratios where the prompt is longer than that (`CompressedLayout.thinning`).
        """
        due = self.num_due(prompt_ends=False)
        scale = 1.0 if prompt_tokens is None else self.layout.chunk_scale(prompt_tokens) * thinning
        if due and self._background:
            scores, keys, values = self._oldest(due)
            compress = partial(self._compressor.compress, scale=scale)
            self._leaving = self._background.submit(
                compress, scores.clone(), keys, values, self.pending, self._buffer.key_weights
            )
        elif due:
            self._compress_prefill_buffer(due, scale=scale)
        if prompt_ends:
            self._await_chunk()
            assert prompt_tokens is not None, "a prefix has no end"
            self._leave_prefill_buffer(scale, prompt_tokens)

    @property
    def open_tokens(self) -> int:
        """The most tokens that a decode step may write: the free slots of one open page.

        Draft tokens that are rejected then never cost a page.
        """
        return WHOLE_PAGE_TOKENS - int(self.recent.lengths[0]) % WHOLE_PAGE_TOKENS

    def open_slots(self, num_tokens: int) -> tuple[tuple[Tensor, Tensor], list[LanePages]]:
        """Make room for a step's tokens in the open pages; `count_decoded` counts each once all layers wrote it.

        Returns:
            The places of their keys and of their values, int64 `[lanes, num_tokens]` each, and for each token the pages
            that it attends to, its own slot last.
        """
        self._attention.clear()
        slots, recent = self.recent.open_slots(num_tokens), self.recent
        older = self._older.of(self.lists[:-1])
        pages = [
            older + LanePages.of([(recent.format, recent.addresses, recent.counts_with(n))])
            for n in range(1, num_tokens + 1)
        ]
        return slots, pages

    def count_decoded(self) -> None:
        """Count the next token that all layers have written to the open pages; compress full open pages.

        No token of an open page is evicted, since most heads attend to the newest tokens. Its tokens go to the best
        tier; where the policy evicts, to the last tier, in which each new page replaces another.
        """
        self.num_tokens += 1
        self.recent.lengths = self.recent.lengths + 1
        if self._attention:
            self._mark_attended(self._attention.pop(0))
        if int(self.recent.lengths[0]) < self.layout.config.recent_tokens + TIER_PAGE_TOKENS:
            return
        _, keys, values = self.recent.take_front(torch.full_like(self.recent.lengths, TIER_PAGE_TOKENS))
        shape = (self.layout.num_lanes, TIER_PAGE_TOKENS, -1)
        tier = self.tiers[-1 if self.layout.config.drops else 0]
        self._append(tier, self._compressor.close_page(tier.format, keys.view(shape), values.view(shape)))

    def note_attention(self, pages: Tensor) -> None:
        """Record the largest attention of the next open token in each page, `[lanes, pages of all lists]`.

        It takes effect when `count_decoded` counts the token: a draft token may be rejected.
        """
        self._attention.append(pages)

    def _mark_attended(self, pages: Tensor) -> None:
        num_tokens = torch.stack([part.lengths for part in self.lists]).sum(0)
        attended = (pages >= ATTENDED_FACTOR / num_tokens[:, None]).split(
            [part.addresses.shape[1] for part in self.lists], 1
        )
        for tier, seen in zip(self.tiers, attended[1:], strict=False):  # the sinks are first
            tier.note_attention(seen)

    def free(self) -> None:
        """Return the blocks and the prefill buffer."""
        if self._leaving:
            wait([self._leaving])  # compression in the background reads both
            self._leaving = None
        self.store.free()
        self._older = JoinedPages()
        if self.prefill_buffer:
            self.prefill_buffer.free()
            self.prefill_buffer = None

    def _list(self, page_format: PageFormat) -> PageList:
        return PageList(self.store, page_format, self.layout.num_lanes, self._whole_dtype)

    def _await_chunk(self) -> None:
        """Move the chunk that is compressed in the background to pages, if there is one."""
        if self._leaving:
            shares, self._leaving = self._leaving.result(), None
            self._leave(self.layout.config.chunk_size, shares)

    def _compress_prefill_buffer(
        self, num_tokens: int, *, scale: float = 1.0, keep_all: bool = False, fill_pages: bool = False
    ) -> None:
        """Compress the oldest tokens of the prefill buffer and move them to pages."""
        shares = self._compressor.compress(
            *self._oldest(num_tokens),
            self.pending,
            self._buffer.key_weights,
            scale=scale,
            keep_all=keep_all,
            fill_pages=fill_pages,
        )
        self._leave(num_tokens, shares)

    def _oldest(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores `[lanes, n]`, keys and values `[lanes, n, D]` of the buffer's oldest tokens without sinks."""
        buffer, part = self._buffer, slice(self._num_sinks(num_tokens), num_tokens)
        scores, keys, values = (x.flatten(0, 1)[:, part] for x in (buffer.scores, buffer.keys, buffer.values))
        return scores, keys, values

    def _num_sinks(self, num_tokens: int) -> int:
        """Return how many of the prefill buffer's oldest tokens are sinks."""
        first = self.num_tokens - self._buffer.length  # position of the prefill buffer's first token
        return min(max(self.layout.config.warmup_tokens - first, 0), num_tokens)

    def _leave(self, num_tokens: int, shares: list[TierShare]) -> None:
        """Move the oldest tokens of the prefill buffer to pages."""
        prefill_buffer, sinks = self._buffer, self._num_sinks(num_tokens)
        self._append_all(
            self.sinks, *(x[:, :, :sinks].flatten(0, 1) for x in (prefill_buffer.keys, prefill_buffer.values))
        )
        self._take(shares)
        prefill_buffer.drop_front(num_tokens)

    def _leave_prefill_buffer(self, scale: float, prompt_tokens: int) -> None:
        """At the prompt's end, compress all but the recent window, which becomes the open pages."""
        prefill_buffer, layout = self._buffer, self.layout
        # [0, older) leaves
        older = max(self.num_due(prompt_ends=True), self._num_sinks(prefill_buffer.length))
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
        """Append tokens to the pages of their tiers; those that fill no page stay pending."""
        for pending, tier, share in zip(self.pending, self.tiers, shares, strict=True):
            self._append(tier, share)
            if tier.format != self.layout.whole:
                pending.clear()
                pending.append_tokens(share.lanes, share.keys, share.values)

    def _append(self, tier: TierList, share: TierShare) -> None:
        """Append tokens to a tier's pages; in decode, a tier that may not grow evicts pages first."""
        whole = tier.format == self.layout.whole
        if self.prefill_buffer is None and self.layout.config.drops:
            lanes = share.lanes if whole else share.page_lanes.repeat_interleave(TIER_PAGE_TOKENS)
            tier.make_room(torch.bincount(lanes, minlength=self.layout.num_lanes))
        if whole:
            tier.append_tokens(share.lanes, share.keys, share.values)
        else:
            tier.append_pages(share.page_lanes, share.pages)

    def _append_all(self, part: PageList, keys: Tensor, values: Tensor) -> None:
        """Append the same number of tokens `[lanes, n, D]` to every lane."""
        lanes = torch.arange(keys.shape[0], device="cpu").repeat_interleave(keys.shape[1])
        if len(lanes):
            part.append_tokens(lanes, keys.flatten(0, 1), values.flatten(0, 1))
