"""Attention on a CPU: compiled kernels that read pages in place, or torch where there is no compiler.

For a chunk of 256 tokens against 7,000 (float32, one AVX2 core), torch's fused kernel reaches 50 GFLOP/s and the
compiled one 67; a decode step reads pages at 7 and 13 GB/s. `benchmarks/kernels.md` has all figures.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.base import Decode
from kvcache.kernels.page_table import BlockTables
from kvcache.kernels.protocol import PrefillOptions
from kvcache.kernels.registry import compiled_kernels
from kvcache.sequence.full import SequenceCache


class CPUAttention:
    """Attend with the compiled kernels, or else in torch: `attend_in_parts` for prefill, `_decode` for decode."""

    def prefill(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cache: SequenceCache
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.prefill`; compiled kernels read the chunk's keys and values from the pages."""
        kernels = compiled_kernels(q.device, cache.pool.layout)
        if kernels is None:
            return attend_in_parts(layer, q, k, v, cache)
        return kernels.prefill_attention_pool(
            q,
            cache.pool.keys,
            cache.pool.values,
            cache.pages[layer],
            cache.lengths[layer],
            PrefillOptions(
                q.shape[2] ** -0.5,
                rounds=cache.pool.keys.dtype == torch.bfloat16,  # whose numbers have 8 bits
                num_threads=torch.get_num_threads(),
            ),
        )

    def open_decode(self, caches: Sequence[SequenceCache]) -> Decode:
        pool = caches[0].pool
        dim = pool.keys.shape[2]
        kernels = compiled_kernels(pool.keys.device, pool.layout)
        if kernels is None:
            return lambda layer, q: _decode(layer, q, caches)
        lengths = torch.stack([cache.lengths for cache in caches]) + 1
        tables = BlockTables.by_layer([cache.pages for cache in caches], lengths, pool.layout.page_tokens)

        def decode(layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
            return kernels.decode_attention_pool(
                q,
                pool.keys,
                pool.values,
                tables[layer],
                scale=dim**-0.5,
                num_threads=torch.get_num_threads(),
            )[:2]

        return decode


def attend_in_parts(
    layer: int, q: Tensor, k: Tensor, v: Tensor, cache: SequenceCache
) -> tuple[Tensor, Tensor]:
    """Attend from a chunk in torch: to the chunk itself and to the cached tokens, merged by log-sum-exp.

    The chunk's own keys and values need not be in the pages. Shapes are those of `AttentionBackend.prefill`.

    Two parts, because torch aligns a causal mask to the top left, which is wrong for a chunk against a longer cache,
    and a mask tensor costs a quarter of the speed. The query heads of a KV head become rows of one matrix, so that
    keys and values of a long cache are never repeated.
    """
    num_new, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    out, lse = flash(
        q.transpose(0, 1),
        k.transpose(0, 1).repeat_interleave(group, 0),
        v.transpose(0, 1).repeat_interleave(group, 0),
        causal=True,
    )
    past = int(cache.lengths[layer, 0])
    if past:
        folded = (
            q.view(num_new, num_kv_heads, group, head_dim)
            .permute(1, 2, 0, 3)
            .reshape(num_kv_heads, -1, head_dim)
        )
        for keys, values in cache.parts(layer, past):
            part_out, part_lse = flash(folded, keys.to(q.dtype), values.to(q.dtype), causal=False)
            out, lse = _merge(out, lse, part_out.reshape(out.shape), part_lse.reshape(lse.shape))
    return out.transpose(0, 1), lse.transpose(0, 1)


def _decode(layer: int, q: Tensor, caches: Sequence[SequenceCache]) -> tuple[Tensor, Tensor]:
    """Decode in torch: batched matrix products over runs of pages, one sequence at a time."""
    num_kv_heads = caches[0].pages.shape[1]
    rows = (q * q.shape[2] ** -0.5).view(len(caches), num_kv_heads, -1, q.shape[2])  # [B, KVH, G, D]
    out = torch.empty_like(rows)
    lse = rows.new_empty(rows.shape[:3], dtype=torch.float32)
    for i, cache in enumerate(caches):
        held = cache.parts(layer, int(cache.lengths[layer, 0]) + 1)
        parts = [(keys.to(q.dtype), values.to(q.dtype)) for keys, values in held]
        scores = torch.cat([torch.bmm(rows[i], keys.transpose(1, 2)).float() for keys, _ in parts], 2)
        torch.logsumexp(scores, 2, out=lse[i])
        weights = scores.sub_(lse[i, :, :, None]).exp_().to(q.dtype)
        start = 0
        for n, (_, values) in enumerate(parts):
            part = torch.bmm(weights[:, :, start : start + values.shape[1]], values)
            out[i] = part if n == 0 else out[i] + part
            start += values.shape[1]
    return out.view_as(q), lse.view(len(caches), -1)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return output `[H, Lq, D]` and log-sum-exp `[H, Lq]` of torch's fused CPU kernel for arguments `[H, L, D]`."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None], k[None], v[None], 0.0, causal
    )
    return out[0], lse[0]


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two partial results over disjoint keys."""
    weight = torch.sigmoid(other_lse - lse)[..., None].to(out.dtype)
    return torch.lerp(out, other, weight), torch.logaddexp(lse, other_lse)
