"""What becomes of a chunk: who is kept in which tier, and the pages that fill.

Reads what it is given and writes nothing, so that it may run beside the model (`kvcache.background`); the cache then
puts the outcome into pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.compressed_layout import CompressedLayout
from kvcache.compressors.budget import assign_tiers
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


def compress(
    layout: CompressedLayout,
    scores: Tensor,  # [lanes, C]
    keys: Tensor,  # [lanes, C, D]
    values: Tensor,  # [lanes, C, D]
    pending: Sequence[PageList],
) -> list[TierShare]:
    """Give each token its tier, drop the rest, and quantise the pages that become full.

    Args:
        pending: for each tier, the tokens that wait for its next page. They are read only.
    """
    config = layout.config
    tiers = assign_tiers(
        scores.view(layout.num_layers, layout.num_kv_heads, -1),
        tuple(tier.ratio for tier in config.resolved_tiers),
        config.budget,
        config.floor_ratio,
        config.layer_budget,
    ).flatten(0, 1)
    shares = []
    for number, (held, page_format) in enumerate(zip(pending, layout.tiers, strict=True)):
        lanes, tokens = (tiers == number).nonzero(as_tuple=True)
        rows = (lanes, keys[lanes, tokens], values[lanes, tokens])
        if page_format == layout.whole:
            shares.append(TierShare(lanes[:0], keys.new_empty(0, 0, dtype=torch.uint8), *rows))
        else:
            shares.append(_fill_pages(layout, page_format, held.read_rows(), rows))
    return shares


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
