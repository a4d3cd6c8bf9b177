"""What becomes of a chunk: who is kept in which tier, and the pages that fill.

Reads what it is given and writes nothing, so that it may run beside the model (`kvcache.background`); the cache then
puts the outcome into pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.compressed_layout import TIER_PAGE_TOKENS, CompressedLayout
from kvcache.compressors.budget import assign_tiers
from kvcache.compressors.lane_shares import LaneShares
from kvcache.page_format import PageFormat
from kvcache.page_list import PageList
from kvcache.quant import quantise_pages

Rows = tuple[Tensor, Tensor, Tensor]  # lanes [N], keys and values [N, D]


@dataclass(frozen=True)
class TierShare:
    """What one tier gets.

    The rows are a whole tier's new tokens; of a quantised one, all those that have no full page yet.
    """

    page_lanes: Tensor  # int64 [P] ascending
    pages: Tensor  # uint8 [P, page_bytes]
    lanes: Tensor  # int64 [N] ascending
    keys: Tensor  # [N, D]
    values: Tensor  # [N, D]


def close_page(
    layout: CompressedLayout,
    page_format: PageFormat,
    keys: Tensor,  # [lanes, 64, D]
    values: Tensor,  # [lanes, 64, D]
) -> TierShare:
    """Give every lane one more full page of a tier."""
    lanes = torch.arange(layout.num_lanes)
    if page_format == layout.whole:
        return _rows(lanes.repeat_interleave(keys.shape[1]), keys.flatten(0, 1), values.flatten(0, 1))
    none = keys[:0, 0]
    pages = quantise_pages(keys.float(), values.float(), page_format)
    return TierShare(lanes, pages, lanes[:0], none, none)


def compress(
    layout: CompressedLayout,
    scores: Tensor,  # [lanes, C]
    keys: Tensor,  # [lanes, C, D]
    values: Tensor,  # [lanes, C, D]
    pending: Sequence[PageList],
    lane_shares: LaneShares | None = None,
    *,
    keep_all: bool = False,
) -> list[TierShare]:
    """Give each token its tier, drop the rest, and quantise the pages that become full.

    Args:
        pending: for each tier, the tokens that wait for its next page. They are read only.
        lane_shares: for budget `calibrated`.
        keep_all: drop nothing, and let better tiers take so many more that they leave no page half full.
    """
    config = layout.config
    ratios = [tier.ratio for tier in config.resolved_tiers]
    if keep_all:
        ratios[-1] = 1 - sum(ratios[:-1])
    tiers = assign_tiers(
        scores.view(layout.num_layers, layout.num_kv_heads, -1),
        tuple(ratios),
        config.budget if config.judges else "uniform",  # who keeps everything equally has nothing to judge
        config.floor_ratio,
        config.layer_budget,
        lane_shares,
    ).flatten(0, 1)
    if keep_all:
        for number, held in enumerate(pending[:-1]):
            _top_up(tiers, number, scores, held.lengths)
    shares = []
    for number, (held, page_format) in enumerate(zip(pending, layout.tiers, strict=True)):
        lanes, tokens = (tiers == number).nonzero(as_tuple=True)
        rows = (lanes, keys[lanes, tokens], values[lanes, tokens])
        if page_format == layout.whole:
            shares.append(_rows(*rows))
        else:
            shares.append(_fill_pages(layout, page_format, held.read_rows(), rows))
    return shares


def _rows(lanes: Tensor, keys: Tensor, values: Tensor) -> TierShare:
    """Return the share of a tier whose tokens stay whole."""
    return TierShare(lanes[:0], keys.new_empty(0, 0, dtype=torch.uint8), lanes, keys, values)


def _top_up(tiers: Tensor, number: int, scores: Tensor, held: Tensor) -> None:
    """Move the best tokens of worse tiers to one tier, in place, until its new and held tokens fill whole pages."""
    missing = -(held + (tiers == number).sum(1)) % TIER_PAGE_TOKENS
    ranks = (
        scores.masked_fill(tiers <= number, -torch.inf)
        .argsort(dim=1, descending=True, stable=True)
        .argsort(dim=1)
    )
    tiers[(ranks < missing[:, None]) & (tiers > number)] = number


def _fill_pages(layout: CompressedLayout, page_format: PageFormat, held: Rows, new: Rows) -> TierShare:
    """Join new tokens to those held in their lanes, and quantise as many whole pages as there are in each lane."""
    lanes = torch.cat([held[0], new[0]])
    order = lanes.argsort(stable=True)
    lanes = lanes[order]
    keys, values = (torch.cat([old.to(x.dtype), x])[order] for old, x in zip(held[1:], new[1:], strict=True))
    size = page_format.page_tokens
    lengths = torch.bincount(lanes, minlength=layout.num_lanes)
    rank = torch.arange(len(lanes)) - (lengths.cumsum(0) - lengths)[lanes]
    full = rank < (lengths // size * size)[lanes]
    pages = quantise_pages(*(x[full].float().unflatten(0, (-1, size)) for x in (keys, values)), page_format)
    return TierShare(lanes[full][::size], pages, lanes[~full], keys[~full], values[~full])
