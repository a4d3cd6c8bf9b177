"""A script that is given a model takes any source of one, as a job does."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.models.tiny_models import tiny_model
from tests.kvbatch.model.helpers import TOKENS, write_gguf

COMPRESSION = (
    "--data text=corpus.jsonl --presets none --docs 2 --context 200 --continuation 9 --memory-gib 0.1"
)
SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, tiny_model("llama", vocab_size=len(TOKENS), max_position_embeddings=1024), "llama")
    return path


@pytest.fixture
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a script on a small corpus in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvbatch.model.source.kvbatch_cache", lambda given=None: tmp_path / "cache")
    for name, times in (("corpus", 200), ("short", 20)):
        text = "the quick brown fox " * times
        rows = ({"text": f"{n} {text}", "question": "who?", "answer": "fox"} for n in range(2))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def run(script: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")

    return run


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("eval_weights", "--text corpus.jsonl --tokens 64 --window 32"),
        ("eval_compression", COMPRESSION),
        (
            "eval_needles",
            "--data text=corpus.jsonl --presets none --context 800 --max-new 2 --memory-gib 0.1",
        ),
        (
            "eval_answers",
            "--documents text=short.jsonl --presets none --rows 2 --max-new 2 --memory-gib 0.1",
        ),
    ],
)
def test_script_reads_a_gguf(run_script, gguf: Path, script: str, arguments: str) -> None:
    run_script(script, "--model", str(gguf), *arguments.split())


def test_an_evaluation_goes_on_from_its_results(run_script, gguf: Path, capsys, monkeypatch) -> None:
    models = [f"--model=first={gguf}", f"--model=second={gguf}"]
    arguments = (*COMPRESSION.split(), "--results", "results.jsonl")

    def summary(*given: str) -> dict:
        run_script("eval_compression", *given, *arguments)
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    alone = summary(models[0])
    lines = Path("results.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 2  # documents, of one policy
    Path("results.jsonl").write_bytes(lines[0] + lines[1][:20])  # a kill tore the last line
    both = summary(*models)
    assert both["first"] == both["second"] == alone["first"] and both["first"]["none"]["kl"] < 1e-3
    assert len(Path("results.jsonl").read_bytes().splitlines()) == 4
    monkeypatch.setattr("engine.engine_core.EngineCore.__init__", None)  # nothing is read again
    assert summary(*models) == both
