"""A wheel of this tree, on a path of its own, runs a user's job far from the tree."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.engine.models.tiny_models import save_tiny_model
from tests.kvbatch.helpers import make_tokenizer

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvbatch", "engine", "kvcache")
OPTIONAL = ("matplotlib", "gguf", "llguidance", "jsonschema")  # what the extras install
READERS = {f"kvbatch.model.{name}" for name in ("gguf", "gguf_file", "gguf_tokenizer")}
RECORDS = [{"id": f"doc-{n}", "text": f"Clause {n}: the fox jumps. " * (1 + n)} for n in range(3)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build from a copy, so that no build folder is left in the tree; without isolation, so offline."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    _pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, source)
    (built,) = folder.glob("kvbatch-*.whl")
    return built


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    expected = {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    assert packed == expected
    assert {f"{name}/py.typed" for name in PACKAGES} <= packed


def test_the_installed_wheel_needs_no_extra(wheel, tmp_path):
    site = tmp_path / "site"
    _pip("install", "--no-deps", "--target", site, wheel)
    modules = [
        path.relative_to(ROOT).with_suffix("") for name in PACKAGES for path in (ROOT / name).rglob("*.py")
    ]
    # the only modules that an extra has to itself; each is imported when a job needs it
    names = {".".join(path.parts) for path in modules} - READERS - {"kvbatch.__main__"}
    script = f"import sys, importlib; sys.modules |= dict.fromkeys({OPTIONAL})\nfor name in {sorted(names)}:"
    _python(site, tmp_path, "-c", f"{script} importlib.import_module(name)")
    assert "--plot" in _python(site, tmp_path, site / "bin" / "kvbatch", "tune", "--help")


def test_the_installed_wheel_runs_a_job_of_the_users_own(wheel, tmp_path):
    site, home = tmp_path / "site", tmp_path / "home"
    _pip("install", "--no-deps", "--target", site, wheel)
    tokenizer = make_tokenizer()
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    save_tiny_model(home / "model", "llama", eos_token_id=tokenizer.eos_token_id, **shape)
    tokenizer.save_pretrained(home / "model")
    (home / "mine.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    job = {
        "version": 1,
        "name": "mine",
        "input": {"path": "mine.jsonl"},
        "model": {"path": "model", "dtype": "float32"},
        "prompt": {"template": "Summarise:\n{text}"},
        "generation": {"max_new_tokens": 4},
        "engine": {"device": "cpu", "memory_budget": "64MiB", "threads": 1},
    }
    (home / "mine.yaml").write_text(yaml.safe_dump(job))

    where = "import engine, kvbatch, kvcache; print(engine.__file__, kvbatch.__file__, kvcache.__file__)"
    for file in _python(site, home, "-c", where).split():
        assert site in Path(file).parents, "the tree itself is imported, not the wheel"
    _python(site, home, site / "bin" / "kvbatch", "run", "mine.yaml")

    (part,) = (home / "runs" / "mine" / "latest" / "shards").glob("part-*.parquet")
    rows = pq.read_table(part).to_pylist()
    assert [row["id"] for row in rows] == [record["id"] for record in RECORDS]
    assert all(row["kvb_status"] == "ok" and row["kvb_completion_tokens"] >= 1 for row in rows)
    assert "Nothing new" in _python(site, home, site / "bin" / "kvbatch", "run", "mine.yaml")


def _python(site: Path, cwd: Path, *arguments: object) -> str:
    """Run this Python with `site` first on its path, and return what it prints."""
    command = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(site)}
    return _output(command, cwd=cwd, env=environment)


def _pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    _output(command)


def _output(command: list[str], **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command} gave {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout
