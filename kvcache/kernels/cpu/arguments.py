"""Tensors as the C functions take them: checked, then as pointers and numbers by parameter name."""

import ctypes
import functools

import torch
from torch import Tensor

from kvcache.kernels.page_table import PageTable
from kvcache.sizes.page_format import PageFormat

FLOATS = (torch.float32, torch.bfloat16)
Arguments = dict[str, int | float | ctypes.Array | None]


class Format(ctypes.Structure):
    """`Format` in page.h: bits and byte offsets of a page's sections, -1 where a section is missing."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "key_bits",
            "value_bits",
            "page_tokens",
            "whole_bytes",
            "key_codes",
            "key_scales",
            "key_minima",
            "value_codes",
            "value_scales",
            "value_minima",
        )
    ]


@functools.cache
def formats(page_formats: tuple[PageFormat, ...]) -> ctypes.Array:
    """Return page formats as an array of C structures."""
    return (Format * len(page_formats))(*map(_format, page_formats))


def _format(page_format: PageFormat) -> Format:
    found = Format(
        key_bits=page_format.key_bits,
        value_bits=page_format.value_bits,
        page_tokens=page_format.page_tokens,
        whole_bytes=page_format.whole_bytes,
        key_codes=page_format.key_code_offset,
        key_scales=page_format.key_scale_offset,
        key_minima=page_format.key_min_offset,
        value_codes=page_format.value_code_offset,
        value_scales=page_format.value_scale_offset,
        value_minima=page_format.value_min_offset,
    )
    if page_format.whole:
        found.key_scales = found.key_minima = found.value_scales = found.value_minima = -1
    return found


def check(tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Assert that a tensor is contiguous, on the CPU and of one of these types."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in dtypes


def pointer(tensor: Tensor | None) -> int | None:
    """Return where a tensor's numbers begin; None stands for a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def table_arguments(table: PageTable) -> Arguments:
    """Return the pages of several lanes (`MixedPages` in page.h)."""
    for tensor, dtype in (
        (table.slab, torch.uint8),
        (table.addresses, torch.int64),
        (table.format_ids, torch.uint8),
        (table.counts, torch.int32),
        (table.first, torch.int64),
        (table.num_pages, torch.int64),
    ):
        check(tensor, (dtype,))
    assert len(table.addresses) == len(table.format_ids) == len(table.counts)
    assert table.first.shape == table.num_pages.shape
    return {
        "slab": table.slab.data_ptr(),
        "formats": formats(table.formats),
        "addresses": table.addresses.data_ptr(),
        "format_ids": table.format_ids.data_ptr(),
        "counts": table.counts.data_ptr(),
        "first": table.first.data_ptr(),
        "num_pages": table.num_pages.data_ptr(),
    }


NO_TABLE: Arguments = dict.fromkeys(
    ("slab", "formats", "addresses", "format_ids", "counts", "first", "num_pages")
)


def pool_arguments(keys: Tensor, values: Tensor) -> Arguments:
    """Return a pool's slabs `[P, page_tokens, D]`."""
    check(keys, FLOATS)
    check(values, (keys.dtype,))
    assert keys.shape == values.shape
    return {
        "keys": keys.data_ptr(),
        "values": values.data_ptr(),
        "element_bytes": keys.itemsize,
        "page_tokens": keys.shape[1],
    }


def decode_arguments(
    q: Tensor,  # [B, H, D] float32, contiguous
    num_items: int,  # a KV head of a sequence each
    scale: float,
    out: Tensor,  # [B, H, D] float32
    lse: Tensor,  # [B, H] float32
) -> Arguments:
    """Return the queries of a decode step, and room for output and log-sum-exp."""
    assert q.shape[1] * len(q) % num_items == 0 and q.shape[2] % 16 == 0
    return {
        "items": num_items,
        "heads": q.shape[0] * q.shape[1] // num_items,
        "dim": q.shape[2],
        "scale": scale,
        "q": q.data_ptr(),
        "out": out.data_ptr(),
        "lse": lse.data_ptr(),
    }


def chunk_arguments(q: Tensor, num_lanes: int, scale: float, out: Tensor, lse: Tensor) -> Arguments:
    """Return a chunk's queries `[C, H, D]`, whose last dimension is contiguous, and room as for `decode_arguments`."""
    assert scale > 0
    check(out, (q.dtype,))
    assert out.shape == q.shape
    num_new, num_heads, dim = q.shape
    return {
        "q": q.data_ptr(),
        "q_bf16": q.dtype == torch.bfloat16,
        "token_stride": q.stride(0),
        "head_stride": q.stride(1),
        "tokens": num_new,
        "group": num_heads // num_lanes,
        "dim": dim,
        "scale": scale,
        "out": out.data_ptr(),
        "lse": lse.data_ptr(),
    }
