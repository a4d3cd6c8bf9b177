"""The C++ kernels as functions of torch tensors: a `PageKernels`, specified by `kvcache.kernels.reference`.

Checks what the kernels take on trust: dtypes, contiguity, shapes. Only to be called where `library()` is there.
"""

import ctypes

import torch
from torch import Tensor

from kvcache.kernels import reference
from kvcache.kernels.cpu.arguments import (
    FLOATS,
    NO_TABLE,
    check,
    chunk_arguments,
    decode_arguments,
    formats,
    pointer,
    pool_arguments,
    table_arguments,
)
from kvcache.kernels.cpu.page_functions import PAGE_KERNELS
from kvcache.kernels.page_table import BlockTables, PageTable
from kvcache.kernels.page_tokens import PageTokens
from kvcache.kernels.protocol import AnyPageFormat, PrefillOptions
from kvcache.quantize.error_compensation import Compensation
from kvcache.sizes.full import CacheLayout
from kvcache.sizes.page_format import PageFormat

_KEY_BITS, _VALUE_BITS = (16, 8, 4, 3), (16, 8, 4, 3, 2)  # `with_packed` in codes.h


def library() -> ctypes.CDLL | None:
    """Return the kernels, or None where they cannot be compiled."""
    return PAGE_KERNELS.library()


def _functions() -> ctypes.CDLL:
    found = library()
    assert found is not None, "the kernels are not compiled"
    return found


def supports(page_format: AnyPageFormat) -> bool:
    """See `PageKernels.supports`: heads are read 16 numbers at a time, codes by one loop for each width."""
    fits = page_format.head_dim % 16 == 0
    if isinstance(page_format, CacheLayout):
        return fits
    return fits and page_format.key_bits in _KEY_BITS and page_format.value_bits in _VALUE_BITS


def quantize(
    rows: PageTokens,  # of P pages, T tokens each; float32 or bfloat16
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
    check(rows.index, (torch.int64,))
    if num_pages:
        assert (
            -len(rows.held_keys) <= int(rows.index.min()) and int(rows.index.max()) < num_lanes * num_tokens
        )
    for keys, values in ((rows.keys, rows.values), (rows.held_keys, rows.held_values)):
        assert keys.shape == values.shape and keys.stride() == values.stride() and keys.shape[-1] == dim
        assert keys.dtype == values.dtype and keys.dtype in FLOATS
        assert keys.device.type == values.device.type == "cpu"
    assert num_pages == 0 or rows.keys.stride()[1:] == (dim, 1)
    check(rows.held_keys, (rows.held_keys.dtype,))
    key_weights, value_weights, lanes = _compensation(compensation, num_pages, dim)
    pages = torch.empty(num_pages, page_format.page_bytes, dtype=torch.uint8, device="cpu")
    _functions().kvb_quantize(
        format=formats((page_format,)),
        dim=dim,
        num_pages=num_pages,
        index=rows.index.data_ptr(),
        chunk_keys=rows.keys.data_ptr(),
        chunk_values=rows.values.data_ptr(),
        chunk_bytes=rows.keys.itemsize,
        lane_tokens=num_tokens,
        lane_stride=rows.keys.stride(0),
        held_keys=rows.held_keys.data_ptr(),
        held_values=rows.held_values.data_ptr(),
        held_bytes=rows.held_keys.itemsize,
        key_weights=pointer(key_weights),
        value_weights=pointer(value_weights),
        lanes=pointer(lanes),
        pages=pages.data_ptr(),
        used_bytes=page_format.used_bytes,
        page_bytes=page_format.page_bytes,
        threads=num_threads,
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
        out = (
            torch.empty(num_tokens, dim, dtype=dtype, device="cpu"),
            torch.empty(num_tokens, dim, dtype=dtype, device="cpu"),
        )
    keys, values = (room[:num_tokens] for room in out)
    dtype = keys.dtype
    for room in (keys, values):
        check(room, (dtype,))
        assert dtype in FLOATS and room.shape == (num_tokens, dim)
    _functions().kvb_dequantize(
        **table_arguments(table),
        items=table.first.numel(),
        dim=dim,
        bf16=dtype == torch.bfloat16,
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        threads=num_threads,
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
    queries, out, lse = _decode_room(q)
    largest = torch.empty(int(table.tokens.sum()), device="cpu") if want_largest else None
    _functions().kvb_decode_mixed(
        **table_arguments(table),
        num_formats=len(table.formats),
        **decode_arguments(queries, table.first.numel(), scale, out, lse),
        largest=pointer(largest),
        threads=num_threads,
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
    lengths = tables.lengths
    assert keys.shape[2] == q.shape[2] and len(q) == len(lengths) and tables.page_tokens == keys.shape[1]
    queries, out, lse = _decode_room(q)
    largest = torch.empty(int(lengths.sum()), device="cpu") if want_largest else None
    _functions().kvb_decode_pool(
        **pool_arguments(keys, values),
        tables=tables.places.data_ptr(),
        lengths=lengths.data_ptr(),
        **decode_arguments(queries, lengths.numel(), scale, out, lse),
        largest=pointer(largest),
        threads=num_threads,
    )
    return out.to(q.dtype), lse, largest


def write_rows(slab: Tensor, places: Tensor, rows: Tensor, *, num_threads: int = 1) -> None:
    """See `reference.write_rows`; float32 and bfloat16, heads of a multiple of 8."""
    num_tokens, num_lanes, dim = rows.shape
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    for tensor in (slab, rows):
        assert tensor.dtype in FLOATS and tensor.device.type == "cpu"
    assert slab.is_contiguous() and dim % 8 == 0
    check(places, (torch.int64,))
    assert places.shape == (num_lanes, num_tokens)
    _functions().kvb_write_rows(
        slab=slab.data_ptr(),
        slab_bf16=slab.dtype == torch.bfloat16,
        places=places.data_ptr(),
        rows=rows.data_ptr(),
        rows_bf16=rows.dtype == torch.bfloat16,
        token_stride=rows.stride(0),
        lane_stride=rows.stride(1),
        lanes=num_lanes,
        tokens=num_tokens,
        dim=dim,
        threads=num_threads,
    )


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
    """See `reference.prefill_attention_pool`; queries and slabs in float32 or bfloat16.

    With bfloat16 queries, a CPU that multiplies bfloat16 natively rounds keys, values and weights to it. Otherwise,
    with `options.rounds`, a CPU that multiplies integers faster than floats rounds queries and keys to 16 bits, weights
    and values to 13 (kvcache/kernels/cpu/integers.h).
    """
    num_new, num_heads, dim = q.shape
    check(past, (torch.int64,))
    assert keys.shape[2] == dim and dim % 16 == 0
    assert len(pages) == len(past) and num_heads % len(past) == 0
    # One layer of a wider block table is as good as a table of its own.
    assert pages.dtype == torch.int64 and pages.stride(1) == 1 and pages.device.type == "cpu"
    assert int(past.max()) + num_new <= pages.shape[1] * keys.shape[1], (
        "a lane is longer than its block table"
    )
    queries, out, lse = _chunk_room(q, out)
    _functions().kvb_prefill_pool(
        **pool_arguments(keys, values),
        tables=pages.data_ptr(),
        table_width=pages.stride(0),
        past=past.data_ptr(),
        kv_heads=len(past),
        **chunk_arguments(queries, len(past), options.scale, out, lse),
        rounds=options.rounds,
        threads=options.num_threads,
    )
    return out, lse


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
    """See `reference.prefill_attention`; queries, keys and values in float32 or bfloat16.

    They are rounded as in `prefill_attention_pool`; packed values not further, and their weights to 15 bits.
    """
    num_lanes, num_keys, dim = keys.shape
    assert keys.shape == values.shape and keys.stride() == values.stride()
    assert dim == q.shape[2] and dim % 16 == 0
    assert keys.dtype == values.dtype and keys.dtype in FLOATS
    assert keys.stride()[1:] == (dim, 1) and keys.device.type == values.device.type == "cpu"
    assert len(q) <= num_keys and q.shape[1] % num_lanes == 0
    assert table is None or (table.first.shape == (1, num_lanes) and table.formats[0].head_dim == dim)
    assert distance is None or distance >= 0
    queries, out, lse = _chunk_room(q, out)
    largest = None if distance is None else torch.empty(num_lanes, num_keys, device="cpu")
    _functions().kvb_prefill_mixed(
        **(table_arguments(table) if table else NO_TABLE),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        element_bytes=keys.itemsize,
        lane_bytes=keys.stride(0) * keys.itemsize,
        buffer_tokens=num_keys,
        kv_heads=num_lanes,
        **chunk_arguments(queries, num_lanes, options.scale, out, lse),
        distance=distance or 0,
        largest=pointer(largest),
        rounds=options.rounds,
        threads=options.num_threads,
    )
    return out, lse, largest


def _compensation(
    compensation: Compensation | None, num_pages: int, dim: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the weights of keys and of values, and the lane of each page, checked."""
    if compensation is None:
        return None, None, None
    lanes = compensation.lanes
    check(lanes, (torch.int64,))
    assert lanes.shape == (num_pages,)
    last = int(lanes.max()) if num_pages else -1
    for weights in (compensation.key_weights, compensation.value_weights):
        if weights is not None:
            check(weights, (torch.float32,))
            assert weights.shape[1:] == (dim, dim) and last < len(weights)
    return compensation.key_weights, compensation.value_weights, lanes


def _decode_room(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries in float32, and room for output and log-sum-exp."""
    queries = q.float().contiguous()
    return queries, torch.empty_like(queries), queries.new_empty(queries.shape[:2])


def _chunk_room(q: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return a chunk's queries with a contiguous last dimension, and room for output and log-sum-exp."""
    assert q.dtype in FLOATS and q.device.type == "cpu"
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return q if q.stride(2) == 1 else q.contiguous(), out, torch.empty(q.shape[:2], device="cpu")
