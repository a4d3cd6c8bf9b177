"""One sequence's compressed cache: arena in prefill, pages of several formats, the open page in decode.

A token goes from the arena (or, in decode, from the open pages) to one of the tiers or is dropped, once. Every lane
keeps what the budget gave it:

    sinks    the first tokens, whole
    tiers    survivors; a tier of fewer bits gathers 64 of them whole (`pending`) before it quantises a page
    recent   the newest tokens, whole
"""

import torch
from torch import Tensor

from kvcache.arena import Arena, ArenaPool
from kvcache.compensation import Compensation
from kvcache.compressed_layout import TIER_PAGE_TOKENS, CompressedLayout
from kvcache.compressors.budget import assign_tiers
from kvcache.frames import FramePool, PageStore
from kvcache.kernels.page_table import PageLists
from kvcache.kernels.registry import cpu_kernels
from kvcache.monitoring import LaneUsage
from kvcache.page_format import PageFormat
from kvcache.page_list import PageList


class CompressedCache:
    """Hold one sequence's keys and values.

    Args:
        layout: of the model and the policy.
        whole_dtype: of tokens kept whole.
        frames: where pages come from.
        num_frames: frames reserved for this sequence.
        arenas: where the arena comes from.
        prefix: a cache still in prefill whose tokens this sequence begins with. Quantised pages are shared,
            everything else is copied.
        value_weights: how the columns of values make up for each other's errors, by lane; None: nothing compensates.
    """

    def __init__(
        self,
        layout: CompressedLayout,
        whole_dtype: torch.dtype,
        frames: FramePool,
        num_frames: int,
        arenas: ArenaPool,
        prefix: "CompressedCache | None" = None,
        value_weights: Tensor | None = None,  # [lanes, D, D]
    ):
        self.layout = layout
        self._whole_dtype = whole_dtype
        self._value_weights = value_weights
        self.store = PageStore(frames, num_frames)
        self.arena: Arena | None = Arena(arenas)
        self.num_tokens = 0  # ever cached, kept or not
        if prefix is None:
            self.sinks, self.recent = self._list(layout.whole), self._list(layout.whole)
            self.pending = [self._list(layout.whole) for _ in layout.tiers]
            self.tiers = [self._list(page_format) for page_format in layout.tiers]
        else:
            assert prefix.arena is not None, "only a cache in prefill can be a prefix"
            self.store.share(prefix.store)
            self.sinks, self.recent = (
                part.clone_into(self.store, share=False) for part in (prefix.sinks, prefix.recent)
            )
            self.pending = [part.clone_into(self.store, share=False) for part in prefix.pending]
            self.tiers = [
                part.clone_into(self.store, share=part.format != layout.whole) for part in prefix.tiers
            ]
            self.arena.copy_from(prefix.arena)
            self.num_tokens = prefix.num_tokens
        self.recent_scores = torch.zeros(layout.num_lanes, 0)

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
        """Bytes of the frames this sequence holds alone."""
        return self.store.num_frames * self.store.pool.frame_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of all frames held, shared ones included."""
        return sum(len(frames) for frames in self.store.frames) * self.store.pool.frame_bytes

    @property
    def lane_usage(self) -> LaneUsage:
        """What the lanes keep, asked of their lists; tokens still in the arena are in none."""
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
        if not self.layout.config.streaming:
            return self.arena.capacity - self.arena.length
        size = self.layout.config.chunk_size
        return size - self.num_tokens % size

    def extend(self, num_tokens: int) -> None:
        """Count prompt tokens that all layers have written to the arena."""
        self.arena.extend(num_tokens)
        self.num_tokens += num_tokens

    def num_due(self, *, prompt_ends: bool) -> int:
        """Return how many of the arena's oldest tokens have seen what follows them: these need their scores now."""
        if prompt_ends:
            return self.arena.length
        config = self.layout.config
        is_full = config.streaming and self.arena.length >= (config.delay + 1) * config.chunk_size
        return config.chunk_size if is_full else 0

    def compress(self, *, prompt_ends: bool) -> None:
        """Move the chunk that is old enough to pages, and at the prompt's end everything else."""
        due = self.num_due(prompt_ends=False)
        if due:
            self._compress_arena(due)
        if prompt_ends:
            self._leave_arena()

    def count_decoded(self) -> None:
        """Count a decoded token that all layers have written to the open pages; compress these when they are full."""
        self.num_tokens += 1
        if int(self.recent.lengths[0]) < self.layout.config.recent_tokens + TIER_PAGE_TOKENS:
            return
        _, keys, values = self.recent.take_front(torch.full_like(self.recent.lengths, TIER_PAGE_TOKENS))
        scores = self._grown_scores()
        self.recent_scores = scores[:, TIER_PAGE_TOKENS:]
        shape = (self.layout.num_lanes, TIER_PAGE_TOKENS, -1)
        self._admit(scores[:, :TIER_PAGE_TOKENS], keys.view(shape), values.view(shape))

    def note_attention(self, layer: int, weights: Tensor) -> None:
        """Keep the largest attention `[KVH, n]` that one layer's open-page tokens received in decode."""
        grown = self._grown_scores(weights.shape[1])
        heads = self.layout.num_kv_heads
        rows = grown[layer * heads : (layer + 1) * heads, : weights.shape[1]]
        torch.maximum(rows, weights, out=rows)
        self.recent_scores = grown

    def free(self) -> None:
        """Give frames and arena back."""
        self.store.free()
        if self.arena:
            self.arena.free()
            self.arena = None

    def _list(self, page_format: PageFormat) -> PageList:
        return PageList(self.store, page_format, self.layout.num_lanes, self._whole_dtype)

    def _grown_scores(self, width: int = 0) -> Tensor:
        width = max(width, int(self.recent.lengths.max()), TIER_PAGE_TOKENS)
        missing = width - self.recent_scores.shape[1]
        if missing <= 0:
            return self.recent_scores
        return torch.cat([self.recent_scores, torch.zeros(self.layout.num_lanes, missing)], 1)

    def _compress_arena(self, num_tokens: int) -> None:
        """Judge the oldest tokens of the arena and move them to pages."""
        arena = self.arena
        first = self.num_tokens - arena.length  # position of the arena's first token
        sinks = min(max(self.layout.config.warmup_tokens - first, 0), num_tokens)
        keys, values = (
            arena.keys[:, :, :num_tokens].flatten(0, 1),
            arena.values[:, :, :num_tokens].flatten(0, 1),
        )
        if sinks:
            self._append_all(self.sinks, keys[:, :sinks], values[:, :sinks])
        self._admit(arena.scores[:, :, sinks:num_tokens].flatten(0, 1), keys[:, sinks:], values[:, sinks:])
        arena.drop_front(num_tokens)

    def _leave_arena(self) -> None:
        """At the end of the prompt: compress all but the recent window, which becomes the open pages."""
        arena, config = self.arena, self.layout.config
        older = max(0, arena.length - config.recent_tokens)
        first = self.num_tokens - arena.length
        older = max(older, min(arena.length, config.warmup_tokens - first))
        if older:
            self._compress_arena(older)
        self._append_all(
            self.recent,
            arena.keys[:, :, : arena.length].flatten(0, 1),
            arena.values[:, :, : arena.length].flatten(0, 1),
        )
        self.recent_scores = arena.scores[:, :, : arena.length].flatten(0, 1).clone()
        arena.free()
        self.arena = None

    def _admit(
        self,
        scores: Tensor,  # [lanes, C]
        keys: Tensor,  # [lanes, C, D]
        values: Tensor,  # [lanes, C, D]
    ) -> None:
        """Give each token its tier, drop the rest, and quantise the pages that became full."""
        layout, config = self.layout, self.layout.config
        if not scores.shape[1]:
            return
        tiers = assign_tiers(
            scores.view(layout.num_layers, layout.num_kv_heads, -1),
            tuple(tier.ratio for tier in config.resolved_tiers),
            config.budget,
            config.floor_ratio,
            config.layer_budget,
        ).flatten(0, 1)
        for number, (pending, tier) in enumerate(zip(self.pending, self.tiers, strict=True)):
            lanes, tokens = (tiers == number).nonzero(as_tuple=True)
            if not len(lanes):
                continue
            if tier.format == layout.whole:
                tier.append_rows(lanes, keys[lanes, tokens], values[lanes, tokens])
                continue
            self._quantise(pending, tier, lanes, keys[lanes, tokens], values[lanes, tokens])

    def _quantise(
        self, pending: PageList, tier: PageList, lanes: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Join tokens `[N]` to those pending in their lanes; write full pages to the tier, keep the rest pending."""
        held_lanes, held_keys, held_values = pending.take_all()
        lanes = torch.cat([held_lanes, lanes])
        order = lanes.argsort(stable=True)
        lanes = lanes[order]
        keys = torch.cat([held_keys.to(keys.dtype), keys])[order]
        values = torch.cat([held_values.to(values.dtype), values])[order]
        size = tier.format.page_tokens
        lengths = torch.bincount(lanes, minlength=self.layout.num_lanes)
        rank = torch.arange(len(lanes)) - (lengths.cumsum(0) - lengths)[lanes]
        full = rank < (lengths // size * size)[lanes]
        if bool(full.any()):
            paged = (x[full].float().unflatten(0, (-1, size)) for x in (keys, values))
            page_lanes = lanes[full][::size].contiguous()
            pages = cpu_kernels(self.layout.head_dim).quantise(
                *paged, tier.format, self._compensation(page_lanes), num_threads=torch.get_num_threads()
            )
            tier.append_pages(page_lanes, pages)
        pending.append_rows(lanes[~full], keys[~full], values[~full])

    def _compensation(self, page_lanes: Tensor) -> Compensation | None:
        """Return what pages of these lanes make up for; in decode the queries' moments are gone with the arena."""
        if self._value_weights is None:
            return None
        return Compensation(self.arena.key_weights if self.arena else None, self._value_weights, page_lanes)

    def _append_all(self, part: PageList, keys: Tensor, values: Tensor) -> None:
        """Append the same number of tokens `[lanes, n, D]` to every lane."""
        lanes = torch.arange(keys.shape[0]).repeat_interleave(keys.shape[1])
        if len(lanes):
            part.append_rows(lanes, keys.flatten(0, 1), values.flatten(0, 1))
