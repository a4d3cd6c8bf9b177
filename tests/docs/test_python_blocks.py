"""The Python of README and docs runs as it is written, with a tiny model in place of a path."""

import json
from pathlib import Path

import pytest
import yaml

from tests.docs.helpers import PAGES, blocks, name
from tests.engine.models.tiny_models import save_tiny_model
from tests.kvbatch.helpers import make_tokenizer

BLOCKS = [
    pytest.param(block, id=f"{name(page)}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page, "python"))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model whose heads a compressed cache takes."""
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "llama", vocab_size=320, max_position_embeddings=512)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("block", BLOCKS)
def test_python_runs(block, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(json.dumps({"id": n, "text": "fox " * n}) + "\n" for n in range(3)))
    job = {
        "version": 1,
        "name": "tiny",
        "input": {"path": "in.jsonl"},
        "model": {"path": str(model), "dtype": "float32"},
        "prompt": {"template": "{text}"},
        "engine": {"device": "cpu", "memory_budget": "64MiB", "threads": 1},
    }
    Path("job.yaml").write_text(yaml.safe_dump(job))
    code = block.replace("path/to/model", str(model)).replace("jobs/demo.yaml", "job.yaml")
    for budget in ("4GiB", "60%"):
        code = code.replace(f'"{budget}"', '"64MiB"')
    exec(compile(code, "documentation", "exec"), {})
    out = capsys.readouterr().out
    assert "error" not in out and bool(out.strip()) == ("print" in block)


def test_there_is_python_to_run():
    assert len(BLOCKS) >= 4
