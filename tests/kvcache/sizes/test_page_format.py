"""Sizes, offsets and refusals of page formats."""

import pytest

from kvcache.sizes.page_format import UNIT_BYTES, PageFormat


@pytest.mark.parametrize(
    ("key_bits", "value_bits", "bits_per_element"),
    [(8, 8, 8.5), (4, 4, 4.5), (4, 2, 3.5), (3, 3, 3.5), (3, 2, 3.0), (16, 16, 16.0)],
)
def test_bits_per_element_count_scales_and_padding(key_bits, value_bits, bits_per_element):
    page_format = PageFormat(key_bits, value_bits, 64, 64)
    assert page_format.bits_per_element == bits_per_element
    assert page_format.page_bytes % UNIT_BYTES == 0


def test_sections_follow_each_other():
    page_format = PageFormat(4, 3, 64, 80)
    offsets = (
        page_format.key_code_offset,
        page_format.key_scale_offset,
        page_format.key_min_offset,
        page_format.value_code_offset,
        page_format.value_scale_offset,
        page_format.value_min_offset,
        page_format.used_bytes,
        page_format.page_bytes,
    )
    assert offsets == (0, 2560, 2720, 2880, 4800, 4928, 5056, 5120)


def test_a_whole_page_is_keys_then_values():
    for whole_bytes in (2, 4):
        page_format = PageFormat(16, 16, 16, 64, whole_bytes)
        assert page_format.value_code_offset == 16 * 64 * whole_bytes
        assert page_format.page_bytes == 2 * page_format.value_code_offset


@pytest.mark.parametrize(
    ("key_bits", "value_bits"), [(16, 16), (8, 8), (4, 4), (4, 3), (4, 2), (3, 3), (3, 2)]
)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128])
def test_every_section_begins_on_sixteen_bytes(key_bits, value_bits, head_dim):
    page_format = PageFormat(key_bits, value_bits, 16, head_dim)
    for name in dir(page_format):
        if name.endswith("_offset"):
            assert getattr(page_format, name) % 16 == 0, name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key_bits": 2, "value_bits": 2}, "2-bit keys"),
        ({"key_bits": 5}, "key_bits must be one of"),
        ({"value_bits": 1}, "value_bits must be one of"),
        ({"key_bits": 3, "value_bits": 4}, "keys at 3 bits below values at 4"),
        ({"key_bits": 16}, "whole or quantized"),
        ({"head_dim": 60}, "head_dim must be a positive multiple of 8, not 60"),
        ({"head_dim": 0}, "head_dim"),
        ({"page_tokens": 40}, "page_tokens must be a positive multiple of 16, not 40"),
        ({"whole_bytes": 1}, "whole_bytes must be 2 or 4"),
    ],
)
def test_impossible_formats_are_refused_with_the_reason(change, reason):
    fields = {"key_bits": 4, "value_bits": 4, "page_tokens": 64, "head_dim": 64, **change}
    with pytest.raises(ValueError, match=reason):
        PageFormat(**fields)
