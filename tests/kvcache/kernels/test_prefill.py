"""Prefill attention in C++ gives what its torch reference gives in float32, on any number of threads, and reads
valid slots alone.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.kernels import reference
from kvcache.kernels.cpu import ops
from kvcache.kernels.protocol import PrefillOptions
from tests.kvcache.kernel_builds import built, each_build, needs_compiler
from tests.kvcache.page_tables import make_table, page_formats

HEAD_DIMS = st.sampled_from([16, 48, 64, 80, 96, 128, 256])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, *, rounded: bool = False
) -> None:
    """Compare with float32; with bfloat16 queries, keys, values and weights may be rounded to it too."""
    assert actual.shape == expected.shape
    assert bool(torch.isfinite(expected).all()), "the reference read poison"
    factor = 2e-3 if rounded else 2e-4
    if dtype == torch.bfloat16:
        assert float((actual - expected).norm()) <= 5e-3 * float(expected.norm())
        factor = 2e-2
    torch.testing.assert_close(
        actual.float(), expected, rtol=factor, atol=factor * float(expected.abs().max())
    )


def make_pool(past: list[int], num_new: int, page_tokens: int, dim: int, dtype: torch.dtype):
    """Return slabs and block table of lanes of `past + num_new` tokens; all other slots are NaN."""
    width = max(-(-(tokens + num_new) // page_tokens) for tokens in past)
    num_pages = len(past) * width + 2
    keys, values = torch.randn(2, num_pages, page_tokens, dim).mul_(2).to(dtype)
    pages = torch.randperm(num_pages)[: len(past) * width].view(len(past), width)
    held = torch.zeros(num_pages, page_tokens, dtype=torch.bool)
    for lane, tokens in zip(pages, past, strict=True):
        held[lane] = (torch.arange(width * page_tokens) < tokens + num_new).view(width, -1)
    keys[~held] = values[~held] = torch.nan
    return keys, values, pages


def make_queries(num_new: int, num_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return queries that are part of wider rows, which are NaN elsewhere.

    In bfloat16 they are small: what rounding of keys does to scores grows with the scores.
    """
    rows = torch.full((num_new, num_heads + 2, dim + 16), torch.nan, dtype=dtype)
    rows[:, 1:-1, :dim] = torch.randn(num_new, num_heads, dim) * (2 if dtype == torch.float32 else 0.5)
    return rows[:, 1:-1, :dim]


@needs_compiler
@each_build
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_chunk_sees_pages_as_the_reference_does(build_name, data):
    dim, page_tokens = data.draw(HEAD_DIMS, "head dim"), data.draw(st.sampled_from([16, 48, 64, 100]), "page")
    group, num_lanes = data.draw(st.integers(1, 16), "group"), data.draw(st.integers(1, 3), "lanes")
    num_new = data.draw(st.integers(1, 150), "chunk")
    past = data.draw(st.lists(st.integers(0, 200), min_size=num_lanes, max_size=num_lanes), "past")
    torch.manual_seed(data.draw(st.integers(0, 1000), "seed"))
    slabs = make_pool(past, num_new, page_tokens, dim, data.draw(DTYPES, "dtype of pages"))
    q = make_queries(num_new, num_lanes * group, dim, data.draw(DTYPES, "dtype of queries"))
    arguments = (*slabs, torch.tensor(past))
    options = PrefillOptions(dim**-0.5, data.draw(st.booleans(), "rounds"))
    expected = reference.prefill_attention_pool(q.float(), *arguments, options)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    with built(build_name):
        actual = ops.prefill_attention_pool(q, *arguments, options, out=out)
        assert actual[0] is out
        for part, wanted in zip(actual, expected, strict=True):
            assert_close(part, wanted, q.dtype, rounded=options.rounds)
        for num_threads in (2, 5):
            threaded = replace(options, num_threads=num_threads)
            again = ops.prefill_attention_pool(q, *arguments, threaded)
            assert torch.equal(again[0], out) and torch.equal(again[1], actual[1]), (
                "threads changed the result"
            )


@needs_compiler
@each_build
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_chunk_sees_packed_pages_and_prefill_buffer_as_the_reference_does(build_name, data):
    dim = data.draw(HEAD_DIMS, "head dim")
    group, num_lanes = data.draw(st.integers(1, 16), "group"), data.draw(st.integers(1, 3), "lanes")
    num_new, older = data.draw(st.integers(1, 150), "chunk"), data.draw(st.integers(0, 150), "older")
    torch.manual_seed(data.draw(st.integers(0, 1000), "seed"))
    lists = data.draw(st.lists(st.tuples(page_formats(dim), st.integers(1, 3)), max_size=3), "lists")
    table = make_table([lists], num_lanes, data.draw(st.integers(0, 1000), "seed")) if lists else None
    prefill_buffer = torch.full((2, num_lanes, num_new + older + 3, dim), torch.nan)
    prefill_buffer = prefill_buffer.to(data.draw(DTYPES, "dtype of prefill buffer"))
    prefill_buffer[:, :, :-3] = torch.randn(2, num_lanes, num_new + older, dim).to(prefill_buffer)
    q = make_queries(num_new, num_lanes * group, dim, data.draw(DTYPES, "dtype of queries"))
    arguments = (table, *prefill_buffer[:, :, :-3])
    distance = data.draw(st.sampled_from([0, 1, 16, 64, 2**40]), "distance")
    options = PrefillOptions(dim**-0.5, data.draw(st.booleans(), "rounds"))
    expected = reference.prefill_attention(q.float(), *arguments, options, distance=distance)
    with built(build_name):
        actual = ops.prefill_attention(q, *arguments, options, distance=distance)
        assert actual[0].dtype == q.dtype
        for part, wanted in zip(actual, expected, strict=True):
            assert_close(part, wanted, q.dtype, rounded=options.rounds)
        for num_threads in (2, 5):
            threaded = replace(options, num_threads=num_threads)
            again = ops.prefill_attention(q, *arguments, threaded, distance=distance)
            assert all(map(torch.equal, again, actual)), "threads changed the result"
        without = ops.prefill_attention(q, *arguments, options)
        assert without[2] is None
        assert torch.equal(without[0], actual[0]) and torch.equal(without[1], actual[1])


def test_reference_is_causal_softmax_attention():
    num_new, past, dim = 5, 9, 16
    keys, values, pages = make_pool([past, past], num_new, 4, dim, torch.float32)
    q = make_queries(num_new, 6, dim)
    out, lse = reference.prefill_attention_pool(
        q, keys, values, pages, torch.tensor([past] * 2), PrefillOptions(0.3)
    )
    for head in range(6):
        k, v = (slab[pages[head // 3]].flatten(0, 1) for slab in (keys, values))
        for i in range(num_new):
            scores = k[: past + i + 1] @ q[i, head] * 0.3
            torch.testing.assert_close(out[i, head], scores.softmax(0) @ v[: past + i + 1])
            torch.testing.assert_close(lse[i, head], scores.logsumexp(0))


@needs_compiler
@each_build
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("reach", "rounds"),
    [(300, False), (1.5, False), (300, True), (1.5, True)],
    ids=["far", "near", "far, rounded", "near, rounded"],
)
def test_scores_that_rise_keep_their_order(build_name, reach, rounds, dtype):
    """The largest score comes last: every page rescales, by factors that underflow, or only some do."""
    keys = torch.linspace(-reach, reach, 256)[:, None].expand(256, 16).reshape(4, 64, 16).to(dtype)
    values, pages, past = torch.randn(4, 64, 16).to(dtype), torch.arange(4)[None], torch.tensor([226])
    q = torch.linspace(0.5, 1, 30, dtype=dtype)[:, None, None].expand(30, 1, 16).contiguous()
    arguments = (keys.contiguous(), values, pages, past)
    expected = reference.prefill_attention_pool(q.float(), *arguments, PrefillOptions(0.25))
    with built(build_name):
        got = ops.prefill_attention_pool(q, *arguments, PrefillOptions(0.25, rounds))
        for actual, wanted in zip(got, expected, strict=True):
            assert_close(actual, wanted, dtype, rounded=rounds)
        q[3] = torch.nan
        out = ops.prefill_attention_pool(q, *arguments, PrefillOptions(0.25, rounds))[0]
    assert bool(out[3].isnan().all()) and bool(torch.isfinite(out[4:]).all())
