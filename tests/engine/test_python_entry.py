"""`LLM` for scripts: texts or token ids in, the tokens of the engine and of transformers out."""

import pytest
import torch
from transformers import AutoTokenizer

from engine import LLM, EngineConfig, EngineCore, Request, SamplingParams
from engine.detokenizer import Detokenizer
from engine.errors import EngineError
from engine.models import load_model
from kvcache.config import PRESETS
from tests.engine.models.tiny_models import save_tiny_model
from tests.kvbatch.helpers import make_tokenizer

TEXTS = ["The quick brown fox", "jumps", "over the lazy dog. " * 9]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "llama", vocab_size=320)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("cache", [None, "none", "default"])
def test_texts_and_ids_give_what_the_engine_gives(path, cache):
    llm = LLM.from_pretrained(path, cache=cache, memory="64MiB")
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    results = llm.generate(TEXTS, sampling)
    ids = [AutoTokenizer.from_pretrained(path).encode(text) for text in TEXTS]
    assert [r.token_ids for r in llm.generate(ids, sampling)] == [r.token_ids for r in results]
    assert [r.prompt_tokens for r in results] == [len(each) for each in ids]
    assert all(r.text and r.finish_reason == "length" and r.kv_kept_bytes > 0 for r in results)
    model = load_model(path, dtype=torch.float32)
    core = EngineCore(model, EngineConfig(64 << 20), Detokenizer(llm.tokenizer))
    full = {r.request_id: r for r in core.generate(Request(i, each, sampling) for i, each in enumerate(ids))}
    if cache != "default":
        assert [full[i].token_ids for i in range(3)] == [r.token_ids for r in results]
    assert results[2].kv_full_bytes == full[2].kv_full_bytes


def test_prompts_that_cannot_run_and_arguments_that_cannot_be(path):
    llm = LLM.from_pretrained(path, cache=PRESETS["none"], memory=64 << 20, device="cpu", max_context=64)
    bad, good = llm.generate(["over the lazy dog. " * 99, "x"], SamplingParams(max_new_tokens=2))
    assert bad.finish_reason == "error" and "context of 64" in bad.error_message and not good.error_message
    drawn = llm.generate(["x", "x"], SamplingParams(max_new_tokens=8, temperature=1.0))
    assert drawn[0].token_ids != drawn[1].token_ids, "each prompt has a seed of its own"
    with pytest.raises(ValueError, match="'best' is no preset; use one of none, "):
        LLM.from_pretrained(path, cache="best")


def test_an_engine_refuses_a_model_of_another_basis_and_changes_none(path):
    model = load_model(path, dtype=torch.float32)
    before = model.checksums()
    with pytest.raises(EngineError, match="rotated basis"):
        EngineCore(model, EngineConfig(64 << 20, cache=PRESETS["default"]), str)
    EngineCore(model, EngineConfig(64 << 20), str)
    assert model.checksums() == before
