"""What several of the engine's tests need: prompts, engines, and where a row's numbers depend on no row beside it."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from engine import EngineConfig, EngineCore, Request, Result, SamplingParams
from engine.kernels import ops
from engine.models import Decoder
from kvcache.config import KVCacheConfig, Tier

rows_are_alike = pytest.mark.skipif(
    ops.library() is None or not ops.float_panel(),
    reason="torch multiplies here: its sums depend on how many rows there are",
)
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
LENGTHS = (1, 9, 63, 64, 65, 150, 300)
LOSSY = KVCacheConfig(
    "sparse+quant", tiers=(Tier(0.3, 4, 4), Tier(0.3, 3, 2)), chunk_size=64, recent_tokens=32
)


def as_text(token_ids: Iterable[int]) -> str:
    """Stand in for a tokenizer: one letter a token."""
    return "".join(chr(97 + t % 26) for t in token_ids)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(3, 199, (n,), generator=random).tolist() for n in lengths]


def run(llm: EngineCore, requests: list[Request]) -> list[Result]:
    """Return the results in the order of the requests."""
    results = {r.request_id: r for r in llm.generate(requests)}
    assert llm.cache.num_available == llm.cache.num_blocks, "every page is given back"
    return [results[r.request_id] for r in requests]


def make_llm(model: Decoder, cache: KVCacheConfig, **changes: Any) -> EngineCore:
    changes = {"prompt_lookup": False} | changes  # how many steps a row takes would depend on time
    llm = EngineCore(model, EngineConfig(60_000_000, cache=cache, **changes), as_text)
    if cache.compresses:
        llm.cache.blocks.slab.fill_(255)  # NaN in every float format: an unwritten byte that is read shows
    return llm


def tokens(llm: EngineCore, requests: list[Request]) -> list[list[int]]:
    return [result.token_ids for result in run(llm, requests)]
