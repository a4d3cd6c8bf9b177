"""Compensated pages: the same bytes and scales, codes whose errors matter less, in the kernel as in the reference."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.kernels import reference
from kvcache.kernels.cpu import build, ops
from kvcache.kernels.page_tokens import PageTokens
from kvcache.quantize.error_compensation import Compensation, compensation_weights, output_second_moments
from kvcache.quantize.pages import dequantize_pages, quantize_pages
from kvcache.sizes.page_format import PageFormat

BITS = [(8, 8), (8, 4), (4, 4), (4, 3), (4, 2), (3, 3), (3, 2)]
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)) or build.library() is None, reason="no C++ compiler"
)


def make_second_moments(num_lanes: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Return second moments with a few strong directions, as queries have them."""
    strong = torch.randn(num_lanes, dim, 3, generator=generator) * 2
    return strong @ strong.mT + torch.eye(dim)


def cost(errors: torch.Tensor, second_moments: torch.Tensor) -> float:
    return float(torch.einsum("ptd,pde,pte->", errors, second_moments, errors))


@pytest.mark.parametrize(("key_bits", "value_bits"), BITS)
def test_errors_matter_less_at_the_same_scales(key_bits, value_bits):
    generator = torch.Generator().manual_seed(0)
    page_format = PageFormat(key_bits, value_bits, 64, 64)
    keys, values = torch.randn(2, 6, 64, 64, generator=generator)
    lanes = torch.tensor([2, 0, 1, 1, 2, 0])
    of_queries, of_outputs = (make_second_moments(3, 64, generator) for _ in range(2))
    weights = [compensation_weights(second_moments) for second_moments in (of_queries, of_outputs)]
    plain = quantize_pages(keys, values, page_format)
    pages = quantize_pages(keys, values, page_format, Compensation(*weights, lanes))
    codes = {
        *range(page_format.key_code_bytes),
        *range(page_format.value_code_offset, page_format.value_code_offset + page_format.value_code_bytes),
    }
    others = torch.tensor([i for i in range(page_format.page_bytes) if i not in codes])
    assert torch.equal(pages[:, others], plain[:, others])
    read = zip((keys, values), dequantize_pages(pages, page_format), strict=True)
    for (exact, better), simple, second_moments in zip(
        read, dequantize_pages(plain, page_format), (of_queries, of_outputs), strict=True
    ):
        # 2-bit values are cut to their span; what is cut cannot all be made up for
        assert cost(better - exact, second_moments[lanes]) < 0.5 * cost(simple - exact, second_moments[lanes])
        # aimed at the wrong lane's directions it would not be
        assert cost(better - exact, second_moments[lanes]) < 0.7 * cost(
            better - exact, second_moments[lanes.roll(1)]
        )


def test_where_every_direction_matters_alike_codes_are_the_plain_ones():
    keys, values = torch.randn(2, 5, 64, 64)
    lanes = torch.arange(5)
    broken = torch.eye(64)
    broken[3, 4] = broken[4, 3] = torch.inf
    second_moments = torch.stack(
        [torch.eye(64), torch.zeros(64, 64), 1e30 * torch.eye(64), broken, torch.full((64, 64), torch.nan)]
    )
    weights = compensation_weights(second_moments)
    assert not weights.any()
    for bits in ((4, 4), (3, 2)):
        page_format = PageFormat(*bits, 64, 64)
        pages = quantize_pages(keys, values, page_format, Compensation(weights, weights, lanes))
        assert torch.equal(pages, quantize_pages(keys, values, page_format))


def test_one_query_alone_is_enough_to_learn_from():
    """Moments of rank one: keys lose nothing in its direction."""
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(64, generator=generator), torch.randn(1, 64, 64, generator=generator)
    weights = compensation_weights(torch.outer(query, query)[None])
    page_format = PageFormat(4, 4, 64, 64)
    lanes = torch.zeros(1, dtype=torch.int64)
    read, _ = dequantize_pages(
        quantize_pages(keys, keys, page_format, Compensation(weights, weights, lanes)), page_format
    )
    simple, _ = dequantize_pages(quantize_pages(keys, keys, page_format), page_format)
    assert ((read - keys) @ query).square().mean() < 0.05 * ((simple - keys) @ query).square().mean()


def test_output_second_moments_weigh_a_values_error_as_the_output_shows_it():
    generator = torch.Generator().manual_seed(0)
    num_kv_heads, group, dim, hidden = 2, 3, 16, 40
    weight = torch.randn(hidden, num_kv_heads * group * dim, generator=generator)
    second_moments = output_second_moments(weight, num_kv_heads, dim)
    error = torch.randn(num_kv_heads, dim, generator=generator)
    for head in range(num_kv_heads):
        columns = weight.unflatten(1, (num_kv_heads, group, dim))[:, head]
        shown = sum((columns[:, g] @ error[head]).square().sum() for g in range(group))
        torch.testing.assert_close(error[head] @ second_moments[head] @ error[head], shown)


def scatter(keys: torch.Tensor, values: torch.Tensor, generator: torch.Generator) -> PageTokens:
    """Return the same pages' tokens in any order: half of them held, half in a chunk of two lanes that lie apart."""
    shape = keys.shape[:2]
    order = torch.randperm(shape.numel(), generator=generator)
    keys, values = (x.flatten(0, 1)[order].unflatten(0, (2, 2, -1)) for x in (keys, values))
    chunk = [F.pad(x[1], (0, 0, 0, 3))[:, : x.shape[2]] for x in (keys, values)]
    index = torch.cat([~torch.arange(len(order) // 2), torch.arange(len(order) // 2)])[order.argsort()]
    return PageTokens(*chunk, *(x[0].flatten(0, 1).bfloat16() for x in (keys, values)), index.view(shape))


@needs_compiler
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_kernel_packs_what_the_reference_packs(data):
    dim = data.draw(st.sampled_from([16, 64, 80, 128]), "head dim")
    size = data.draw(st.sampled_from([16, 48, 64, 80]), "tokens")
    bits = data.draw(st.sampled_from(BITS), "bits")
    page_format = PageFormat(*bits, size, dim)
    num_pages, num_lanes = data.draw(st.integers(0, 6), "pages"), data.draw(st.integers(1, 3), "lanes")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), "seed"))
    keys, values = torch.randn(2, num_pages, size, dim, generator=generator)
    for x in (keys, values):
        x *= 10.0 ** data.draw(st.sampled_from([-9, -3, 0, 4, 30]), "size")
        x += data.draw(st.sampled_from([0.0, -300.0]), "offset")
        x[:, :, 3], x[:, 5], x[:, 7, 9] = (
            0.1,
            0.0,
            1e38,
        )  # a constant channel, a token of zeros, a number too large
    weights = [compensation_weights(make_second_moments(num_lanes, dim, generator)) for _ in range(2)]
    if data.draw(st.booleans(), "values alone"):
        weights[0] = None
    lanes = torch.randint(0, num_lanes, (num_pages,), generator=generator)
    compensation = Compensation(*weights, lanes) if data.draw(st.booleans(), "compensated") else None
    rows = PageTokens.of_pages(keys, values)
    if data.draw(st.booleans(), "scattered"):
        rows = scatter(keys, values, generator)
    expected = reference.quantize(rows, page_format, compensation)
    pages = ops.quantize(rows, page_format, compensation)
    assert pages.shape == expected.shape and not pages[:, page_format.used_bytes :].any()
    # where two codes are equally near, another order of summation chooses the other, and the token goes on from there
    assert float((pages != expected).float().mean()) < 0.002 if num_pages else True
    assert torch.equal(pages, ops.quantize(rows, page_format, compensation, num_threads=3))
