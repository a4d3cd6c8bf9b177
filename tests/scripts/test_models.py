"""A script that is given a model takes any source of one, as a job does."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.engine.models.tiny_models import tiny_model
from tests.kvbatch.model.helpers import TOKENS, write_gguf

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, tiny_model("llama", vocab_size=len(TOKENS), max_position_embeddings=1024), "llama")
    return path


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("eval_weights", "--text corpus.jsonl --tokens 64 --window 32"),
        (
            "eval_compression",
            "--data text=corpus.jsonl --presets none --docs 1 --context 200 --continuation 9 "
            "--memory-gib 0.1",
        ),
    ],
)
def test_script_reads_a_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf: Path, script: str, arguments: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvbatch.model.source.kvbatch_cache", lambda given=None: tmp_path / "cache")
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": "the quick brown fox " * 200}) + "\n")
    monkeypatch.setattr(sys, "argv", [script, "--model", str(gguf), *arguments.split()])
    monkeypatch.syspath_prepend(str(SCRIPTS))
    runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
