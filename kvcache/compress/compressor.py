"""Compress a chunk: assign its tokens to tiers and quantize the pages that become full.

The compressor only reads its arguments, so that it can run while the model reads on (`background`); the cache then
moves the result to pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.compress.allocation import EVICTED, assign_tiers
from kvcache.compress.lane_shares import LaneShares
from kvcache.kernels.page_tokens import PageTokens
from kvcache.kernels.registry import kernels_for
from kvcache.pages.page_list import PageList
from kvcache.quantize.error_compensation import Compensation
from kvcache.sizes.compressed import TIER_PAGE_TOKENS, CompressedLayout
from kvcache.sizes.page_format import PageFormat

LaneTokens = tuple[Tensor, Tensor, Tensor]  # lanes [N], keys [N, D], values [N, D]


@dataclass(frozen=True)
class TierShare:
    """The tokens that one tier gets, as pages and as single tokens.

    The single tokens of a whole tier are its new tokens; those of a quantized tier are all that fill no page yet.
    """

    page_lanes: Tensor  # int64 [P] ascending
    pages: Tensor  # uint8 [P, page_bytes]
    lanes: Tensor  # int64 [N] ascending
    keys: Tensor  # [N, D]
    values: Tensor  # [N, D]


@dataclass(frozen=True)
class Compressor:
    """Compress chunks as a policy says; one compressor serves all sequences.

    Args:
        layout: of the model and the policy.
        lane_shares: what each lane needs, for budget `calibrated`.
        value_weights: `compensation_weights` of each lane's values, float32 `[lanes, D, D]`; None: errors are not
            compensated.
    """

    layout: CompressedLayout
    lane_shares: LaneShares | None = None
    value_weights: Tensor | None = None

    def compress(
        self,
        scores: Tensor,  # [lanes, C]
        keys: Tensor,  # [lanes, C, D]
        values: Tensor,  # [lanes, C, D]
        pending: Sequence[PageList],
        key_weights: Tensor | None,  # [lanes, D, D]
        *,
        scale: float = 1.0,
        keep_all: bool = False,
        fill_pages: bool = False,
    ) -> list[TierShare]:
        """Assign each token to a tier or evict it, and quantize the pages that become full.

        Args:
            pending: for each tier, its tokens that do not fill a page yet; read, not changed.
            key_weights: `compensation_weights` of each lane's keys, from the sequence's own queries.
            scale: factor of the tiers' ratios.
            keep_all: evict nothing, and give better tiers more tokens until they fill whole pages.
            fill_pages: with `keep_all`, evict the lowest scores of the last tier that fill no page.
        """
        layout, config = self.layout, self.layout.config
        ratios = [tier.ratio * scale for tier in config.resolved_tiers]
        if keep_all:
            ratios[-1] = 1 - sum(ratios[:-1])
        tiers = assign_tiers(
            scores.unflatten(0, (layout.num_layers, layout.num_kv_heads)),
            tuple(ratios),
            config.budget
            if config.needs_scores
            else "uniform",  # one tier that keeps everything needs no scores
            config.floor_ratio,
            config.layer_budget,
            self.lane_shares,
        ).flatten(0, 1)
        if keep_all:
            for number, held in enumerate(pending[:-1]):
                if layout.tiers[number] != layout.whole:
                    _top_up(tiers, number, scores, held.lengths)
        if fill_pages:
            _cut(tiers, len(ratios) - 1, scores, pending[-1].lengths)
        shares = []
        for number, (held, page_format) in enumerate(zip(pending, layout.tiers, strict=True)):
            lanes, tokens = (tiers == number).nonzero(as_tuple=True)
            if page_format == layout.whole:
                shares.append(_whole_share(lanes, keys[lanes, tokens], values[lanes, tokens]))
            else:
                new = (lanes, tokens)
                shares.append(
                    self._fill_pages(page_format, held.read_tokens(), new, keys, values, key_weights)
                )
        if fill_pages:  # lanes with less than one page still have tokens here
            last = shares[-1]
            shares[-1] = TierShare(
                last.page_lanes, last.pages, last.lanes[:0], last.keys[:0], last.values[:0]
            )
        return shares

    def close_page(
        self,
        page_format: PageFormat,
        keys: Tensor,  # [lanes, 64, D]
        values: Tensor,  # [lanes, 64, D]
    ) -> TierShare:
        """Make a page of 64 tokens for every lane; keys are not compensated: the prompt's queries are not kept."""
        lanes = torch.arange(self.layout.num_lanes, device="cpu")
        if page_format == self.layout.whole:
            return _whole_share(
                lanes.repeat_interleave(keys.shape[1]), keys.flatten(0, 1), values.flatten(0, 1)
            )
        rows = PageTokens.of_pages(keys, values)
        pages = self._quantize(page_format, lanes, rows, None)
        return TierShare(lanes, pages, lanes[:0], rows.held_keys, rows.held_values)

    def _fill_pages(
        self,
        page_format: PageFormat,
        held: LaneTokens,
        new: tuple[Tensor, Tensor],  # lanes [N] ascending, tokens [N]
        keys: Tensor,  # [lanes, C, D]
        values: Tensor,  # [lanes, C, D]
        key_weights: Tensor | None,
    ) -> TierShare:
        """Append a chunk's tokens to those held in their lanes, and quantize each lane's full pages."""
        (held_lanes, held_keys, held_values), (new_lanes, tokens) = held, new
        size, num_lanes = page_format.page_tokens, self.layout.num_lanes
        num_held, num_new = (torch.bincount(x, minlength=num_lanes) for x in (held_lanes, new_lanes))
        lengths = num_held + num_new
        starts = lengths.cumsum(0) - lengths  # of the lanes
        # Held and new tokens are sorted by lane, so the lanes' counts give each token's place among all.
        order = torch.empty(len(held_lanes) + len(new_lanes), dtype=torch.int64, device="cpu")
        first_held = num_held.cumsum(0) - num_held
        first_new = num_new.cumsum(0) - num_new
        order[
            (starts - first_held)[held_lanes] + torch.arange(len(held_lanes), device="cpu")
        ] = ~torch.arange(len(held_lanes), device="cpu")
        place = (starts + num_held - first_new)[new_lanes] + torch.arange(len(new_lanes), device="cpu")
        order[place] = new_lanes * keys.shape[1] + tokens

        lanes, num_pages = torch.arange(num_lanes, device="cpu"), lengths // size
        full = torch.arange(len(order), device="cpu") < (starts + num_pages * size).repeat_interleave(lengths)
        rows = PageTokens(keys, values, held_keys, held_values, order[full].view(-1, size))
        page_lanes = lanes.repeat_interleave(num_pages)
        pages = self._quantize(page_format, page_lanes, rows, key_weights)
        return TierShare(
            page_lanes, pages, lanes.repeat_interleave(lengths % size), *rows.gather(order[~full])
        )

    def _quantize(
        self,
        page_format: PageFormat,
        lanes: Tensor,  # [P]
        rows: PageTokens,
        key_weights: Tensor | None,
    ) -> Tensor:  # uint8 [P, page_bytes]
        compensation = (
            None if self.value_weights is None else Compensation(key_weights, self.value_weights, lanes)
        )
        kernels = kernels_for(rows.keys.device, page_format)
        return kernels.quantize(rows, page_format, compensation, num_threads=torch.get_num_threads())


def _whole_share(lanes: Tensor, keys: Tensor, values: Tensor) -> TierShare:
    """Return the share of a tier whose tokens stay whole."""
    return TierShare(lanes[:0], keys.new_empty(0, 0, dtype=torch.uint8), lanes, keys, values)


def _top_up(tiers: Tensor, number: int, scores: Tensor, held: Tensor) -> None:
    """Move the best tokens of worse tiers to one tier, in place, until its held and new tokens fill whole pages."""
    missing = -(held + (tiers == number).sum(1)) % TIER_PAGE_TOKENS
    order = scores.masked_fill(tiers <= number, -torch.inf).argsort(dim=1, descending=True, stable=True)
    tiers[(order.argsort(dim=1) < missing[:, None]) & (tiers > number)] = number


def _cut(tiers: Tensor, number: int, scores: Tensor, held: Tensor) -> None:
    """Evict the lowest scores of a tier, in place, until its held and new tokens fill whole pages.

    The newer half is evicted last, oldest first: too few queries have attended to it for its scores to mean much.
    """
    excess = (held + (tiers == number).sum(1)) % TIER_PAGE_TOKENS
    worth = scores.clone()
    worth[:, worth.shape[1] // 2 :] = torch.inf
    order = worth.masked_fill(tiers != number, torch.nan).argsort(dim=1, stable=True)  # NaN is last
    tiers[(order.argsort(dim=1) < excess[:, None]) & (tiers == number)] = EVICTED
