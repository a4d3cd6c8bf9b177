"""What becomes of a chunk: who is kept in which tier, and the pages that fill.

Reads what it is given and writes nothing, so that it may run beside the model (`background`); the cache then
puts the outcome into pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.compress.allocation import EVICTED, assign_tiers
from kvcache.compress.lane_shares import LaneShares
from kvcache.kernels.page_tokens import PageRows
from kvcache.kernels.registry import kernels_for
from kvcache.pages.page_list import PageList
from kvcache.quantize.error_compensation import Compensation
from kvcache.sizes.compressed import TIER_PAGE_TOKENS, CompressedLayout
from kvcache.sizes.page_format import PageFormat

Rows = tuple[Tensor, Tensor, Tensor]  # lanes [N], keys [N, D], values [N, D]


@dataclass(frozen=True)
class TierShare:
    """What one tier gets.

    The rows are a whole tier's new tokens; of a quantized one, all those that have no full page yet.
    """

    page_lanes: Tensor  # int64 [P] ascending
    pages: Tensor  # uint8 [P, page_bytes]
    lanes: Tensor  # int64 [N] ascending
    keys: Tensor  # [N, D]
    values: Tensor  # [N, D]


@dataclass(frozen=True)
class Compressor:
    """Compress by a policy; one for all sequences.

    Args:
        layout: of the model and the policy.
        lane_shares: what each lane needs, for budget `calibrated`.
        value_weights: how the columns of values make up for each other's errors, float32 `[lanes, D, D]`; None: nothing
            compensates.
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
        """Give each token its tier, drop the rest, and quantize the pages that become full.

        Args:
            pending: for each tier, the tokens that wait for its next page. They are read only.
            key_weights: as `value_weights`, by the sequence's own queries.
            scale: of the tiers' ratios.
            keep_all: drop nothing, and let better tiers take so many more that they leave no page half full.
            fill_pages: with this, drop the worst of the last tier that fill no page.
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
            else "uniform",  # who keeps everything equally has nothing to judge
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
                shares.append(self._fill_pages(page_format, held.read_rows(), new, keys, values, key_weights))
        if fill_pages:  # of lanes with less than a page some are left
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
        """Give every lane 64 more tokens of a tier. Keys are rounded plainly: the prompt's queries are forgotten."""
        lanes = torch.arange(self.layout.num_lanes, device="cpu")
        if page_format == self.layout.whole:
            return _whole_share(
                lanes.repeat_interleave(keys.shape[1]), keys.flatten(0, 1), values.flatten(0, 1)
            )
        rows = PageRows.of_pages(keys, values)
        pages = self._quantize(page_format, lanes, rows, None)
        return TierShare(lanes, pages, lanes[:0], rows.held_keys, rows.held_values)

    def _fill_pages(
        self,
        page_format: PageFormat,
        held: Rows,
        new: tuple[Tensor, Tensor],  # lanes [N] ascending, tokens [N]
        keys: Tensor,  # [lanes, C, D]
        values: Tensor,  # [lanes, C, D]
        key_weights: Tensor | None,
    ) -> TierShare:
        """Join a chunk's tokens to those held in their lanes, and quantize as many whole pages as there are in each."""
        (held_lanes, held_keys, held_values), (new_lanes, tokens) = held, new
        size, num_lanes = page_format.page_tokens, self.layout.num_lanes
        num_held, num_new = (torch.bincount(x, minlength=num_lanes) for x in (held_lanes, new_lanes))
        lengths = num_held + num_new
        starts = lengths.cumsum(0) - lengths  # of the lanes
        # Both are sorted, so each token's place among all follows from how many there are of which lane.
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
        rows = PageRows(keys, values, held_keys, held_values, order[full].view(-1, size))
        page_lanes = lanes.repeat_interleave(num_pages)
        pages = self._quantize(page_format, page_lanes, rows, key_weights)
        return TierShare(
            page_lanes, pages, lanes.repeat_interleave(lengths % size), *rows.gather(order[~full])
        )

    def _quantize(
        self,
        page_format: PageFormat,
        lanes: Tensor,  # [P]
        rows: PageRows,
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
    """Move the best tokens of worse tiers to one tier, in place, until its new and held tokens fill whole pages."""
    missing = -(held + (tiers == number).sum(1)) % TIER_PAGE_TOKENS
    order = scores.masked_fill(tiers <= number, -torch.inf).argsort(dim=1, descending=True, stable=True)
    tiers[(order.argsort(dim=1) < missing[:, None]) & (tiers > number)] = number


def _cut(tiers: Tensor, number: int, scores: Tensor, held: Tensor) -> None:
    """Drop the worst tokens of a tier, in place, that with those held fill no whole page.

    The newer half goes last, oldest first: too few queries have seen it to judge it.
    """
    excess = (held + (tiers == number).sum(1)) % TIER_PAGE_TOKENS
    worth = scores.clone()
    worth[:, worth.shape[1] // 2 :] = torch.inf
    order = worth.masked_fill(tiers != number, torch.nan).argsort(dim=1, stable=True)  # NaN is last
    tiers[(order.argsort(dim=1) < excess[:, None]) & (tiers == number)] = EVICTED
