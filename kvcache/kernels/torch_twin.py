"""The kernels over pages in plain torch: their specification, and what runs where they cannot be compiled.

One lane at a time, softmax in float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcache.kernels.page_table import PageTable
from kvcache.page_format import UNIT_BYTES
from kvcache.quant import dequantise_pages


def dequantise(
    table: PageTable, dtype: torch.dtype = torch.float32, num_threads: int = 1
) -> tuple[Tensor, Tensor]:
    """Return keys and values of all lanes, dense: `[sum of table.tokens, D]`, lane behind lane."""
    lanes = [_lane(table, first, count) for first, count in _entries(table)]
    keys, values = (torch.cat(parts).to(dtype) for parts in zip(*lanes, strict=True))
    return keys, values


def decode_attention(
    q: Tensor,  # [B, H, D]
    table: PageTable,  # B sequences, KVH lanes
    *,
    scale: float,
    want_largest: bool = False,
    num_threads: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend one query per sequence and head to its lane.

    Returns:
        output `[B, H, D]` in q's dtype; log-sum-exp, float32 `[B, H]`; if asked for, the largest weight that
        any of the lane's query heads gave each slot, float32 `[sum of table.tokens]`.
    """
    lanes = (_lane(table, first, count) for first, count in _entries(table))
    return _attend(q, lanes, table.first.numel(), scale, want_largest)


def decode_attention_pool(
    q: Tensor,  # [B, H, D]
    keys: Tensor,  # [P, page_tokens, D]
    values: Tensor,  # [P, page_tokens, D]
    pages: Sequence[Tensor],  # B × int64 [KVH, pages]
    lengths: Tensor,  # int64 [B, KVH]
    *,
    scale: float,
    want_largest: bool = False,
    num_threads: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend as `decode_attention` does, over full-precision pages, keys and values in slabs of their own."""
    lanes = (
        tuple(slab[lane].flatten(0, 1)[:length].float() for slab in (keys, values))
        for table, row in zip(pages, lengths.tolist(), strict=True)
        for lane, length in zip(table, row, strict=True)
    )
    return _attend(q, lanes, lengths.numel(), scale, want_largest)


def _attend(q: Tensor, lanes, num_items: int, scale: float, want_largest: bool):
    rows = q.float().reshape(num_items, -1, q.shape[2])  # [B × KVH, G, D]
    out, lse, largest = torch.zeros_like(rows), rows.new_empty(rows.shape[:2]), []
    for item, (keys, values) in enumerate(lanes):
        scores = rows[item] @ keys.T * scale  # [G, n]
        lse[item] = scores.logsumexp(1)
        weights = (scores - lse[item, :, None]).exp()
        out[item] = weights @ values
        if want_largest and len(keys):
            largest.append(weights.amax(0))
    joined = torch.cat([rows.new_zeros(0), *largest]) if want_largest else None
    return out.view_as(q).to(q.dtype), lse.view(q.shape[:2]), joined


def _entries(table: PageTable) -> list[tuple[int, int]]:
    return list(zip(table.first.flatten().tolist(), table.num_pages.flatten().tolist(), strict=True))


def _lane(table: PageTable, first: int, num_pages: int) -> tuple[Tensor, Tensor]:
    """Return one lane's keys and values, float32 `[tokens, D]`."""
    entries = slice(first, first + num_pages)
    counts, format_ids = table.counts[entries].long(), table.format_ids[entries]
    ends = counts.cumsum(0)
    num_tokens = int(ends[-1]) if num_pages else 0
    lane = torch.zeros(2, num_tokens, table.formats[0].head_dim)
    for number, page_format in enumerate(table.formats):
        chosen = ((format_ids == number) & (counts > 0)).nonzero().flatten()
        units = table.addresses[entries][chosen, None] + torch.arange(page_format.page_units)
        parts = dequantise_pages(table.slab.view(-1, UNIT_BYTES)[units].flatten(1), page_format)
        slots = torch.arange(page_format.page_tokens)
        valid = slots < counts[chosen, None]
        rows = ((ends - counts)[chosen, None] + slots)[valid]
        for part, into in zip(parts, lane, strict=True):
            into[rows] = part[valid]
    return lane.unbind()
