"""A nightly job over a directory: what is said of the files that were not read, and what ends the night."""

import gzip
import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbatch.cli import cli
from kvbatch.run_dir.find_runs import open_run
from tests.kvbatch.fakes import Backwards


@pytest.fixture
def kvbatch(monkeypatch):
    """Run the command line on an engine without a model; returns exit code, told facts, stdout and stderr."""

    def invoke(*arguments):
        monkeypatch.setattr("kvbatch.run.entry.load_llm", lambda *_: Backwards())
        done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        return done.exit_code, json.loads(done.stdout.splitlines()[-1]), done.stdout, done.stderr

    return invoke


def rows(*numbers):
    return "".join(json.dumps({"id": f"r{n}", "text": f"fox {n}"}) + "\n" for n in numbers).encode()


def test_a_half_uploaded_file_and_a_rotation_end_no_night(job_file, kvbatch):
    path = job_file([], input={"path": "logs", "on_bad_file": "skip", "incremental": True})
    Path("logs").mkdir()
    Path("logs/app.jsonl").write_bytes(rows(1, 2))
    Path("logs/notes.md").write_text("# notes\n")
    Path("logs/up.jsonl.gz").write_bytes(gzip.compress(rows(*range(3, 3000)))[:-9])
    code, told, stdout, stderr = kvbatch("run", path)
    assert (code, told["ok"], told["skipped_files"]) == (0, 2, 2)
    reasons = {group["first"][0]: group["reason"] for group in told["skipped"]}
    assert reasons["logs/up.jsonl.gz"] == "the gzip data ends early: the file is truncated"
    for text in (stdout, stderr, open_run(Path("runs/test")).page.read_text()):
        assert "logs/up.jsonl.gz" in text and "logs/notes.md" in text and "truncated" in text
    assert kvbatch("run", path)[1]["status"] == "nothing_new"
    os.rename("logs/app.jsonl", "logs/app.jsonl.1")
    Path("logs/app.jsonl").write_bytes(rows(3))
    code, told, *_ = kvbatch("run", path)
    assert (code, told["ok"], told["carried"]) == (0, 3, 2)
    code, told, *_ = kvbatch("run", path, "-s", "input.on_bad_file=fail")
    assert code == 66 and "up.jsonl.gz" in told["message"]


@pytest.mark.parametrize("code", [0, 66])
def test_the_crontab_gives_the_exit_code_of_the_job(tmp_path, code):
    command = tmp_path / ".venv" / "bin" / "kvbatch"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/sh\necho rows\necho '{{\"exit_code\": {code}}}'\nexit {code}\n")
    command.chmod(0o755)
    lines = (Path(__file__).parents[3] / "scripts" / "kvbatch.crontab").read_text().splitlines()
    (line,) = [line for line in lines if "kvbatch run" in line and not line.startswith("#")]
    done = subprocess.run(
        ["sh", "-c", line.split(maxsplit=5)[5]], env=os.environ | {"KVBATCH": str(tmp_path)}, check=False
    )
    assert done.returncode == code
    assert json.loads((tmp_path / "nights.jsonl").read_text()) == {"exit_code": code}


def test_a_panic_of_a_library_is_an_error_like_another(job_file, kvbatch, monkeypatch):
    class PanicException(BaseException):
        """As polars raises it."""

    def panic(*_):
        raise PanicException("memory, and a piece of a document")

    path = job_file([{"id": "a", "text": "fox"}])
    monkeypatch.setattr("kvbatch.report.summary.summarise", panic)
    code, told, _, stderr = kvbatch("run", path)
    assert (code, told["status"]) == (70, "failed") and "PanicException at test_nights.py" in stderr
    assert "a piece" not in stderr + json.dumps(told)


def test_a_condition_that_fits_no_row_makes_no_run(job_file, kvbatch):
    path = job_file([{"id": n, "text": "fox", "lang": "en"} for n in range(7)], input={"incremental": True})
    assert kvbatch("run", path)[0] == 0
    first = os.readlink("runs/test/latest")
    code, told, *_ = kvbatch("run", path, "-s", "input.where=lang = 'DE'")
    assert (code, told["status"]) == (65, "over_limits") and "left out 7 of 7 rows" in told["message"]
    assert (
        os.readlink("runs/test/latest") == first and len(list(Path("runs/test").glob("*/manifest.json"))) == 2
    )
    code, told, stdout, _ = kvbatch("run", path, "-s", "input.where=id > 3")  # all of them are reused
    assert (code, told["carried"], told["left_out"]) == (0, 3, 4) and "where left out 4 more" in stdout
    Path("in.jsonl").write_text("")
    code, told, _, stderr = kvbatch("run", path, "-s", "input.where=id > 3")
    assert (code, told["rows"]) == (0, 0) and "the input has no rows" in stderr
