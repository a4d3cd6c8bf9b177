"""Every backend agrees with the reference, and the reference with plain softmax attention."""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import EngineConfig, Request
from engine.attention import get_backend, registry
from engine.engine_core import EngineCore
from engine.models import load_model
from kvcache.pages.page_pool import PagePool
from kvcache.sequence.full import SequenceCache, slot_mapping
from kvcache.sizes.full import CacheLayout, LayerGroup
from tests.engine.helpers import GREEDY, as_text, prompts, run
from tests.engine.models.tiny_models import save_tiny_model

CPU = torch.device("cpu")


@contextmanager
def torch_alone():
    """The CPU backend where there is no compiler."""
    with patch("engine.attention.cpu.compiled_kernels", return_value=None):
        yield get_backend("cpu", CPU)


BACKENDS = (
    lambda: nullcontext(get_backend("reference", CPU)),
    lambda: nullcontext(get_backend("cpu", CPU)),
    torch_alone,
)


def filled_cache(pool: PagePool, num_past: int, num_new: int, keys: torch.Tensor, values: torch.Tensor):
    """Return a cache of `num_past` counted tokens whose next `num_new` are written, as a backend meets it."""
    cache = SequenceCache(pool, num_past + num_new)
    for count in (num_past, num_new):
        start = cache.num_tokens
        if count:
            pool.store(
                slot_mapping([cache], [count])[0], keys[start : start + count], values[start : start + count]
            )
        if count == num_past and start == 0:
            cache.advance(num_past)
    return cache


def plain(q, keys, values, num_past):
    """Attend token by token, one query head at a time."""
    group = q.shape[1] // keys.shape[1]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = keys[: num_past + i + 1, h // group] @ q[i, h] / q.shape[2] ** 0.5
            out[i, h] = scores.softmax(0) @ values[: num_past + i + 1, h // group]
            lse[i, h] = scores.logsumexp(0)
    return out, lse


@given(
    num_past=st.integers(0, 40),
    num_new=st.integers(1, 20),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([8, 16, 64]),
    holes=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_backends_agree(num_past, num_new, kv_heads, group, head_dim, holes, seed):
    torch.manual_seed(seed)
    layout = CacheLayout((LayerGroup(1, kv_heads, head_dim),), 4, page_tokens=4)
    pool = PagePool(layout, 4 * layout.sequence_pages(64), dtype=torch.float32)
    if holes:
        blocks = [pool.allocate(1, 1) for _ in range(pool.num_blocks)]
        for block in blocks[::2]:
            pool.release(block)
    # Whatever lies beyond the filled slots must not be read.
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    total = num_past + num_new
    keys, values = torch.randn(2, total, kv_heads, head_dim)
    q = 3 * torch.randn(num_new, kv_heads * group, head_dim)
    expected = plain(q, keys, values, num_past)
    cache = filled_cache(pool, num_past, num_new, keys, values)
    for backend in BACKENDS:
        with backend() as attention:
            got = attention.prefill(0, q, keys[num_past:], values[num_past:], cache)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_decode_of_many_sequences_agrees():
    torch.manual_seed(1)
    layout = CacheLayout((LayerGroup(1, 2, 16),), 4, page_tokens=4)
    pool = PagePool(layout, 200, dtype=torch.float32)
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    lengths = [0, 3, 4, 31]
    data = [torch.randn(2, n + 1, 2, 16) for n in lengths]
    q = torch.randn(len(lengths), 6, 16)
    caches = [filled_cache(pool, n, 1, *kv) for n, kv in zip(lengths, data, strict=True)]
    expected = [plain(q[i : i + 1], *kv, n) for i, (n, kv) in enumerate(zip(lengths, data, strict=True))]
    for backend in BACKENDS:
        with backend() as attention:
            out, lse = attention.open_decode(caches)(0, q)
        torch.testing.assert_close(out, torch.cat([o for o, _ in expected]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, torch.cat([s for _, s in expected]), rtol=1e-4, atol=1e-5)


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match="flash.*use one of reference, cpu"):
        get_backend("flash", CPU)


class ToyAttention:
    """A backend from outside: plain softmax over all keys of a layer at once."""

    def __init__(self):
        self.num_calls = 0
        made.append(self)

    def prefill(self, layer, q, k, v, cache):
        self.num_calls += 1
        num_past, num_new = int(cache.lengths[layer, 0]), len(q)
        parts = list(cache.parts(layer, num_past + num_new))
        group = q.shape[1] // cache.pool.layout.num_kv_heads
        keys, values = (torch.cat(x, 1).repeat_interleave(group, 0) for x in zip(*parts, strict=True))
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) / q.shape[2] ** 0.5
        scores += torch.full(scores.shape[1:], -torch.inf).triu(num_past + 1)
        return (scores.softmax(2) @ values).transpose(0, 1), scores.logsumexp(2).T

    def open_decode(self, caches):
        def decode(layer, q):
            results = [self.prefill(layer, q[i : i + 1], q, q, cache) for i, cache in enumerate(caches)]
            return tuple(torch.cat(x) for x in zip(*results, strict=True))

        return decode


made: list[ToyAttention] = []


def test_a_backend_registered_from_outside_runs_a_model(tmp_path, monkeypatch):
    monkeypatch.setitem(registry.BACKENDS, "toy", (__name__, "ToyAttention"))
    save_tiny_model(tmp_path, "llama")
    model = load_model(tmp_path, dtype=torch.float32)
    requests = [Request(i, p, GREEDY) for i, p in enumerate(prompts((5, 150)))]
    answers = []
    for name in ("toy", None):
        config = EngineConfig(20_000_000, attention=name, prompt_lookup=False)
        answers.append([result.token_ids for result in run(EngineCore(model, config, as_text), requests)])
    assert answers[0] == answers[1]
    assert made[0].num_calls > 0
