"""The C++ kernels as functions of torch tensors, like their references in `engine.kernels.reference`.

Checks what the kernels take on trust: dtypes, contiguity, shapes. Only to be called where `library()` is there.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels.int8 import Int8Rows, Int8Weight
from engine.kernels.packed import PackedWeight
from engine.kernels.reference import HeadNorms, KeyTurn
from kvcache.kernels.cpu.c_interface import FLOAT, INT, LONG, POINTER, CInterface

_DTYPES = (torch.float32, torch.bfloat16)
LAYER_KERNELS = CInterface(
    {
        "kvb_rms_norm": {
            "is_bf16": INT,
            "x": POINTER,
            "weight": POINTER,
            "num_rows": LONG,
            "width": INT,
            "eps": FLOAT,
            "out": POINTER,
            "codes": POINTER,
            "scales": POINTER,
            "threads": INT,
        },
        "kvb_silu_mul": {
            "is_bf16": INT,
            "gate_up": POINTER,
            "num_rows": LONG,
            "width": INT,
            "out": POINTER,
            "codes": POINTER,
            "scales": POINTER,
            "threads": INT,
        },
        "kvb_quantize_rows": {
            "is_bf16": INT,
            "x": POINTER,
            "num_rows": LONG,
            "width": INT,
            "codes": POINTER,
            "scales": POINTER,
            "threads": INT,
        },
        "kvb_rotate": {
            "is_bf16": INT,
            "x": POINTER,
            "stride": LONG,
            "num_rows": LONG,
            "num_q": INT,
            "num_k": INT,
            "dim": INT,
            "cos": POINTER,
            "sin": POINTER,
            "q_norm": POINTER,
            "k_norm": POINTER,
            "eps": FLOAT,
            "turned": POINTER,
            "threads": INT,
        },
        "kvb_int8_product": {
            "is_bf16": INT,
            "codes": POINTER,
            "scales": POINTER,
            "panels": POINTER,
            "weight_scales": POINTER,
            "starts": POINTER,
            "bias": POINTER,
            "num_rows": LONG,
            "depth": INT,
            "width": INT,
            "out": POINTER,
            "adds": INT,
            "threads": INT,
        },
        "kvb_float_product": {
            "types": INT,
            "x": POINTER,
            "panels": POINTER,
            "bias": POINTER,
            "num_rows": LONG,
            "depth": INT,
            "width": INT,
            "out": POINTER,
            "adds": INT,
            "threads": INT,
        },
        "kvb_before_attention": {
            "model": POINTER,
            "layer": POINTER,
            "room": POINTER,
            "num_rows": LONG,
            "hidden": POINTER,
            "cos": POINTER,
            "sin": POINTER,
            "threads": INT,
        },
        "kvb_after_attention": {
            "model": POINTER,
            "layer": POINTER,
            "room": POINTER,
            "num_rows": LONG,
            "hidden": POINTER,
            "attended": POINTER,
            "threads": INT,
        },
    },
    Path(__file__).parent,
)


def library() -> ctypes.CDLL | None:
    """Return the kernels, or None where they cannot be compiled."""
    return LAYER_KERNELS.library()


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | Int8Rows) -> None:
    """See `reference.rms_norm`."""
    _check(x, _DTYPES)
    _check(weight, (x.dtype,))
    num_rows, width = x.shape
    assert weight.shape == (width,) and width % 8 == 0
    _functions().kvb_rms_norm(
        _is_bf16(x), _at(x), _at(weight), num_rows, width, eps, *_rows(out, x), torch.get_num_threads()
    )


def silu_mul(gate_up: Tensor, out: Tensor | Int8Rows) -> None:
    """See `reference.silu_mul`."""
    _check(gate_up, _DTYPES)
    up = gate_up[:, gate_up.shape[1] // 2 :]
    num_rows, width = up.shape
    assert gate_up.shape[1] == 2 * width and width % 8 == 0
    _functions().kvb_silu_mul(
        _is_bf16(up), _at(gate_up), num_rows, width, *_rows(out, up), torch.get_num_threads()
    )


def quantize_rows(x: Tensor, out: Int8Rows) -> None:
    """See `reference.quantize_rows`."""
    _check(x, _DTYPES)
    num_rows, width = x.shape
    assert width % 8 == 0
    _functions().kvb_quantize_rows(
        _is_bf16(x), _at(x), num_rows, width, *_rows(out, x)[1:], torch.get_num_threads()
    )


def rotate(
    qkv: Tensor,
    num_q: int,
    num_k: int,
    cos: Tensor,
    sin: Tensor,
    *,
    norms: HeadNorms | None = None,
    turn: KeyTurn | None = None,
) -> None:
    """See `reference.rotate`."""
    num_tokens, num_heads, dim = qkv.shape
    _check(qkv, _DTYPES)
    assert num_q + num_k <= num_heads and num_q % num_k == 0 and dim % 16 == 0
    for table in (cos, sin):
        _check(table, (torch.float32,))
        assert table.shape == (num_tokens, dim // 2)
    q_norm, k_norm, eps = (norms.q, norms.k, norms.eps) if norms else (None, None, 0.0)
    for weight in (q_norm, k_norm):
        if weight is not None:
            _check(weight, (qkv.dtype,))
            assert weight.shape == (dim,)
    is_hadamard = dim & (dim - 1) == 0
    if turn is not None:
        _check(turn.turned, (torch.uint8,))
        assert turn.turned.shape == (num_k,)
    _functions().kvb_rotate(
        _is_bf16(qkv),
        _at(qkv),
        num_heads * dim,
        num_tokens,
        num_q,
        num_k,
        dim,
        *map(_at, (cos, sin, q_norm, k_norm)),
        eps,
        _at(turn.turned) if turn is not None and is_hadamard else None,
        torch.get_num_threads(),
    )
    if turn is not None and not is_hadamard:
        turned = turn.turned.bool()
        heads = torch.cat([turned.repeat_interleave(num_q // num_k), turned]).nonzero().flatten()
        qkv[:, heads] = (qkv[:, heads].float() @ turn.matrix).to(qkv.dtype)


def float_panel() -> int:
    """See `reference.float_panel`."""
    return _functions().kvb_float_panel()


def float_product(
    x: Tensor, weight: PackedWeight, out: Tensor, *, bias: Tensor | None = None, adds: bool = False
) -> None:
    """See `reference.float_product`."""
    (width, depth), num_rows = weight.shape, len(x)
    _check(x, _DTYPES)
    _check(weight.panels, (x.dtype, torch.bfloat16))
    _check(out, (torch.float32, x.dtype))
    assert weight.panels.shape[2:] == (float_panel(), 1 + _is_bf16(weight.panels))
    assert x.shape == (num_rows, depth) and out.shape == (num_rows, width)
    if bias is not None:
        _check(bias, (torch.float32,))
        assert bias.shape == (width,)
    _functions().kvb_float_product(
        _is_bf16(x) + 2 * _is_bf16(weight.panels) + 4 * _is_bf16(out),
        *map(_at, (x, weight.panels, bias)),
        num_rows,
        depth,
        width,
        _at(out),
        adds,
        torch.get_num_threads(),
    )


def int8_panel() -> int:
    """See `reference.int8_panel`."""
    return _functions().kvb_int8_panel()


def int8_group() -> int:
    """See `reference.int8_group`."""
    return _functions().kvb_int8_group()


def int8_product(
    x: Int8Rows, weight: Int8Weight, out: Tensor, *, bias: Tensor | None = None, adds: bool = False
) -> None:
    """See `reference.int8_product`."""
    num_rows = len(x.codes)
    _check(out, _DTYPES)
    assert weight.codes.shape[2:] == (int8_panel(), int8_group()) and weight.width % 8 == 0
    assert x.codes.shape == (num_rows, weight.depth) and out.shape == (num_rows, weight.width)
    if bias is not None:
        _check(bias, (torch.float32,))
        assert bias.shape == (weight.width,)
    _functions().kvb_int8_product(
        _is_bf16(out),
        *map(_at, (x.codes, x.scales, weight.codes, weight.scales, weight.starts, bias)),
        num_rows,
        weight.depth,
        weight.width,
        _at(out),
        adds,
        torch.get_num_threads(),
    )


def _functions() -> ctypes.CDLL:
    found = library()
    assert found is not None, "the kernels are not compiled"
    return found


def _rows(out: Tensor | Int8Rows, like: Tensor) -> tuple[int | None, int | None, int | None]:
    """Return where rows go: as numbers, or as codes and scales."""
    if isinstance(out, Int8Rows):
        _check(out.codes, (torch.int8,))
        _check(out.scales, (torch.float32,))
        assert out.codes.shape == like.shape and out.scales.shape == like.shape[:1]
        return None, _at(out.codes), _at(out.scales)
    _check(out, (like.dtype,))
    assert out.shape == like.shape
    return _at(out), None, None


def _check(tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    assert tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in dtypes


def _is_bf16(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
