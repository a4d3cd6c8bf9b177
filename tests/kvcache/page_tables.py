"""Page tables of random pages for the kernels' tests; whatever a kernel must not read is NaN."""

import torch
from hypothesis import strategies as st

from kvcache.kernels.page_table import PageTable
from kvcache.quantize.pages import quantize_pages
from kvcache.sizes.page_format import UNIT_BYTES, PageFormat

BITS = [(16, 16), (8, 8), (8, 4), (4, 4), (4, 2), (3, 3), (3, 2)]
NAN_BYTE = 0xFF  # in every byte it makes NaN of float16, bfloat16 and float32


@st.composite
def page_formats(draw, head_dim: int) -> PageFormat:
    key_bits, value_bits = draw(st.sampled_from(BITS))
    whole = key_bits == 16
    return PageFormat(
        key_bits,
        value_bits,
        draw(st.sampled_from([16, 48])) if whole else 64,
        head_dim,
        draw(st.sampled_from([2, 4])),
    )


def poison(page: torch.Tensor, count: int, page_format: PageFormat) -> None:
    """Overwrite everything a page says of slots from `count` on."""
    size, dim = page_format.page_tokens, page_format.head_dim
    key_row = dim * (8 * page_format.whole_bytes if page_format.whole else page_format.key_bits) // 8
    value_row = dim * (8 * page_format.whole_bytes if page_format.whole else page_format.value_bits) // 8
    sections = [(page_format.key_code_offset, key_row), (page_format.value_code_offset, value_row)]
    if not page_format.whole:
        sections += [(page_format.value_scale_offset, 2), (page_format.value_min_offset, 2)]
    for offset, row_bytes in sections:
        page[offset + count * row_bytes : offset + size * row_bytes] = NAN_BYTE


def make_table(sequences: list[list[tuple[PageFormat, int]]], num_lanes: int, seed: int) -> PageTable:
    """Fill pages with random tokens; unused slots, and the memory between pages, are poison."""
    generator = torch.Generator().manual_seed(seed)
    chunks, start, lists = [], 0, []
    for pages in sequences:
        entries = []
        for page_format, width in pages:
            shape = (num_lanes, width)
            counts = torch.randint(0, page_format.page_tokens + 1, shape, generator=generator)
            counts[torch.rand(shape, generator=generator) < 0.4] = page_format.page_tokens
            addresses = torch.full(shape, -1)
            for index in (counts > 0).nonzero().tolist():
                index = tuple(index)
                rows = torch.randn(
                    2, 1, page_format.page_tokens, page_format.head_dim, generator=generator
                ).mul_(2)
                page = quantize_pages(*rows, page_format)[0]
                poison(page, int(counts[index]), page_format)
                gap = torch.full((UNIT_BYTES,), NAN_BYTE, dtype=torch.uint8)
                chunks += [gap, page]
                addresses[index] = start + 1
                start += 1 + page_format.page_units
            entries.append((page_format, addresses, counts))
        lists.append(entries)
    return PageTable.of(torch.cat([*chunks, torch.full((UNIT_BYTES,), NAN_BYTE, dtype=torch.uint8)]), lists)
