"""Pages hold what was put in, to half a scale, at exactly the bytes their format names."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from kvcache.quantize.codes import pack_codes, unpack_codes
from kvcache.quantize.pages import (
    dequantize_pages,
    fold_value_rotation,
    quantize_pages,
    rotation,
)
from kvcache.sizes.page_format import PageFormat

BITS = [(8, 8), (8, 4), (4, 4), (4, 3), (4, 2), (3, 3), (3, 2)]


def read_scales(pages, page_format, which):
    """Return a page's float16 scales and minima of `key` or `value`, as float32."""
    count = page_format.head_dim if which == "key" else page_format.page_tokens
    sections = []
    for name in ("scale", "min"):
        offset = getattr(page_format, f"{which}_{name}_offset")
        sections.append(pages[:, offset : offset + 2 * count].contiguous().view(torch.float16).float())
    return sections


@pytest.mark.parametrize(
    ("bits", "packed"),
    [
        (8, [7, 6, 5, 4, 3, 2, 1, 0]),
        (4, [0x67, 0x45, 0x23, 0x01]),
        # 3 2 1 0 | 3 2 1 0, the first code lowest
        (2, [0b00011011, 0b00011011]),
        # the low two bits as above, then the top bits of 7 6 5 4 3 2 1 0
        (3, [0b00011011, 0b00011011, 0b00001111]),
    ],
)
def test_codes_lie_where_the_format_says(bits, packed):
    codes = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0], dtype=torch.uint8)
    if bits == 2:
        codes = codes & 3
    assert pack_codes(codes, bits).tolist() == packed


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_packing_gives_back_every_code(bits, data):
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), 8 * data.draw(st.integers(1, 17)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    codes = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (*shape[:2], shape[2] * bits // 8)
    assert torch.equal(unpack_codes(packed, bits), codes)


@pytest.mark.parametrize(("key_bits", "value_bits"), BITS)
def test_a_page_is_these_bytes(key_bits, value_bits):
    """Codes 0 … top by construction, so that scales and every packed byte are known beforehand."""
    page_format = PageFormat(key_bits, value_bits, 16, 8)
    key_top, value_top = 2**key_bits - 1, 2**value_bits - 1
    key_codes = (torch.arange(16)[:, None] * key_top // 15 + torch.zeros(8, dtype=torch.int64)) % (
        key_top + 1
    )
    value_codes = torch.arange(8) * value_top // 7 + torch.zeros(16, 1, dtype=torch.int64)
    keys, values = key_codes * 0.5 - 2, value_codes * 0.25 + 1
    page = quantize_pages(keys[None], values[None], page_format)[0]
    expected = bytearray()
    expected += bytes(pack_codes(key_codes.to(torch.uint8), key_bits).flatten().tolist())
    expected += bytes.fromhex("0038") * 8 + bytes.fromhex("00c0") * 8  # 0.5 and -2
    if value_bits == 2:
        # values 1 … 1.75 spread over the middle 80 %: scale 0.2 (float16, up), minimum 1.075 (down)
        expected += bytes(pack_codes(value_codes.to(torch.uint8), 2).flatten().tolist())
        assert page[page_format.value_scale_offset :][:2].view(torch.float16).item() == pytest.approx(
            0.2, rel=2e-3
        )
        assert page[page_format.value_min_offset :][:2].view(torch.float16).item() == pytest.approx(
            1.075, rel=2e-3
        )
        assert bytes(page[: len(expected)].tolist()) == bytes(expected)
        return
    expected += bytes(pack_codes(value_codes.to(torch.uint8), value_bits).flatten().tolist())
    expected += bytes.fromhex("0034") * 16 + bytes.fromhex("003c") * 16  # 0.25 and 1
    assert len(expected) == page_format.used_bytes
    expected += bytes(page_format.page_bytes - len(expected))
    assert bytes(page.tolist()) == bytes(expected)


@pytest.mark.parametrize(("key_bits", "value_bits"), BITS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_no_element_is_off_by_more_than_half_a_scale(key_bits, value_bits, data):
    page_format = PageFormat(key_bits, value_bits, 16, 8)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    size = 10.0 ** data.draw(st.integers(-6, 4))
    offset = data.draw(st.sampled_from([0.0, 1.0, -300.0, 1e4]))
    keys, values = (torch.randn(2, 16, 8, generator=generator) * size + offset for _ in range(2))
    pages = quantize_pages(keys, values, page_format)
    read_keys, read_values = dequantize_pages(pages, page_format)
    rounding = 1e-6 * (abs(offset) + size)  # float32's own
    key_scale, _ = read_scales(pages, page_format, "key")
    assert ((read_keys - keys).abs() <= key_scale[:, None] * 0.5001 + rounding).all()
    value_scale, value_min = read_scales(pages, page_format, "value")
    low, high = value_min[:, :, None], (value_min + (2**value_bits - 1) * value_scale)[:, :, None]
    # 2-bit values are cut to the span on purpose; what lies inside keeps the bound
    within = values.clamp(low, high) if value_bits == 2 else values
    assert ((read_values - within).abs() <= value_scale[:, :, None] * 0.5001 + rounding).all()


@pytest.mark.parametrize(("key_bits", "value_bits"), BITS)
def test_constants_zeros_and_extremes_stay_finite(key_bits, value_bits):
    page_format = PageFormat(key_bits, value_bits, 16, 8)
    pages = []
    for fill in (0.0, 1e-9, -1e-30, 0.1, 1e4, -1e4, 1e6, -1e38, -65480.0):
        page = torch.full((16, 8), fill)
        pages.append(page)
    for low, high in ((-1e4, 1e4), (0.0, 6e4), (-1e5, 1e5), (0.0, 1e-8)):
        page = torch.full((16, 8), low)
        page[::3, ::2] = high
        pages.append(page)
    given = torch.stack(pages)
    read_keys, read_values = dequantize_pages(quantize_pages(given, given, page_format), page_format)
    for read in (read_keys, read_values):
        assert torch.isfinite(read).all()
        assert (read[0].abs() <= 2**-23).all()  # zeros
        assert torch.allclose(read[3:6], given[3:6], rtol=2e-3)  # constants, to a float16's half step or two


@pytest.mark.parametrize("whole_bytes", [2, 4])
def test_whole_pages_are_the_elements_themselves(whole_bytes):
    page_format = PageFormat(16, 16, 16, 64, whole_bytes)
    keys, values = torch.randn(3, 16, 64).bfloat16().float(), torch.randn(3, 16, 64).bfloat16().float()
    pages = quantize_pages(keys, values, page_format)
    assert pages.shape == (3, page_format.page_bytes)
    read_keys, read_values = dequantize_pages(pages, page_format)
    assert torch.equal(read_keys, keys) and torch.equal(read_values, values)


def test_a_page_does_not_depend_on_its_neighbours():
    page_format = PageFormat(4, 2, 64, 64)
    keys, values = torch.randn(5, 64, 64), torch.randn(5, 64, 64)
    together = quantize_pages(keys, values, page_format)
    for index in range(5):
        alone = quantize_pages(keys[index : index + 1], values[index : index + 1], page_format)
        assert torch.equal(together[index : index + 1], alone)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 80])
def test_rotation_is_orthogonal_and_spreads_an_outlier(head_dim):
    matrix = rotation(head_dim)
    assert torch.allclose(matrix @ matrix.T, torch.eye(head_dim), atol=1e-6)
    assert torch.equal(matrix, matrix.T)
    # one element of size 1 ends up with no element above twice the even share
    assert matrix.abs().max() <= 2 / head_dim**0.5


@pytest.mark.parametrize("with_bias", [False, True])
def test_folding_rotates_values_and_leaves_the_layer_as_it_was(with_bias):
    num_heads, num_kv_heads, head_dim, hidden = 4, 2, 80, 48
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn((num_heads + 2 * num_kv_heads) * head_dim, hidden, generator=generator)
    bias = torch.randn(len(qkv), generator=generator) if with_bias else None
    output = torch.randn(hidden, num_heads * head_dim, generator=generator)
    x = torch.randn(7, hidden, generator=generator)

    def layer():
        projected = torch.nn.functional.linear(x, qkv, bias).unflatten(-1, (-1, head_dim)).transpose(0, 1)
        q, k, v = projected.split((num_heads, num_kv_heads, num_kv_heads))
        attended = scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)[0]
        return attended.transpose(0, 1).flatten(1) @ output.T, v

    before, values = layer()
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    fold_value_rotation(qkv, output, qkv_bias=bias, **sizes)
    after, rotated = layer()
    assert torch.allclose(after, before, rtol=1e-4, atol=1e-3 * before.abs().max().item())
    assert torch.allclose(rotated, values @ rotation(head_dim), atol=1e-4)
    assert not torch.allclose(rotated, values, atol=1e-1)
