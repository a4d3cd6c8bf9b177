"""What several tests of jobs need: a tokenizer, rows, and runs of job files."""

import io
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from kvbatch.job_file.load import load_job
from kvbatch.run.entry import RunOutcome, run_job
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.find_runs import open_run
from tests.kvbatch.fakes import Stopping

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog.",
    "Summarise the document below in one sentence.",
] * 4
RECORDS = [{"id": f"r{n}", "text": f"{n} fox " * (1 + n * 7 % 23), "n": n} for n in range(11)]


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


def output(run: RunDirectory) -> pl.DataFrame:
    """Return the rows in a run's shards."""
    return pl.concat([pl.read_parquet(path) for path in sorted(run.shards.glob("*.parquet"))])


def run(path: Path, *overrides: str, **kwargs: Any) -> RunOutcome:
    """Run a job file; `kwargs` are those of `run_job`."""
    return run_job(load_job(path, overrides), stream=io.StringIO(), **kwargs)


def stop_after(path: Path, num_rows: int, *overrides: str) -> RunDirectory:
    """Run a job and stop it after some rows."""
    with pytest.raises(KeyboardInterrupt):
        run(path, *overrides, make_llm=lambda *_: Stopping(num_rows))
    return open_run(Path("runs/test"))
