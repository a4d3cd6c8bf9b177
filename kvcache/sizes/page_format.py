"""The byte layout of one page: what lies where, and what it costs.

Packing, kernels, pool and planner share this description. Pure integers, no torch.

A quantized page, all little endian, one section after the other:

    key codes      row-major [T, D], `key_bits` each
    key scales     D float16       k ≈ minimum + scale × code, per channel over the page
    key minima     D float16
    value codes    row-major [T, D], `value_bits` each
    value scales   T float16       v ≈ minimum + scale × code, per token
    value minima   T float16
    zeros          up to a multiple of `UNIT_BYTES`

The codes of one token's key or value, by their bits:

    8              a byte each
    4              byte i holds code 2i in its low half and code 2i+1 in its high half
    2              byte i holds codes 4i to 4i+3, lowest bits first
    3              the low two bits of all codes as for 2 bits, then their top bits, bit j of byte i for 8i+j

A whole page holds keys, then values, [T, D] each, in the dtype they were computed in.
"""

from dataclasses import dataclass

from kvcache import config

UNIT_BYTES = 512  # pages are addressed in units of this size
WHOLE_BITS = 16  # stands for "as computed", whether the dtype has 2 or 4 bytes
_SCALE_BYTES = 2


@dataclass(frozen=True)
class PageFormat:
    """How the keys and values of one page are stored.

    Args:
        key_bits: 8, 4 or 3 bits a key element, or 16 for whole pages.
        value_bits: 8, 4, 3 or 2 bits a value element, or 16 for whole pages; never more than `key_bits`.
        page_tokens: slots of the page.
        head_dim: elements of one key or value.
        whole_bytes: bytes of an element of a whole page, 2 (bfloat16) or 4 (float32).

    Raises:
        ValueError: Bits or sizes no page can have, with the reason.
    """

    key_bits: int
    value_bits: int
    page_tokens: int
    head_dim: int
    whole_bytes: int = 2

    def __post_init__(self) -> None:
        if self.key_bits == 2:
            raise ValueError("2-bit keys cost too much of the output; use 3 bits or more")
        for name in ("key_bits", "value_bits"):
            bits = getattr(self, name)
            if bits not in config.BITS:
                raise ValueError(f"{name} must be one of {config.BITS}, not {bits}")
        if self.key_bits < self.value_bits:
            raise ValueError(
                f"keys at {self.key_bits} bits below values at {self.value_bits}: "
                "keys are the more delicate, give them at least as many"
            )
        if self.key_bits == WHOLE_BITS and self.value_bits != WHOLE_BITS:
            raise ValueError(
                f"a page is whole or quantized: 16-bit keys cannot go with {self.value_bits}-bit values"
            )
        if self.page_tokens < 16 or self.page_tokens % 16:
            raise ValueError(f"page_tokens must be a positive multiple of 16, not {self.page_tokens}")
        if self.head_dim < 8 or self.head_dim % 8:
            raise ValueError(f"head_dim must be a positive multiple of 8, not {self.head_dim}")
        if self.whole_bytes not in (2, 4):
            raise ValueError(f"whole_bytes must be 2 or 4, not {self.whole_bytes}")

    @property
    def whole(self) -> bool:
        return self.key_bits == WHOLE_BITS

    @property
    def key_code_offset(self) -> int:
        return 0

    @property
    def key_code_bytes(self) -> int:
        return self._code_bytes(self.key_bits)

    @property
    def key_scale_offset(self) -> int:
        return self.key_code_bytes

    @property
    def key_min_offset(self) -> int:
        return self.key_scale_offset + self._scale_bytes(self.head_dim)

    @property
    def value_code_offset(self) -> int:
        return self.key_min_offset + self._scale_bytes(self.head_dim)

    @property
    def value_code_bytes(self) -> int:
        return self._code_bytes(self.value_bits)

    @property
    def value_scale_offset(self) -> int:
        return self.value_code_offset + self.value_code_bytes

    @property
    def value_min_offset(self) -> int:
        return self.value_scale_offset + self._scale_bytes(self.page_tokens)

    @property
    def used_bytes(self) -> int:
        """Bytes that hold data; the rest of the page is zeros."""
        return self.value_min_offset + self._scale_bytes(self.page_tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes a page takes in the slab, a multiple of `UNIT_BYTES`."""
        return self.page_units * UNIT_BYTES

    @property
    def page_units(self) -> int:
        return -(-self.used_bytes // UNIT_BYTES)

    @property
    def bits_per_element(self) -> float:
        """Bits one key or value element costs, scales and padding included."""
        return self.page_bytes * 8 / (2 * self.page_tokens * self.head_dim)

    def _code_bytes(self, bits: int) -> int:
        num_elements = self.page_tokens * self.head_dim
        return num_elements * self.whole_bytes if self.whole else num_elements * bits // 8

    def _scale_bytes(self, num_groups: int) -> int:
        return 0 if self.whole else num_groups * _SCALE_BYTES
