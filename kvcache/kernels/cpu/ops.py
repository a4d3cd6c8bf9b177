"""The C++ kernels as functions of torch tensors, like their twins in `kvcache.kernels.torch_twin`.

Checks what the kernels take on trust: dtypes, contiguity, shapes. Only to be called where `build.library()`
is there.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcache.kernels.cpu.build import library
from kvcache.kernels.page_table import PageTable
from kvcache.page_format import PageFormat


def dequantise(
    table: PageTable, dtype: torch.dtype = torch.float32, num_threads: int = 1
) -> tuple[Tensor, Tensor]:
    """See `torch_twin.dequantise`; float32 or bfloat16."""
    assert dtype in (torch.float32, torch.bfloat16)
    dim = table.formats[0].head_dim
    keys = torch.empty(int(table.tokens.sum()), dim, dtype=dtype)
    values = torch.empty_like(keys)
    library().kvb_dequantise(
        *_table(table),
        ctypes.c_int64(table.first.numel()),
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
    """See `torch_twin.decode_attention`."""
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
    pages: Sequence[Tensor],  # B × int64 [KVH, pages]
    lengths: Tensor,  # int64 [B, KVH]
    *,
    scale: float,
    want_largest: bool = False,
    num_threads: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `torch_twin.decode_attention_pool`; slabs in float32 or bfloat16."""
    _check(keys, (torch.float32, torch.bfloat16))
    _check(values, (keys.dtype,))
    _check(lengths, (torch.int64,))
    assert keys.shape == values.shape and keys.shape[2] == q.shape[2] and len(q) == len(pages) == len(lengths)
    size = keys.shape[1]
    addresses = []
    for table in pages:
        _check(table, (torch.int64,))
        start, stride = table.data_ptr(), table.shape[1] * table.itemsize
        addresses += [start + head * stride for head in range(lengths.shape[1])]
    widths = torch.tensor([table.shape[1] for table in pages])
    assert bool((lengths <= widths[:, None] * size).all()), "a lane is longer than its block table"
    rows, out, lse = _rows(q, lengths.numel())
    largest = torch.empty(int(lengths.sum())) if want_largest else None
    tables = torch.tensor(addresses)
    library().kvb_decode_pool(
        _pointer(keys),
        _pointer(values),
        keys.itemsize,
        size,
        _pointer(tables),
        _pointer(lengths),
        *_shape(q, lengths.numel(), scale),
        *map(_pointer, (rows, out, lse, largest)),
        num_threads,
    )
    return out.to(q.dtype), lse, largest


def _rows(q: Tensor, num_items: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries as the kernels want them, and room for output and log-sum-exp."""
    assert q.shape[1] * len(q) % num_items == 0 and q.shape[2] % 16 == 0
    rows = q.float().contiguous()
    return rows, torch.empty_like(rows), rows.new_empty(rows.shape[:2])


def _shape(q: Tensor, num_items: int, scale: float) -> tuple:
    """Return items, query heads of an item, head dim and scale."""
    return ctypes.c_int64(num_items), q.shape[0] * q.shape[1] // num_items, q.shape[2], ctypes.c_float(scale)


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


def _formats(formats: tuple[PageFormat, ...]) -> ctypes.Array:
    """Return the formats as C structs of int32 (`Format` in attend.h); -1 where a section is missing."""
    fields = []
    for kind in formats:
        scaled = (kind.key_scale_offset, kind.key_min_offset, kind.value_scale_offset, kind.value_min_offset)
        key_scale, key_min, value_scale, value_min = (-1,) * 4 if kind.whole else scaled
        fields += [kind.key_bits, kind.value_bits, kind.page_tokens, kind.whole_bytes]
        fields += [kind.key_code_offset, key_scale, key_min, kind.value_code_offset, value_scale, value_min]
        fields += [kind.row_factor_offset if kind.two_axis else -1]
    return (ctypes.c_int32 * len(fields))(*fields)


def _check(tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    assert tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in dtypes


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
