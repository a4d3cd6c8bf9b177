"""The C++ kernels give what their torch references give, on any number of threads, and read valid slots alone."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.kernels import reference, registry
from kvcache.kernels.cpu import build, ops
from kvcache.kernels.page_table import BlockTables, PageTable
from kvcache.quantize.pages import quantize_pages
from kvcache.sizes.page_format import PageFormat
from tests.kvcache.kernel_builds import BUILDS, built, needs_compiler
from tests.kvcache.page_tables import make_table, page_formats

# The products that `pairs` is about are prefill's.
each_decode_build = pytest.mark.parametrize("build_name", [name for name in BUILDS if name != "pairs"])


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert bool(torch.isfinite(expected).all()), "the reference read poison"
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()) + 1e-6)


@needs_compiler
@each_decode_build
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_packed_pages_are_read_as_the_reference_reads_them(build_name, data):
    head_dim = data.draw(st.sampled_from([16, 48, 64, 96, 128, 256]), "head dim")
    group, num_lanes = data.draw(st.integers(1, 16), "group"), data.draw(st.integers(1, 3), "lanes")
    lists = st.lists(st.tuples(page_formats(head_dim), st.integers(1, 3)), min_size=1, max_size=3)
    sequences = data.draw(st.lists(lists, min_size=1, max_size=3), "sequences")
    table = make_table(sequences, num_lanes, data.draw(st.integers(0, 1000), "seed"))
    table = data.draw(st.sampled_from(table.by_layer(num_lanes)), "layer of one lane")

    with built(build_name):
        check_pages(table, group)


def check_pages(table: PageTable, group: int) -> None:
    """Compare all that reads these pages with its reference."""
    head_dim = table.formats[0].head_dim
    for actual, expected in zip(ops.dequantize(table), reference.dequantize(table), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    room = torch.full((2, int(table.tokens.sum()) + 3, head_dim), 7.0, dtype=torch.bfloat16).unbind()
    expected = reference.dequantize(table, torch.bfloat16)
    torch.testing.assert_close(ops.dequantize(table, out=room), expected, rtol=8e-3, atol=1e-5)
    assert all(bool((x[-3:] == 7).all()) for x in room), "it wrote beyond its tokens"

    q = torch.randn(len(table.first), table.first.shape[1] * group, head_dim)
    kwargs = {"scale": head_dim**-0.5, "want_largest": True}
    out, lse, largest = reference.decode_attention(q, table, **kwargs)
    native = ops.decode_attention(q, table, **kwargs)
    empty = (table.tokens == 0).repeat_interleave(group, 1)
    assert bool((native[1][empty] == -torch.inf).all())
    assert_close(native[0], out)
    if not bool(empty.all()):
        assert_close(native[1][~empty], lse[~empty])
        assert_close(native[2], largest)
    without = ops.decode_attention(q, table, scale=head_dim**-0.5)
    assert without[2] is None and torch.equal(without[0], native[0]) and torch.equal(without[1], native[1])


@needs_compiler
@each_decode_build
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim", "size"), [(3, 64, 16), (5, 80, 12), (8, 128, 1)])
def test_pool_pages_are_read_as_the_reference_reads_them(build_name, dtype, group, head_dim, size):
    keys, values = torch.randn(2, 42, size, head_dim).to(dtype)
    order = torch.randperm(42)  # the last page of all is read too
    pages = [order[:2].view(2, 1), order[2:].view(2, 20)]
    lengths = torch.tensor([[(size + 4) // 5, size], [12 * size + size // 2, 20 * size - size // 5]])
    held = torch.zeros(42, size, dtype=torch.bool)
    for table, row in zip(pages, lengths, strict=True):
        for lane, length in zip(table, row, strict=True):
            held[lane] = (torch.arange(len(lane) * size) < length).view(-1, size)
    keys[~held] = values[~held] = torch.nan
    q = torch.randn(2, 2 * group, head_dim).to(dtype)
    both = [
        torch.stack([table, table.flip(0)]) for table in pages
    ]  # the second layer has the lanes the other way
    for tables in BlockTables.by_layer(both, torch.stack([lengths, lengths.flip(1)], 1), size):
        arguments = (q, keys, values, tables)
        expected = reference.decode_attention_pool(*arguments, scale=0.2, want_largest=True)
        with built(build_name):
            got = ops.decode_attention_pool(*arguments, scale=0.2, want_largest=True)
        for actual, wanted in zip(got, expected, strict=True):
            rtol = 8e-3 if dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(actual, wanted, rtol=rtol, atol=1e-5)


@needs_compiler
@each_decode_build
@pytest.mark.parametrize("slab_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "head_dim"), [(1, 64), (150, 80)])
def test_rows_go_where_the_reference_puts_them(build_name, slab_dtype, dtype, num_tokens, head_dim):
    count = 3 * num_tokens
    places = (torch.randperm(2 * count)[:count] * head_dim).view(3, num_tokens)
    rows = torch.randn(num_tokens, 5, head_dim).to(dtype)[:, 1:4]  # as keys lie among queries and values
    slabs = torch.zeros(2, 2 * count * head_dim, dtype=slab_dtype)
    reference.write_rows(slabs[0], places, rows)
    with built(build_name):
        ops.write_rows(slabs[1], places, rows, num_threads=2)
    assert torch.equal(*slabs) and int((slabs[0] != 0).sum()) == count * head_dim


def test_reference_is_softmax_attention():
    whole = PageFormat(16, 16, 16, 32, 4)
    rows = torch.randn(2, 3, 16, 32)  # keys or values, page, slot, element
    slab = quantize_pages(*rows, whole).flatten()
    addresses = torch.tensor([[2, 0, 1]]) * whole.page_units
    table = PageTable.of(slab, [[(whole, addresses, torch.tensor([[16, 16, 7]]))]])
    keys, values = rows[:, [2, 0, 1]].flatten(1, 2)[:, :39]
    q = torch.randn(1, 2, 32)
    weights = (q[0] @ keys.T * 0.3).softmax(1)
    out, lse, largest = reference.decode_attention(q, table, scale=0.3, want_largest=True)
    torch.testing.assert_close(out[0], weights @ values)
    torch.testing.assert_close(lse[0], (q[0] @ keys.T * 0.3).logsumexp(1))
    torch.testing.assert_close(largest, weights.amax(0))


@needs_compiler
def test_thread_count_changes_nothing():
    packed, whole = PageFormat(4, 4, 64, 64), PageFormat(16, 16, 16, 64, 2)
    table = make_table([[(whole, 2), (packed, 80)], [(packed, 3)]], 1, seed=1)  # one long lane, one short
    assert int(table.tokens.max()) > 3000, "long enough to be cut into several units"
    q = torch.randn(2, 3, 64)
    for want in (False, True):
        one = ops.decode_attention(q, table, scale=0.1, want_largest=want, num_threads=1)
        for num_threads in (2, 3):
            several = ops.decode_attention(q, table, scale=0.1, want_largest=want, num_threads=num_threads)
            assert all(a is b or torch.equal(a, b) for a, b in zip(one, several, strict=True))
    one, two = ops.dequantize(table), ops.dequantize(table, num_threads=2)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_without_a_compiler_torch_takes_over_and_says_so_once(compiler, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("KVBATCH_CACHE", str(tmp_path))
    build.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert registry.kernels_for(torch.device("cpu"), PageFormat(4, 4, 64, 64)) is reference
            assert registry.kernels_for(torch.device("cpu"), PageFormat(4, 4, 64, 64)) is reference
    finally:
        build.library.cache_clear()
    assert len(caplog.records) == 1 and "torch takes over" in caplog.text


def test_kernels_can_be_switched_off(monkeypatch, caplog):
    monkeypatch.setenv("KVBATCH_NATIVE", "0")
    build.library.cache_clear()
    try:
        assert registry.kernels_for(torch.device("cpu"), PageFormat(4, 4, 64, 64)) is reference
    finally:
        build.library.cache_clear()
    assert not caplog.records
