"""The C++ kernels as functions of torch tensors, like their references in `kvcache.kernels.reference`.

Checks what the kernels take on trust: dtypes, contiguity, shapes. Only to be called where `build.library()`
is there.
"""

import ctypes
import functools

import torch
from torch import Tensor

from kvcache.kernels import reference
from kvcache.kernels.cpu import build
from kvcache.kernels.page_table import BlockTables, PageTable
from kvcache.kernels.page_tokens import PageRows
from kvcache.quantize.error_compensation import Compensation
from kvcache.sizes.page_format import PageFormat

_DECODE, _QUERIES = "liif", "pilliiif"  # what `_shape` and `_queries` return
_SIGNATURES = {
    "kvb_quantize": "pilpppillppipppplli",
    "kvb_dequantize": "ppppppp" + "liippi",
    "kvb_decode_mixed": "ppippppp" + _DECODE + "ppppi",
    "kvb_decode_pool": "ppiipp" + _DECODE + "ppppi",
    "kvb_prefill_pool": "ppiiplpi" + _QUERIES + "ppii",
    "kvb_prefill_mixed": "ppppppp" + "ppilii" + _QUERIES + "pplpii",
    "kvb_write_rows": "pippillilii",
}


def library() -> ctypes.CDLL | None:
    """Return the kernels, or None where they cannot be compiled."""
    found = build.library()
    return found and declared(found)


@functools.cache
def declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """Return a library whose functions know what they take."""
    return build.declare(found, _SIGNATURES)


def quantize(
    rows: PageRows,  # of P pages, T tokens each; float32 or bfloat16
    page_format: PageFormat,
    compensation: Compensation | None = None,
    *,
    num_threads: int = 1,
) -> Tensor:  # [P, page_bytes] uint8
    """See `reference.quantize`; whole pages are copied by torch."""
    if page_format.whole:
        return reference.quantize(rows, page_format, compensation)
    (num_pages, size), (num_lanes, num_tokens, dim) = rows.index.shape, rows.keys.shape
    assert (size, dim) == (page_format.page_tokens, page_format.head_dim) and dim % 16 == 0
    _check(rows.index, (torch.int64,))
    if num_pages:
        assert (
            -len(rows.held_keys) <= int(rows.index.min()) and int(rows.index.max()) < num_lanes * num_tokens
        )
    for keys, values in ((rows.keys, rows.values), (rows.held_keys, rows.held_values)):
        assert keys.shape == values.shape and keys.stride() == values.stride() and keys.shape[-1] == dim
        assert keys.dtype == values.dtype and keys.dtype in (torch.float32, torch.bfloat16)
        assert keys.device.type == values.device.type == "cpu"
    assert num_pages == 0 or rows.keys.stride()[1:] == (dim, 1)
    _check(rows.held_keys, (rows.held_keys.dtype,))
    key_weights = value_weights = lanes = None
    if compensation is not None:
        key_weights, value_weights = compensation.key_weights, compensation.value_weights
        lanes = compensation.lanes
        _check(lanes, (torch.int64,))
        assert lanes.shape == (num_pages,)
        last = int(lanes.max()) if num_pages else -1
    for table in (key_weights, value_weights):
        if table is not None:
            _check(table, (torch.float32,))
            assert table.shape[1:] == (dim, dim) and last < len(table)
    pages = torch.empty(num_pages, page_format.page_bytes, dtype=torch.uint8)
    library().kvb_quantize(
        _formats((page_format,)),
        dim,
        num_pages,
        *map(_pointer, (rows.index, rows.keys, rows.values)),
        rows.keys.itemsize,
        num_tokens,
        rows.keys.stride(0),
        *map(_pointer, (rows.held_keys, rows.held_values)),
        rows.held_keys.itemsize,
        *map(_pointer, (key_weights, value_weights, lanes, pages)),
        page_format.used_bytes,
        page_format.page_bytes,
        num_threads,
    )
    return pages


def dequantize(
    table: PageTable,
    dtype: torch.dtype = torch.float32,
    *,
    out: tuple[Tensor, Tensor] | None = None,  # [at least the tokens, D] each
    num_threads: int = 1,
) -> tuple[Tensor, Tensor]:
    """See `reference.dequantize`; float32 or bfloat16."""
    dim, num_tokens = table.formats[0].head_dim, int(table.tokens.sum())
    if out is None:
        out = tuple(torch.empty(num_tokens, dim, dtype=dtype) for _ in range(2))
    keys, values = (room[:num_tokens] for room in out)
    dtype = keys.dtype
    for room in (keys, values):
        _check(room, (dtype,))
        assert dtype in (torch.float32, torch.bfloat16) and room.shape == (num_tokens, dim)
    library().kvb_dequantize(
        *_table(table),
        table.first.numel(),
        dim,
        int(dtype == torch.bfloat16),
        _pointer(keys),
        _pointer(values),
        num_threads,
    )
    return keys, values


def decode_attention(
    q: Tensor,  # [B, H, D]
    table: PageTable,  # B sequences, KVH lanes
    *,
    scale: float,
    want_largest: bool = False,
    num_threads: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `reference.decode_attention`."""
    assert q.shape[2] == table.formats[0].head_dim and len(q) == len(table.first)
    rows, out, lse = _rows(q, table.first.numel())
    largest = torch.empty(int(table.tokens.sum())) if want_largest else None
    slab, formats, *pages = _table(table)
    library().kvb_decode_mixed(
        slab,
        formats,
        len(table.formats),
        *pages,
        *_shape(q, table.first.numel(), scale),
        *map(_pointer, (rows, out, lse, largest)),
        num_threads,
    )
    return out.to(q.dtype), lse, largest


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
    """See `reference.decode_attention_pool`; slabs in float32 or bfloat16."""
    _check(keys, (torch.float32, torch.bfloat16))
    _check(values, (keys.dtype,))
    lengths, size = tables.lengths, keys.shape[1]
    assert keys.shape == values.shape and keys.shape[2] == q.shape[2] and len(q) == len(lengths)
    assert tables.page_tokens == size
    rows, out, lse = _rows(q, lengths.numel())
    largest = torch.empty(int(lengths.sum())) if want_largest else None
    library().kvb_decode_pool(
        _pointer(keys),
        _pointer(values),
        keys.itemsize,
        size,
        _pointer(tables.places),
        _pointer(lengths),
        *_shape(q, lengths.numel(), scale),
        *map(_pointer, (rows, out, lse, largest)),
        num_threads,
    )
    return out.to(q.dtype), lse, largest


def write_rows(slab: Tensor, places: Tensor, rows: Tensor, *, num_threads: int = 1) -> None:
    """See `reference.write_rows`; float32 and bfloat16, heads of a multiple of 8."""
    num_tokens, num_lanes, dim = rows.shape
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    for tensor in (slab, rows):
        assert tensor.dtype in (torch.float32, torch.bfloat16) and tensor.device.type == "cpu"
    assert slab.is_contiguous() and dim % 8 == 0
    _check(places, (torch.int64,))
    assert places.shape == (num_lanes, num_tokens)
    library().kvb_write_rows(
        _pointer(slab),
        slab.dtype == torch.bfloat16,
        _pointer(places),
        _pointer(rows),
        rows.dtype == torch.bfloat16,
        rows.stride(0),
        rows.stride(1),
        num_lanes,
        num_tokens,
        dim,
        num_threads,
    )


def prefill_attention_pool(
    q: Tensor,  # [C, H, D] strided, last dim contiguous
    keys: Tensor,  # [P, page_tokens, D]
    values: Tensor,  # [P, page_tokens, D]
    pages: Tensor,  # int64 [KVH, pages]
    past: Tensor,  # int64 [KVH]
    *,
    scale: float,
    out: Tensor | None = None,  # [C, H, D]
    rounds: bool = False,
    num_threads: int = 1,
) -> tuple[Tensor, Tensor]:
    """See `reference.prefill_attention_pool`; queries and slabs in float32 or bfloat16.

    With bfloat16 queries, a CPU that multiplies bfloat16 natively rounds keys, values and weights to it. Otherwise, if
    it `rounds`, a CPU that multiplies integers faster than floats rounds queries and keys to 16 bits, weights and
    values to 13 (kvcache/kernels/cpu/integers.h).
    """
    num_new, num_heads, dim = q.shape
    _check(keys, (torch.float32, torch.bfloat16))
    _check(values, (keys.dtype,))
    _check(past, (torch.int64,))
    assert keys.shape == values.shape and keys.shape[2] == dim and dim % 16 == 0
    assert len(pages) == len(past) and num_heads % len(past) == 0
    # A row of a wider block table is as good as a table of its own.
    assert pages.dtype == torch.int64 and pages.stride(1) == 1 and pages.device.type == "cpu"
    assert int(past.max()) + num_new <= pages.shape[1] * keys.shape[1], (
        "a lane is longer than its block table"
    )
    rows, out, lse = _chunk(q, out)
    library().kvb_prefill_pool(
        _pointer(keys),
        _pointer(values),
        keys.itemsize,
        keys.shape[1],
        _pointer(pages),
        pages.stride(0),
        _pointer(past),
        len(past),
        *_queries(rows, len(past), scale),
        *map(_pointer, (out, lse)),
        rounds,
        num_threads,
    )
    return out, lse


def prefill_attention(
    q: Tensor,  # [C, H, D] strided, last dim contiguous
    table: PageTable | None,  # one sequence, KVH lanes
    keys: Tensor,  # [KVH, N, D] lanes may be apart
    values: Tensor,  # [KVH, N, D]
    *,
    scale: float,
    distance: int | None = None,
    out: Tensor | None = None,  # [C, H, D]
    rounds: bool = False,
    num_threads: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `reference.prefill_attention`; queries, keys and values in float32 or bfloat16.

    They are rounded as in `prefill_attention_pool`; packed values not further, and their weights to 15 bits.
    """
    num_lanes, num_prefill_buffer, dim = keys.shape
    assert (
        keys.shape == values.shape
        and keys.stride() == values.stride()
        and dim == q.shape[2]
        and dim % 16 == 0
    )
    assert keys.dtype == values.dtype and keys.dtype in (torch.float32, torch.bfloat16)
    assert keys.stride()[1:] == (dim, 1) and keys.device.type == values.device.type == "cpu"
    assert len(q) <= num_prefill_buffer and q.shape[1] % num_lanes == 0
    assert table is None or (table.first.shape == (1, num_lanes) and table.formats[0].head_dim == dim)
    assert distance is None or distance >= 0
    rows, out, lse = _chunk(q, out)
    largest = None if distance is None else torch.empty(num_lanes, num_prefill_buffer)
    library().kvb_prefill_mixed(
        *(_table(table) if table else [None] * 7),
        _pointer(keys),
        _pointer(values),
        keys.itemsize,
        keys.stride(0) * keys.itemsize,
        num_prefill_buffer,
        num_lanes,
        *_queries(rows, num_lanes, scale),
        *map(_pointer, (out, lse)),
        distance or 0,
        _pointer(largest),
        rounds,
        num_threads,
    )
    return out, lse, largest


def _chunk(q: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return a chunk's queries as the kernels want them, and room for output and log-sum-exp."""
    assert q.dtype in (torch.float32, torch.bfloat16) and q.device.type == "cpu"
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _check(out, (q.dtype,))
    assert out.shape == q.shape
    return q if q.stride(2) == 1 else q.contiguous(), out, torch.empty(q.shape[:2])


def _queries(rows: Tensor, num_lanes: int, scale: float) -> tuple:
    """Return pointer, whether bfloat16, strides of tokens and heads, tokens, query heads of a lane, head dim, scale."""
    assert scale > 0
    num_new, num_heads, dim = rows.shape
    strides = (rows.stride(0), rows.stride(1))
    is_bf16 = int(rows.dtype == torch.bfloat16)
    return _pointer(rows), is_bf16, *strides, num_new, num_heads // num_lanes, dim, scale


def _rows(q: Tensor, num_items: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries as the kernels want them, and room for output and log-sum-exp."""
    assert q.shape[1] * len(q) % num_items == 0 and q.shape[2] % 16 == 0
    rows = q.float().contiguous()
    return rows, torch.empty_like(rows), rows.new_empty(rows.shape[:2])


def _shape(q: Tensor, num_items: int, scale: float) -> tuple:
    """Return items, query heads of an item, head dim and scale."""
    return num_items, q.shape[0] * q.shape[1] // num_items, q.shape[2], scale


def _table(table: PageTable) -> tuple:
    """Return slab, formats, addresses, format ids, counts, first and num_pages as pointers."""
    for tensor, dtype in (
        (table.slab, torch.uint8),
        (table.addresses, torch.int64),
        (table.format_ids, torch.uint8),
        (table.counts, torch.int32),
        (table.first, torch.int64),
        (table.num_pages, torch.int64),
    ):
        _check(tensor, (dtype,))
    assert len(table.addresses) == len(table.format_ids) == len(table.counts)
    assert table.first.shape == table.num_pages.shape
    return (
        _pointer(table.slab),
        _formats(table.formats),
        *map(_pointer, (table.addresses, table.format_ids, table.counts, table.first, table.num_pages)),
    )


@functools.cache
def _formats(formats: tuple[PageFormat, ...]) -> ctypes.Array:
    """Return the formats as C structs of int32 (`Format` in page.h); -1 where a section is missing."""
    fields = []
    for kind in formats:
        scaled = (kind.key_scale_offset, kind.key_min_offset, kind.value_scale_offset, kind.value_min_offset)
        key_scale, key_min, value_scale, value_min = (-1,) * 4 if kind.whole else scaled
        fields += [kind.key_bits, kind.value_bits, kind.page_tokens, kind.whole_bytes]
        fields += [kind.key_code_offset, key_scale, key_min, kind.value_code_offset, value_scale, value_min]
    return (ctypes.c_int32 * len(fields))(*fields)


def _check(tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    assert tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in dtypes


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
