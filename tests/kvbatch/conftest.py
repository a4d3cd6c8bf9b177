"""A tiny model, built once, and job files around it."""

import json
from pathlib import Path

import pytest
import yaml

from tests.kvbatch.helpers import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random Llama of 512 positions in a directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        torch_dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def job_file(tmp_path, tiny_model, monkeypatch):
    """Write documents and a job over them into an empty working directory; returns the job file's path."""
    monkeypatch.chdir(tmp_path)

    def write(records: list[dict], **sections) -> Path:
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        Path("in.jsonl").write_text("\n".join(lines) + "\n")
        job = {
            "version": 1,
            "name": "test",
            "input": {"path": "in.jsonl"},
            "model": {"path": str(tiny_model), "dtype": "float32"},
            "prompt": {"template": "Summarise the document below.\n{text}\nSummary:"},
            "generation": {"max_new_tokens": 8, "ignore_eos": True, "repetition_stop": False},
            "engine": {"device": "cpu", "memory_budget": "64MiB", "max_sequences": 4, "threads": 1},
        }
        for name, section in sections.items():
            job[name] = job.get(name, {}) | section
        Path("job.yaml").write_text(yaml.safe_dump(job))
        return Path("job.yaml")

    return write


@pytest.fixture
def ran(job_file, monkeypatch):
    """A job that ran, with an engine without a model and a quality that needs none."""
    from kvbatch.estimate import preview as planning
    from tests.kvbatch.fakes import Backwards
    from tests.kvbatch.streams import code_with, make_stream, opened

    assert planning.opened_job  # its own: a plan needs the model's tokenizer
    monkeypatch.setattr("kvbatch.run.entry.load_llm", lambda *_: Backwards())
    monkeypatch.setattr("kvbatch.opened_job.opened_job", opened)
    row = {"row_id": "0", "policy": "job", "error": None, "nll_delta": 0.0, "kl": 0.0, "top1_agreement": 1.0}
    row["kv_kept_ratio"] = 0.5
    monkeypatch.setattr("kvbatch.estimate.quality.QualitySample.__init__", lambda *_: None)
    monkeypatch.setattr(
        "kvbatch.estimate.quality.QualitySample.compare",
        lambda _, names: [row | {"policy": name} for name in names],
    )
    job_file([{"id": n, "text": "fox"} for n in range(3)])
    assert code_with(monkeypatch, ["run", "job.yaml"], make_stream("whole"), make_stream("whole")) == 0
