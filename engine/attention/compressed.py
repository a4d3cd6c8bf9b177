"""Attention of one sequence's new tokens over its compressed cache.

Kernels read pages in place, and return the largest attention that each key of the prefill buffer receives. A scorer
that needs all attention probabilities gets them from torch, which attends to the prefill buffer explicitly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.cpu import flash
from kvcache.kernels.page_table import PageTable
from kvcache.kernels.protocol import PageKernels, PrefillOptions
from kvcache.pages.prefill_buffer import PrefillBuffer
from kvcache.scorers.probe import raise_by_probes
from kvcache.scorers.protocol import Observation, Scorer

# Keys and values of each KV head, float32 `[n, D]`; n differs between heads.
Lanes = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LayerPages:
    """One layer's pages of one sequence.

    Attributes:
        kernels: the kernels that read them.
        table: the pages of each lane, as kernels take them.
        workspace: gives room for so many dequantized keys and values, float32 `[n, D]` each.
        rounds: kernels may round keys and values (`prefill_attention`), since pages hold them with fewer bits.
    """

    kernels: PageKernels
    table: PageTable
    workspace: Callable[[int], tuple[Tensor, Tensor]]
    rounds: bool

    def lanes(self) -> Lanes:
        """Dequantize into the workspace, which the next call overwrites."""
        counts = self.table.tokens[0].tolist()
        out = self.workspace(sum(counts))
        self.kernels.dequantize(self.table, out=out, num_threads=torch.get_num_threads())
        return list(zip(*(x.split(counts) for x in out), strict=True))

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, distance: int | None = None
    ) -> Tensor | None:
        """Attend to the pages and causally to explicit keys.

        Args:
            q: queries `[C, H, D]`.
            keys, values: `[KVH, N, D]`; the last C are those of the queries' own tokens.
            out: the output is written here, `[C, H, D]`.
            distance: the fewest tokens between a key and the queries whose attention to it is returned.

        Returns:
            The largest attention that each key received, float32 `[KVH, N]`; None without `distance`.
        """
        return self.kernels.prefill_attention(
            q,
            self.table,
            keys,
            values,
            PrefillOptions(q.shape[2] ** -0.5, self.rounds, torch.get_num_threads()),
            distance=distance,
            out=out,
        )[2]


def attend_chunk(
    layer: int,
    qkv: tuple[Tensor, Tensor, Tensor],  # [C + P, H or KVH, D] the chunk's tokens, then the probes
    prefill_buffer: PrefillBuffer,
    pages: LayerPages,
    out: Tensor,  # [C + P, H, D]
    scorer: Scorer | None,
    *,
    queries: Sequence[slice],
    num_probes: int = 0,
) -> None:
    """Write a chunk to the prefill buffer, attend to pages and prefill buffer, and update the scores of its keys.

    Args:
        queries: the chunk's tokens that attend; the rows of `out` of its other tokens are not written.
        num_probes: tokens behind the chunk that attend as well and are not cached; the attention that they give a key
            raises its score.
    """
    q, k, v = qkv
    count = len(q) - num_probes
    prefill_buffer.write(layer, k[:count], v[:count])
    prefill_buffer.observe(layer, q[:count])
    total = prefill_buffer.length + count
    keys, values = prefill_buffer.keys[layer, :, :total], prefill_buffer.values[layer, :, :total]
    scores = prefill_buffer.scores[layer, :, :total]
    for part in queries:
        end = prefill_buffer.length + part.stop
        _attend_scored(
            layer, q[part], keys[:, :end], values[:, :end], scores[:, :end], pages, out[part], scorer
        )
    if num_probes:
        keys = torch.cat([keys, k[count:].transpose(0, 1)], 1)
        values = torch.cat([values, v[count:].transpose(0, 1)], 1)
        peaks = pages.attend(q[count:], keys, values, out[count:], distance=0)
        assert peaks is not None, "asked for with a distance"
        raise_by_probes(scores, peaks[:, :total])


def attend_uncached(
    layer: int,
    qkv: tuple[Tensor, Tensor, Tensor],  # [C, H or KVH, D]
    prefill_buffer: PrefillBuffer | None,
    pages: LayerPages,
    scorer: Scorer | None = None,
) -> Tensor:
    """Attend to the cache and causally to the tokens themselves, which are not cached; return `[C, H, D]`.

    A scorer updates the scores of the prefill buffer's keys by this attention.
    """
    q, k, v = qkv
    keys, values = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    out = q.new_empty(q.shape)
    if not prefill_buffer:
        pages.attend(q, keys, values, out)
        return out
    keys = torch.cat([prefill_buffer.keys[layer, :, : prefill_buffer.length], keys], 1)
    values = torch.cat([prefill_buffer.values[layer, :, : prefill_buffer.length], values], 1)
    held = prefill_buffer.scores[layer, :, : prefill_buffer.length]
    scores = F.pad(held, (0, len(q)))  # the scores of the tokens' own keys are not kept
    _attend_scored(layer, q, keys, values, scores, pages, out, scorer)
    held.copy_(scores[:, : prefill_buffer.length])
    return out


def _attend_scored(
    layer: int,
    q: Tensor,  # [C, H, D]
    keys: Tensor,  # [KVH, N, D] the last C are the queries' own
    values: Tensor,  # [KVH, N, D]
    scores: Tensor,  # [KVH, N] updated in place
    pages: LayerPages,
    out: Tensor,  # [C, H, D]
    scorer: Scorer | None,
) -> None:
    """Attend causally to explicit keys and to all pages, and update the scores of the explicit keys."""
    if scorer is not None and scorer.needs_weights and not scorer.scored_by_kernels:
        attended, queries, weights = _attend(q, keys, values, pages.lanes())
        out.copy_(attended)
        scorer.update(scores, Observation(layer, queries, keys, values, weights))
        return
    largest = pages.attend(
        q, keys, values, out, scorer.distance if scorer and scorer.scored_by_kernels else None
    )
    if largest is not None:
        torch.maximum(scores, largest, out=scores)
    elif scorer is not None:
        scorer.update(scores, Observation(layer, _by_lane(q, len(keys)), keys, values, None))


def _by_lane(q: Tensor, num_lanes: int) -> Tensor:  # [C, H, D] -> [KVH, G, C, D]
    return q.unflatten(1, (num_lanes, -1)).permute(1, 2, 0, 3)


def _attend(
    q: Tensor,  # [C, H, D]
    keys: Tensor,  # [KVH, N, D] the last C are the queries' own
    values: Tensor,  # [KVH, N, D]
    pages: Lanes,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend causally to explicit keys and to all pages.

    Returns:
        output `[C, H, D]`, queries `[KVH, G, C, D]` and attention probabilities `[KVH, G, C, N]`, float32.
    """
    num_new, num_heads, dim = q.shape
    queries = _by_lane(q, len(keys))
    folded = queries.flatten(1, 2)
    weights = torch.bmm(folded, keys.transpose(1, 2)).float().mul_(dim**-0.5).unflatten(1, queries.shape[1:3])
    ahead = torch.ones(num_new, num_new, dtype=torch.bool, device=q.device).triu_(1)
    weights[..., keys.shape[1] - num_new :].masked_fill_(ahead, -torch.inf)
    lse = weights.logsumexp(-1, keepdim=True)  # [KVH, G, C, 1]
    past, past_lse = _attend_pages(folded, pages)
    past_lse = past_lse.view_as(lse)
    lse = torch.logaddexp(lse, past_lse)
    weights.sub_(lse).exp_()
    out = torch.bmm(weights.flatten(1, 2).to(values.dtype), values)
    out += past * (past_lse - lse).exp().to(out.dtype).view(*past.shape[:2], 1)
    return out.view(queries.shape).permute(2, 0, 1, 3).reshape(num_new, num_heads, dim), queries, weights


def _attend_pages(queries: Tensor, pages: Lanes) -> tuple[Tensor, Tensor]:
    """Attend queries `[KVH, R, D]` to the lane of their KV head.

    Returns:
        Output `[KVH, R, D]` and log-sum-exp `[KVH, R]` (float32); 0 and -inf for a lane without tokens.
    """
    out = torch.zeros_like(queries)
    lse = queries.new_full(queries.shape[:2], -torch.inf, dtype=torch.float32)
    for head, (keys, values) in enumerate(pages):
        if len(keys):
            keys, values = keys.to(queries.dtype), values.to(queries.dtype)
            part = flash(queries[head : head + 1], keys[None], values[None], causal=False)
            out[head], lse[head] = part[0][0], part[1][0]
    return out, lse
