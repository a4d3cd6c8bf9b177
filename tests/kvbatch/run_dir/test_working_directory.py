"""A run is gone on with from any directory: its relative paths start where it began."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbatch.cli import cli
from kvbatch.job_file.load import load_job
from kvbatch.run.entry import run_job
from tests.kvbatch.fakes import Backwards


class Stopped(Backwards):
    def generate(self, requests):
        for result in super().generate(requests):
            yield result
            raise KeyboardInterrupt


@pytest.fixture
def stopped(job_file, tiny_model, tmp_path, monkeypatch):
    """A run that was stopped in a directory `begun`, all its paths relative; the working directory is another."""
    begun = tmp_path / "begun"
    begun.mkdir()
    monkeypatch.chdir(begun)
    for name in ("a", "b"):  # files of one name, told apart by their paths
        Path(name).mkdir()
        rows = [{"id": f"{name}{n}", "text": f"row {n}"} for n in range(3)]
        Path(f"{name}/in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("model").symlink_to(tiny_model)
    Path("answer.json").write_text('{"type": "string"}')
    path = job_file(
        [],
        input={"path": ["a/in.jsonl", "b/in.jsonl"]},
        model={"path": "model"},
        generation={"json_schema": "answer.json"},
        output={"metrics": "last.prom"},
    )
    with pytest.raises(KeyboardInterrupt):
        run_job(load_job(path), make_llm=lambda *_: Stopped())
    monkeypatch.setattr("kvbatch.run.entry.load_llm", lambda *_: Backwards())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return begun


def ended(*arguments: str) -> dict:
    done = CliRunner().invoke(cli, arguments)
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


@pytest.mark.parametrize("name", ["absolute", "relative"])
def test_resume_and_retry_from_another_directory(stopped, tmp_path, name):
    path = str(stopped / "runs/test") if name == "absolute" else "../begun/runs/test"
    found = ended("resume", path)
    assert (found["exit_code"], found["rows"]) == (65, 6), found  # the fake's answers are no JSON
    assert Path(found["output"]).is_absolute() and Path(found["output"]).is_dir()
    assert (stopped / "last.prom").exists() and not list((tmp_path / "elsewhere").iterdir())
    assert len(list((stopped / "runs/test").glob("2*"))) == 1, "gone on with, not begun anew"
    again = ended("retry", str(stopped / "runs/test"), "--status", "error")
    assert again["exit_code"] == 65 and again["rows"] == 6 and again["run_id"] != found["run_id"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_directory_that_was_moved_as_a_whole(stopped, tmp_path):
    moved = tmp_path / "moved"
    stopped.rename(moved)
    found = ended("resume", str(moved / "runs/test"))
    assert found["rows"] == 6 and "is gone: relative paths start at" in found["stderr"]
    assert (moved / "last.prom").exists()


def test_a_run_that_was_moved_alone_names_where_paths_start(stopped, tmp_path):
    shutil.move(stopped / "runs/test", tmp_path / "taken")
    shutil.rmtree(stopped)
    found = ended("resume", str(tmp_path / "taken"))
    assert found["exit_code"] in (66, 78) and str(tmp_path / "elsewhere") in found["stderr"]
    assert str(stopped) in found["stderr"]
