"""A tiny model with a byte-level tokenizer and a chat template, built once; and job files around it."""

import json
from pathlib import Path

import pytest
import yaml

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog.",
    "Summarise the document below in one sentence.",
] * 4


def make_tokenizer():
    """Return a byte-level BPE tokenizer with control tokens, a chat template and a BOS of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TRAINING_TEXT, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


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
