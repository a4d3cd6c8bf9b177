"""With `deterministic`, who else runs changes no bit of a row; also in a compressed cache."""

import pytest
import torch

from engine import EngineConfig, EngineCore, Request, SamplingParams, engine_core
from engine.models import load_model
from engine.models.basis import ROTATED
from kvcache.config import KVCacheConfig
from tests.engine.models.tiny_models import save_tiny_model

LENGTHS = (300, 9, 64, 150, 33, 201, 7, 90, 120, 64, 65, 11, 40, 170, 30, 31, 32, 35, 99, 250)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "llama", max_position_embeddings=512)
    return load_model(path, dtype=torch.float32, basis=ROTATED)


@pytest.mark.parametrize("preset", ["none", "logs"])
def test_deterministic_results_are_batch_invariant_to_the_bit(model, monkeypatch, preset):
    random = torch.Generator().manual_seed(3)
    prefix = torch.randint(3, 199, (70,), generator=random).tolist()
    prompts = [prefix + torch.randint(3, 199, (n,), generator=random).tolist() for n in LENGTHS]
    sampling = [SamplingParams(max_new_tokens=3 + i, ignore_eos=True) for i in range(len(prompts))]
    requests = [
        Request(i, p, s, prefix_tokens=70) for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))
    ]
    cache = KVCacheConfig.from_dict(
        {"preset": preset} | ({"tail_tokens": 0, "chunk_size": 256} if preset != "none" else {})
    )
    seen: dict[int, list[torch.Tensor]] = {}
    sample = engine_core.sample

    def note(logits, params, randoms):
        for row, param in zip(logits, params, strict=True):
            seen.setdefault(param.max_new_tokens - 3, []).append(row.clone())
        return sample(logits, params, randoms)

    monkeypatch.setattr(engine_core, "sample", note)

    def logits_of(rows: list[Request], max_sequences: int) -> dict[int, torch.Tensor]:
        seen.clear()
        config = EngineConfig(
            40_000_000, step_tokens=256, max_sequences=max_sequences, cache=cache, deterministic=True
        )
        results = list(EngineCore(model, config, str).generate(rows))
        assert len(results) == len(rows)
        return {row: torch.stack(each) for row, each in seen.items()}

    expected = logits_of(requests, 64)
    for rows, max_sequences in ((requests[::-1], 64), (requests, 3), (requests[5:7], 64), (requests[:1], 1)):
        for row, found in logits_of(rows, max_sequences).items():
            assert torch.equal(found, expected[row]), f"row {row} of {len(rows)}"
