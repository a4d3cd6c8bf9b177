"""A scorer and a page format added from outside: one class and one line, one packing and one number."""

import torch

from kvcache import config as policy
from kvcache.compress.compressor import Compressor
from kvcache.config import KVCacheConfig
from kvcache.kernels import reference
from kvcache.kernels.page_table import PageTable
from kvcache.kernels.registry import compiled_kernels, kernels_for
from kvcache.pages.block_pool import BlockPool
from kvcache.pages.prefill_buffer import PrefillBufferPool
from kvcache.quantize.codes import PACKINGS, Packing, pack_codes, unpack_codes
from kvcache.scorers.protocol import Observation, Scorer
from kvcache.scorers.registry import SCORERS, get_scorer
from kvcache.sequence.compressed import CompressedCache
from kvcache.sizes.compressed import CompressedLayout
from kvcache.sizes.full import LayerGroup
from kvcache.sizes.page_format import PageFormat

CPU = torch.device("cpu")
NUM_LAYERS, NUM_KV_HEADS, DIM, NUM_TOKENS, CHUNK = 2, 1, 16, 128, 64


class Largest(Scorer):
    """Score by a key's first element: the rest is left to the flags' defaults."""

    def update(self, scores: torch.Tensor, seen: Observation) -> None:
        scores.copy_(seen.keys[..., 0])


def read_prompt(config: KVCacheConfig, keys: torch.Tensor, values: torch.Tensor) -> CompressedCache:
    """Cache a prompt's keys and values `[L, KVH, N, D]` chunk by chunk, scored as the policy says."""
    layout = CompressedLayout((LayerGroup(NUM_LAYERS, NUM_KV_HEADS, DIM),), 4, 4, config)
    blocks = BlockPool(layout.sequence_pages(NUM_TOKENS, new_tokens=1), layout.page_bytes, device=CPU)
    buffers = PrefillBufferPool(
        1,
        NUM_LAYERS,
        NUM_KV_HEADS,
        layout.chunks.buffer_tokens(overlaps=False),
        DIM,
        compensates=False,
        dtype=torch.float32,
    )
    cache = CompressedCache(Compressor(layout), torch.float32, blocks, blocks.num_blocks, buffers)
    scorer = get_scorer(config.scorer) if config.needs_scores else None
    for start in range(0, NUM_TOKENS, CHUNK):
        buffer, end = cache.prefill_buffer, start + CHUNK
        for layer in range(NUM_LAYERS):
            chunk = (x[layer, :, start:end] for x in (keys, values))
            buffer.write(layer, *(x.transpose(0, 1) for x in chunk))
            total = buffer.length + CHUNK
            held = (x[layer, :, :total] for x in (buffer.keys, buffer.values))
            if scorer:
                queries = torch.zeros(NUM_KV_HEADS, 1, CHUNK, DIM)
                scorer.update(buffer.scores[layer, :, :total], Observation(layer, queries, *held, None))
        prompt_ends = end == NUM_TOKENS
        cache.extend(CHUNK, prompt_ends=prompt_ends)
        cache.compress(NUM_TOKENS, prompt_ends=prompt_ends)
    return cache


def test_a_scorer_is_a_class_and_a_line_of_the_registry(monkeypatch):
    monkeypatch.setitem(SCORERS, "largest", (__name__, "Largest"))
    config = KVCacheConfig(
        "sparse",
        keep_ratio=0.25,
        scorer="largest",
        budget="uniform",
        warmup_tokens=0,
        recent_tokens=0,
        tail_tokens=0,
        chunk_size=CHUNK,
    )
    torch.manual_seed(0)
    keys, values = torch.randn(2, NUM_LAYERS, NUM_KV_HEADS, NUM_TOKENS, DIM)
    cache = read_prompt(config, keys, values)
    for lane, (kept, lane_keys) in enumerate(zip(lanes(cache), keys.flatten(0, 1), strict=True)):
        best = [chunk[chunk[:, 0].argsort(descending=True)[: CHUNK // 4]] for chunk in lane_keys.split(CHUNK)]
        assert torch.equal(kept.sort(0).values, torch.cat(best).sort(0).values), f"lane {lane}"


def test_a_page_format_starts_in_the_reference_alone(monkeypatch):
    monkeypatch.setattr(policy, "BITS", (*policy.BITS, 6))
    monkeypatch.setitem(PACKINGS, 6, Packing(pack_6, unpack_6))
    config = KVCacheConfig("quant", quant_bits=6, chunk_size=CHUNK, recent_tokens=16, compensate=False)
    torch.manual_seed(0)
    keys, values = torch.randn(2, NUM_LAYERS, NUM_KV_HEADS, NUM_TOKENS, DIM)
    cache = read_prompt(config, keys, values)
    (page_format,) = cache.layout.tiers
    assert page_format == PageFormat(6, 6, 64, DIM, 4) and int(cache.tiers[0].num_pages.min()) == 1
    assert compiled_kernels(CPU, page_format) is None
    assert compiled_kernels(CPU, cache.layout.whole) is compiled_kernels(CPU, PageFormat(4, 4, 64, DIM))
    kernels = kernels_for(CPU, cache.layout.whole, page_format)
    assert kernels is reference, "one format that is not supported is enough"
    table = PageTable.of(cache.store.pool.slab, [cache.page_lists])
    q = torch.randn(1, NUM_LAYERS * NUM_KV_HEADS, DIM)
    out, _, _ = kernels.decode_attention(q, table, scale=DIM**-0.5)
    weights = (torch.einsum("ld,lnd->ln", q[0], keys.flatten(0, 1)) * DIM**-0.5).softmax(1)
    exact = torch.einsum("ln,lnd->ld", weights, values.flatten(0, 1))
    error = float((out[0] - exact).norm() / exact.norm())
    assert 0 < error < 0.06


def lanes(cache: CompressedCache) -> list[torch.Tensor]:
    """Return every key that each lane's tier keeps, `[n, D]`."""
    owners, keys, _ = cache.tiers[0].read_tokens()
    return [keys[owners == lane] for lane in range(NUM_LAYERS * NUM_KV_HEADS)]


def pack_6(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat([pack_codes(codes & 15, 4), pack_codes(codes >> 4, 2)], -1)


def unpack_6(packed: torch.Tensor) -> torch.Tensor:
    low, high = packed.split([packed.shape[-1] * 2 // 3, packed.shape[-1] // 3], -1)
    return unpack_codes(low.contiguous(), 4) | unpack_codes(high.contiguous(), 2) << 4
