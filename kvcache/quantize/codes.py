"""Codes of 1 to 8 bits packed into bytes as `kvcache.sizes.page_format` lays them out, and back.

A new width is an entry in `PACKINGS`. Codes are packed through wider integers of the same bytes, so a little endian
host is assumed, as torch does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """How codes of one width lie in bytes.

    Args:
        pack: uint8 `[..., D]`, each code below 2 ** bits, to uint8 `[..., D * bits / 8]`.
        unpack: the inverse.
    """

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]


def pack_codes(
    codes: Tensor,  # [..., D] uint8, each below 2 ** bits
    bits: int,
) -> Tensor:  # [..., D * bits / 8] uint8
    """Pack codes into bytes."""
    return PACKINGS[bits].pack(codes)


def unpack_codes(
    packed: Tensor,  # [..., D * bits / 8] uint8
    bits: int,
) -> Tensor:  # [..., D] uint8
    """Undo `pack_codes`."""
    return PACKINGS[bits].unpack(packed)


def _as_they_are(codes: Tensor) -> Tensor:
    return codes


def _pack_1(codes: Tensor) -> Tensor:
    return _pack_4(_join_fours(codes, 1) & 15)


def _unpack_1(packed: Tensor) -> Tensor:
    return _spread_fours(_unpack_4(packed), 1, 0x01010101)


def _pack_2(codes: Tensor) -> Tensor:
    return _join_fours(codes, 2)


def _unpack_2(packed: Tensor) -> Tensor:
    return _spread_fours(packed, 2, 0x03030303)


def _pack_3(codes: Tensor) -> Tensor:
    return torch.cat([_pack_2(codes & 3), _pack_1(codes >> 2)], dim=-1)


def _unpack_3(packed: Tensor) -> Tensor:
    low_bytes = packed.shape[-1] * 2 // 3
    return _unpack_2(packed[..., :low_bytes]) | _unpack_1(packed[..., low_bytes:]) << 2


def _pack_4(codes: Tensor) -> Tensor:
    pairs = codes.view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8)  # only the low byte is kept


def _unpack_4(packed: Tensor) -> Tensor:
    pairs = packed.to(torch.int16)
    return ((pairs | pairs << 4) & 0x0F0F).view(torch.uint8)


def _join_fours(codes: Tensor, bits: int) -> Tensor:
    """Move four codes, a byte apart, next to each other in one byte."""
    fours, close = codes.view(torch.int32), 8 - bits
    return (fours | fours >> close | fours >> 2 * close | fours >> 3 * close).to(torch.uint8)


def _spread_fours(packed: Tensor, bits: int, mask: int) -> Tensor:
    """Undo `_join_fours`."""
    fours, apart = packed.to(torch.int32), 8 - bits
    return ((fours | fours << apart | fours << 2 * apart | fours << 3 * apart) & mask).view(torch.uint8)


PACKINGS: dict[int, Packing] = {
    8: Packing(_as_they_are, _as_they_are),
    4: Packing(_pack_4, _unpack_4),
    3: Packing(_pack_3, _unpack_3),
    2: Packing(_pack_2, _unpack_2),
}
