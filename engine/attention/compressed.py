"""Attention of one sequence's new tokens over its compressed cache, in plain torch.

Pages are dequantised, then attended like any keys; the arena is attended explicitly, because its attention
probabilities are what scorers judge by.
"""

import torch
from torch import Tensor

from engine.attention.cpu import flash
from kvcache.compressed_cache import CompressedCache
from kvcache.compressors.base import Observation, Scorer
from kvcache.compressors.probe import raise_by_probes


def attend_chunk(
    layer: int,
    q: Tensor,  # [C + P, H, D] the chunk's tokens, then the probes
    k: Tensor,  # [C + P, KVH, D]
    v: Tensor,  # [C + P, KVH, D]
    cache: CompressedCache,
    scorer: Scorer | None,
    num_probes: int = 0,
) -> Tensor:  # [C + P, H, D]
    """Write a chunk to the arena, attend it to pages and arena, and let the scorer see it.

    Probes follow the chunk and are not cached; what they attend to raises the scores.
    """
    arena = cache.arena
    count = len(q) - num_probes
    arena.write(layer, k[:count], v[:count])
    total = arena.length + count
    keys, values = arena.keys[layer, :, :total], arena.values[layer, :, :total]
    scores = arena.scores[layer, :, :total]
    out, queries, weights = _attend(layer, q[:count], keys, values, cache)
    if scorer:
        scorer.update(scores, Observation(layer, queries, keys, values, weights))
    if not num_probes:
        return out
    keys = torch.cat([keys, k[count:].transpose(0, 1)], 1)
    values = torch.cat([values, v[count:].transpose(0, 1)], 1)
    probed, _, weights = _attend(layer, q[count:], keys, values, cache)
    raise_by_probes(scores, weights[..., :total])
    return torch.cat([out, probed])


def attend_aside(layer: int, q: Tensor, k: Tensor, v: Tensor, cache: CompressedCache) -> Tensor:
    """Attend tokens to the cache and to themselves without caching them; shapes as in `attend_chunk`."""
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    if cache.arena:
        keys = torch.cat([cache.arena.keys[layer, :, : cache.arena.length], keys], 1)
        values = torch.cat([cache.arena.values[layer, :, : cache.arena.length], values], 1)
    return _attend(layer, q, keys, values, cache)[0]


def attend_token(layer: int, q: Tensor, cache: CompressedCache) -> Tensor:
    """Attend one decoded token `[H, D]`, already written to the open pages, to all pages."""
    keys, values, valid = cache.gather(layer)
    rows = q.unflatten(0, (len(keys), -1)).float() * q.shape[1] ** -0.5  # [KVH, G, D]
    scores = torch.bmm(rows, keys.transpose(1, 2)).masked_fill_(~valid[:, None], -torch.inf)
    weights = scores.softmax(-1)
    num_open = int(cache.recent.lengths[0])
    width = -(-num_open // cache.recent.format.page_tokens) * cache.recent.format.page_tokens
    cache.note_attention(layer, weights[:, :, weights.shape[2] - width :][:, :, :num_open].amax(1))
    return torch.bmm(weights, values).flatten(0, 1).to(q.dtype)


def _attend(
    layer: int,
    q: Tensor,  # [C, H, D]
    keys: Tensor,  # [KVH, N, D] the last C are the queries' own
    values: Tensor,  # [KVH, N, D]
    cache: CompressedCache,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend causally to explicit keys and to all pages.

    Returns:
        output `[C, H, D]`, queries `[KVH, G, C, D]` and attention probabilities `[KVH, G, C, N]`, float32.
    """
    num_new, num_heads, dim = q.shape
    queries = q.unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)  # [KVH, G, C, D]
    folded = queries.flatten(1, 2)
    weights = torch.bmm(folded, keys.transpose(1, 2)).float().mul_(dim**-0.5).unflatten(1, queries.shape[1:3])
    ahead = torch.ones(num_new, num_new, dtype=torch.bool, device=q.device).triu_(1)
    weights[..., keys.shape[1] - num_new :].masked_fill_(ahead, -torch.inf)
    lse = weights.logsumexp(-1, keepdim=True)  # [KVH, G, C, 1]
    past, past_lse = _attend_pages(layer, folded, cache)
    if past is not None:
        past_lse = past_lse.view_as(lse)
        lse = torch.logaddexp(lse, past_lse)
    weights.sub_(lse).exp_()
    out = torch.bmm(weights.flatten(1, 2).to(values.dtype), values).view(queries.shape)
    if past is not None:
        out += past.view_as(out) * (past_lse - lse).exp().to(out.dtype)
    return out.permute(2, 0, 1, 3).reshape(num_new, num_heads, dim), queries, weights


def _attend_pages(layer: int, queries: Tensor, cache: CompressedCache) -> tuple[Tensor | None, Tensor | None]:
    """Attend `[KVH, R, D]` queries to all pages; None where there are none yet."""
    heads = cache.layout.num_kv_heads
    if not any(int(part.lengths[layer * heads : (layer + 1) * heads].max()) for part in cache.lists):
        return None, None
    keys, values, valid = cache.gather(layer)
    outs, lses = [], []
    for head in range(heads):  # lanes have lengths of their own
        k, v = (x[head, valid[head]].to(queries.dtype) for x in (keys, values))
        if not len(k):
            outs.append(torch.zeros_like(queries[head]))
            lses.append(queries.new_full((queries.shape[1],), -torch.inf, dtype=torch.float32))
            continue
        out, lse = flash(queries[head : head + 1], k[None], v[None], causal=False)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.stack(outs), torch.stack(lses)
