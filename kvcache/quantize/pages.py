"""Packing keys and values into quantized pages and back: the specification of every kernel.

Holds the arithmetic and the rotations; `page_format` says where each byte lies. All pages of a call at once.
"""

import math
from functools import partial

import torch
from torch import Tensor

from kvcache.quantize.codes import pack_codes, unpack_codes
from kvcache.quantize.error_compensation import Compensation
from kvcache.sizes.page_format import PageFormat

# Four codes spread over the middle 80 % of a token's range lower the attention output's error by a fifth
# against the whole range, and do better than choosing each group's share by its squared error. At 3 and more
# bits values gain next to nothing; keys lose half as much again: their extremes are what attention is about.
_TWO_BIT_SPAN = 0.8
_FLOAT16_MAX = 65504.0


def quantize_pages(
    keys: Tensor,  # [P, T, D] float, rotated already where rotation is wanted
    values: Tensor,  # [P, T, D] float
    page_format: PageFormat,
    compensation: Compensation | None = None,
) -> Tensor:  # [P, page_bytes] uint8
    """Pack full pages.

    Every slot counts for its key channels' ranges: fill a partial page's unused slots with copies of others. Scales and
    minima are the same with and without compensation.
    """
    assert keys.shape == values.shape, "keys and values disagree"
    assert keys.shape[1:] == (page_format.page_tokens, page_format.head_dim), (
        "these are not pages of that format"
    )
    pages = torch.empty(len(keys), page_format.page_bytes, dtype=torch.uint8, device=keys.device)
    pages[:, page_format.used_bytes :] = 0
    if page_format.whole:
        dtype = _whole_dtype(page_format)
        _put(pages, page_format.key_code_offset, keys.to(dtype))
        _put(pages, page_format.value_code_offset, values.to(dtype))
        return pages
    keys, values = keys.float(), values.float()
    key_weights, value_weights = _page_weights(compensation)
    codes, scale, minimum = _quantize(keys, page_format.key_bits, 1, key_weights)
    _put(pages, page_format.key_code_offset, pack_codes(codes, page_format.key_bits))
    _put(pages, page_format.key_scale_offset, scale)
    _put(pages, page_format.key_min_offset, minimum)
    codes, scale, minimum = _quantize(values, page_format.value_bits, 2, value_weights)
    _put(pages, page_format.value_code_offset, pack_codes(codes, page_format.value_bits))
    _put(pages, page_format.value_scale_offset, scale)
    _put(pages, page_format.value_min_offset, minimum)
    return pages


def dequantize_pages(
    pages: Tensor,  # [P, page_bytes] uint8
    page_format: PageFormat,
) -> tuple[Tensor, Tensor]:  # keys, values [P, T, D] float32
    """Unpack pages; keys and values come back as they were given, rotated or not."""
    num_tokens, head_dim = page_format.page_tokens, page_format.head_dim
    shape = (num_tokens, head_dim)
    if page_format.whole:
        dtype = _whole_dtype(page_format)
        keys = _get(pages, page_format.key_code_offset, shape, dtype)
        return keys.float(), _get(pages, page_format.value_code_offset, shape, dtype).float()
    key_row_bytes = head_dim * page_format.key_bits // 8
    codes = _get(pages, page_format.key_code_offset, (num_tokens, key_row_bytes), torch.uint8)
    scale = _get(pages, page_format.key_scale_offset, (1, head_dim), torch.float16).float()
    minimum = _get(pages, page_format.key_min_offset, (1, head_dim), torch.float16).float()
    keys = torch.addcmul(minimum, unpack_codes(codes, page_format.key_bits).float(), scale)
    value_row_bytes = head_dim * page_format.value_bits // 8
    codes = _get(pages, page_format.value_code_offset, (num_tokens, value_row_bytes), torch.uint8)
    scale = _get(pages, page_format.value_scale_offset, (num_tokens, 1), torch.float16).float()
    minimum = _get(pages, page_format.value_min_offset, (num_tokens, 1), torch.float16).float()
    return keys, torch.addcmul(minimum, unpack_codes(codes, page_format.value_bits).float(), scale)


def rotation(head_dim: int) -> Tensor:  # [D, D] float32
    """Return the orthogonal, symmetric matrix whose `x @ R` spreads a head's outliers over all its elements.

    A normalised Hadamard matrix, times a Hartley matrix for the odd part of the size (80 = 16 × 5).
    Being symmetric it is its own inverse. Scores stay the same when queries and keys are rotated alike; the
    rotation of values is folded into the weights.
    """
    power = head_dim & -head_dim
    hadamard = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(hadamard) < power:
        hadamard = torch.kron(
            torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu"), hadamard
        )
    odd = head_dim // power
    index = torch.arange(odd, dtype=torch.float64, device="cpu")
    angle = 2 * math.pi / odd * index[:, None] * index
    return (torch.kron(hadamard, angle.cos() + angle.sin()) / math.sqrt(head_dim)).float()


@torch.no_grad()
def fold_value_rotation(
    qkv_weight: Tensor,  # [(H + 2 KVH) D, hidden], rows of queries, keys, values
    output_weight: Tensor,  # [hidden, H D]
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    qkv_bias: Tensor | None = None,  # [(H + 2 KVH) D]
) -> None:
    """Rotate every value head, and turn it back in the output projection, in place.

    The layer computes what it did, and its values come out as `v @ rotation(head_dim)`. Folding twice undoes
    it.
    """
    matrix = rotation(head_dim).to(qkv_weight.device)
    first_value = (num_heads + num_kv_heads) * head_dim
    assert qkv_weight.shape[0] == first_value + num_kv_heads * head_dim, "the fused weight has other heads"
    assert output_weight.shape[1] == num_heads * head_dim, "the output weight has other heads"
    values = qkv_weight[first_value:].unflatten(0, (num_kv_heads, head_dim))  # [KVH, D, hidden]
    values.copy_(matrix.T @ values.float())
    if qkv_bias is not None:
        bias = qkv_bias[first_value:].unflatten(0, (num_kv_heads, head_dim))
        bias.copy_(bias.float() @ matrix)
    outputs = output_weight.unflatten(1, (num_heads, head_dim))  # [hidden, H, D]
    outputs.copy_(outputs.float() @ matrix)


def _quantize(
    x: Tensor,  # [P, T, D] float32
    bits: int,
    dim: int,
    weights: Tensor | None,  # [P, D, D]
) -> tuple[Tensor, Tensor, Tensor]:  # codes uint8 [P, T, D], scale and minimum float16 with `dim` kept as 1
    """Quantize along `dim`, one scale and minimum a group."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    low, high = low.clamp(-_FLOAT16_MAX, _FLOAT16_MAX), high.clamp(-_FLOAT16_MAX, _FLOAT16_MAX)
    if bits == 2:
        middle, half = (low + high) / 2, (high - low) * (_TWO_BIT_SPAN / 2)
        low, high = middle - half, middle + half
    minimum, scale = _minimum_and_scale(low, high, bits)
    encode = _encode if weights is None else partial(_encode_compensated, weights=weights)
    return encode(x, minimum, scale, bits).to(torch.uint8), scale.half(), minimum.half()


def _minimum_and_scale(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return float32 values that float16 holds exactly and whose codes reach from `low` to `high`.

    The minimum is rounded down and the scale up, so that rounding never pushes the group's ends out of reach,
    so the error is within half a scale even where a float16 step of the minimum exceeds the group's range.
    """
    minimum = -_round_up(-low)
    return minimum, _round_up((high - minimum) / (2**bits - 1))


def _round_up(x: Tensor) -> Tensor:
    nearest = x.half().float()
    # one step is at most 2^-10 of the number, or 2^-24 below the normal range
    raised = (x + x.abs() * 2**-10 + 2**-24).clamp(max=_FLOAT16_MAX).half().float()
    return torch.where(nearest < x, raised, nearest)


def _encode(x: Tensor, minimum: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return the codes as float32, rounded and within range."""
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    # subtract first: minimum × inverse would lose the digits of a narrow group far from zero
    return (x - minimum).mul_(inverse).round_().clamp_(0, 2**bits - 1)


def _encode_compensated(x: Tensor, minimum: Tensor, scale: Tensor, bits: int, weights: Tensor) -> Tensor:
    """Return codes as `_encode` does, each column's target shifted to compensate the errors of those before it."""
    x = x.clamp(-_FLOAT16_MAX, _FLOAT16_MAX)  # an error is finite
    columns, minimum, scale = (part.expand_as(x).mT.contiguous() for part in (x, minimum, scale))  # [P, D, T]
    codes, errors = torch.empty_like(columns), torch.empty_like(columns)
    for column in range(x.shape[2]):
        now = slice(column, column + 1)
        made_up = weights[:, now, :column] @ errors[:, :column]
        codes[:, now] = _encode(columns[:, now] + made_up, minimum[:, now], scale[:, now], bits)
        errors[:, now] = columns[:, now] - (minimum[:, now] + codes[:, now] * scale[:, now])
    return codes.mT.contiguous()


def _page_weights(compensation: Compensation | None) -> tuple[Tensor | None, Tensor | None]:
    """Return each page's weights `[P, D, D]` for keys and values."""
    if compensation is None:
        return None, None
    keys, values = compensation.key_weights, compensation.value_weights
    return None if keys is None else keys[compensation.lanes], values[compensation.lanes]


def _whole_dtype(page_format: PageFormat) -> torch.dtype:
    return torch.bfloat16 if page_format.whole_bytes == 2 else torch.float32


def _put(pages: Tensor, offset: int, section: Tensor) -> None:
    flat = section.contiguous().view(torch.uint8).flatten(1)
    pages[:, offset : offset + flat.shape[1]] = flat


def _get(pages: Tensor, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    return pages[:, offset : offset + num_bytes].view(dtype).unflatten(1, shape)
