"""The kernels over pages in plain torch: their specification, used where nothing can be compiled.

One lane at a time, softmax in float32. Any page format is supported.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from kvcache.kernels.page_table import BlockTables, PageTable
from kvcache.kernels.page_tokens import PageTokens
from kvcache.kernels.protocol import AnyPageFormat, PrefillOptions
from kvcache.quantize.error_compensation import Compensation
from kvcache.quantize.pages import dequantize_pages, quantize_pages
from kvcache.sizes.page_format import UNIT_BYTES, PageFormat


def supports(page_format: AnyPageFormat) -> bool:
    """See `PageKernels.supports`: a new page format starts here."""
    return True


def quantize(
    rows: PageTokens,  # of P pages, T tokens each; float32 or bfloat16
    page_format: PageFormat,
    compensation: Compensation | None = None,
    *,
    num_threads: int = 1,
) -> Tensor:  # [P, page_bytes] uint8
    """Pack full pages: see `kvcache.quantize.pages.quantize_pages`."""
    keys, values = rows.gather()
    return quantize_pages(keys.float(), values.float(), page_format, compensation)


def dequantize(
    table: PageTable,
    dtype: torch.dtype = torch.float32,
    *,
    out: tuple[Tensor, Tensor] | None = None,  # [at least the tokens, D] each
    num_threads: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return keys and values of all lanes, dense: `[sum of table.tokens, D]`, lane behind lane.

    `out` is room for them, with its dtype, to be used again: fresh memory costs many times the arithmetic.
    """
    lanes = [_lane(table, first, count) for first, count in _entries(table)]
    keys, values = (torch.cat(parts) for parts in zip(*lanes, strict=True))
    if out is None:
        return keys.to(dtype), values.to(dtype)
    return out[0][: len(keys)].copy_(keys), out[1][: len(values)].copy_(values)


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
    tables: BlockTables,  # B sequences, KVH lanes
    *,
    scale: float,
    want_largest: bool = False,
    num_threads: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend as `decode_attention` does, over full-precision pages, keys and values in slabs of their own."""
    lanes = (
        (keys[lane].flatten(0, 1)[:length].float(), values[lane].flatten(0, 1)[:length].float())
        for pages, lengths in zip(tables.pages, tables.lengths.tolist(), strict=True)
        for lane, length in zip(pages, lengths, strict=True)
    )
    return _attend(q, lanes, tables.lengths.numel(), scale, want_largest)


def write_rows(
    slab: Tensor,  # float, contiguous
    places: Tensor,  # int64 [KVH, T]
    rows: Tensor,  # [T, KVH, D]
    *,
    num_threads: int = 1,
) -> None:
    """Write keys or values to a slab, in its type.

    `places[h, t]` is the slab's element at which token t of lane h begins, a multiple of the head's size or of 16.
    """
    dim = rows.shape[2]
    piece = math.gcd(dim, 16)  # the largest piece that all places are multiples of is the fastest
    index = places[:, :, None] // piece + torch.arange(dim // piece, device=places.device)
    pieces = rows.transpose(0, 1).to(slab.dtype).reshape(-1, piece)
    slab.view(-1, piece)[index.flatten().to(slab.device)] = pieces


def prefill_attention_pool(
    q: Tensor,  # [C, H, D] strided, last dim contiguous
    keys: Tensor,  # [P, page_tokens, D]
    values: Tensor,  # [P, page_tokens, D]
    pages: Tensor,  # int64 [KVH, pages]
    past: Tensor,  # int64 [KVH]
    options: PrefillOptions,
    *,
    out: Tensor | None = None,  # [C, H, D]
) -> tuple[Tensor, Tensor]:
    """Attend a chunk of one sequence causally to full-precision pages that hold the chunk's own tokens too.

    The chunk's tokens are in slots `[past, past + C)` of their lanes; query `i` sees slots `[0, past + i]`.
    `out` is room for the output, to be used again. `options.rounds` changes nothing: rounding gains nothing here.

    Returns:
        output `[C, H, D]` in q's dtype; natural log-sum-exp, float32 `[C, H]`.
    """
    outs, lses = [], []
    for head, (lane, before) in enumerate(zip(pages, past.tolist(), strict=True)):
        k, v = (slab[lane].flatten(0, 1)[: before + len(q)].float() for slab in (keys, values))
        part, lse, _ = _attend_causally(_heads(q, head, len(pages)), k, v, options.scale)
        outs.append(part)
        lses.append(lse)
    joined = torch.cat(outs, 1).to(q.dtype)
    return (joined if out is None else out.copy_(joined)), torch.cat(lses, 1)


def prefill_attention(
    q: Tensor,  # [C, H, D] strided, last dim contiguous
    table: PageTable | None,  # one sequence, KVH lanes
    keys: Tensor,  # [KVH, N, D] lanes may be apart
    values: Tensor,  # [KVH, N, D]
    options: PrefillOptions,
    *,
    distance: int | None = None,
    out: Tensor | None = None,  # [C, H, D]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend a chunk of one sequence to its pages, all of them older, and causally to explicit keys.

    The last C keys are the chunk's own. `out` and `options` are as above.

    Returns:
        output `[C, H, D]` in q's dtype; natural log-sum-exp over pages and keys, float32 `[C, H]`; with `distance`, the
        largest weight each explicit key gets from a query at least so many tokens behind it (0: no query is), of any
        of its lane's heads, float32 `[KVH, N]`.
    """
    num_lanes, num_prefill_buffer = keys.shape[:2]
    entries = _entries(table) if table else []
    position = torch.arange(len(q), device=q.device)[:, None] + num_prefill_buffer - len(q)
    outs, lses, largest = [], [], []
    for head in range(num_lanes):
        lane_keys, lane_values = keys[head].float(), values[head].float()
        if table:
            older_keys, older_values = _lane(table, *entries[head])
            lane_keys, lane_values = (
                torch.cat([older_keys, lane_keys]),
                torch.cat([older_values, lane_values]),
            )
        heads = _heads(q, head, num_lanes)
        part, lse, weights = _attend_causally(heads, lane_keys, lane_values, options.scale)
        outs.append(part)
        lses.append(lse)
        if distance is not None:
            near = position - torch.arange(num_prefill_buffer, device=q.device) < distance
            largest.append(weights.amax(1)[:, -num_prefill_buffer:].masked_fill(near, 0).amax(0))
    joined = torch.cat(outs, 1).to(q.dtype)
    return (
        joined if out is None else out.copy_(joined),
        torch.cat(lses, 1),
        None if distance is None else torch.stack(largest),
    )


def _heads(q: Tensor, lane: int, num_lanes: int) -> Tensor:
    """Return the query heads `[C, G, D]` of one KV head."""
    return q.unflatten(1, (num_lanes, -1))[:, lane].float()


def _attend_causally(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attend `[C, G, D]` queries to `[N, D]` keys, the last C their own.

    Returns:
        output `[C, G, D]`, log-sum-exp `[C, G]` and weights `[C, G, N]`.
    """
    scores = torch.einsum("cgd,nd->cgn", q, keys) * scale
    ahead = torch.ones(len(q), len(keys), dtype=torch.bool, device=q.device).triu_(len(keys) - len(q) + 1)
    scores.masked_fill_(ahead[:, None], -torch.inf)
    weights = scores.softmax(2)
    return torch.einsum("cgn,nd->cgd", weights, values), scores.logsumexp(2), weights


def _attend(
    q: Tensor, lanes: Iterable[tuple[Tensor, Tensor]], num_items: int, scale: float, want_largest: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend the query heads of each item to its lane; `lanes` are keys and values `[n, D]` of each."""
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
    lane = torch.zeros(2, num_tokens, table.formats[0].head_dim, device=table.slab.device)
    for number, page_format in enumerate(table.formats):
        chosen = ((format_ids == number) & (counts > 0)).nonzero().flatten()
        units = table.addresses[entries][chosen, None] + torch.arange(
            page_format.page_units, device=table.addresses.device
        )
        parts = dequantize_pages(table.slab.view(-1, UNIT_BYTES)[units].flatten(1), page_format)
        slots = torch.arange(page_format.page_tokens, device=counts.device)
        valid = slots < counts[chosen, None]
        rows = ((ends - counts)[chosen, None] + slots)[valid]
        for part, into in zip(parts, lane, strict=True):
            into[rows] = part[valid]
    return lane[0], lane[1]
