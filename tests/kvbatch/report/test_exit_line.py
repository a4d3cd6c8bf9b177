"""How a run ended, for programs: the last line of stdout where it is no terminal, and a textfile for Prometheus."""

import json
import os
import pty
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbatch.cli import cli
from tests.kvbatch.fakes import Backwards
from tests.kvbatch.streams import RUN, code_with, make_stream, written

SAMPLE = re.compile(r'([a-z_]+)\{job_name="test"(?:,([a-z]+="[a-z]+"))?\} ([0-9.e+-]+)')


@pytest.fixture
def kvbatch(monkeypatch):
    """Run the command line on an engine without a model; returns exit code, told facts, and stdout."""

    def invoke(*arguments, fail=()):
        monkeypatch.setattr("kvbatch.run.entry.load_llm", lambda *_: Backwards(fail))
        done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        return done.exit_code, json.loads(done.stdout.splitlines()[-1]), done.stdout

    return invoke


def samples(path="metrics/test.prom"):
    """Read a textfile as strictly as the format is."""
    found, described = {}, set()
    for line in Path(path).read_text().splitlines():
        if line.startswith("#"):
            described.add(line.split()[2])
            continue
        name, label, value = SAMPLE.fullmatch(line).groups()
        assert name in described
        found[name.removeprefix("kvbatch_last_") + (f"[{label}]" if label else "")] = float(value)
    return found


def test_every_way_to_end(job_file, kvbatch):
    records = [{"id": n, "text": "fox"} for n in range(3)] + [{"id": 3, "text": ""}]
    path = job_file(records, output={"metrics": "metrics/test.prom"}, limits={"max_error_ratio": 0.3})
    code, told, stdout = kvbatch("run", path)
    assert code == 0 and "3 ended by themselves, 0 cut" in stdout.splitlines()[1]
    assert "4: 3 ok" in stdout.splitlines()[2]
    assert (told["answers"], told["ended"], told["cut"], told["advice"]) == (3, 3, 0, None)
    assert (told["job"], told["status"], told["exit_code"], told["message"]) == ("test", "complete", 0, None)
    assert (told["rows"], told["ok"], told["rejected"], told["completion_tokens"]) == (4, 3, 1, 3)
    assert Path(told["output"]).is_dir() and told["output"].split("/")[2] == told["run_id"]
    first = samples()
    assert first["run_exit_code"] == 0 and first['run_rows[status="ok"]'] == 3
    assert first["success_timestamp_seconds"] == first["run_timestamp_seconds"]

    code, told, _ = kvbatch("run", path)
    assert (code, told["status"], told["rows"], told["completion_tokens"]) == (0, "nothing_new", 4, None)
    again = samples()
    assert again["success_timestamp_seconds"] > first["success_timestamp_seconds"]
    assert 'run_tokens[kind="prompt"]' not in again

    code, told, stdout = kvbatch("run", path, "--new-run", fail=(0, 1))
    assert (code, told["status"], told["errors"]) == (65, "over_limits", 2)
    assert "over limits" in stdout and "limits.max_error_ratio" in told["message"]
    over = samples()
    assert over["run_exit_code"] == 65
    assert (
        over["success_timestamp_seconds"]
        == again["success_timestamp_seconds"]
        < over["run_timestamp_seconds"]
    )

    code, told, _ = kvbatch("run", path, "-s", "input.path=nowhere.jsonl")
    assert (code, told["status"], told["run_id"]) == (66, "failed", None) and "nowhere" in told["message"]
    assert samples()["run_exit_code"] == 66
    code, told, _ = kvbatch("run", "nowhere.yaml")
    assert (code, told["status"], told["job"]) == (78, "failed", None)
    code, told, _ = kvbatch("run", path, "--new-run", "-s", "output.metrics=job.yaml/x.prom")
    assert code == told["exit_code"] == 73 and "x.prom" in told["message"] and told["ok"] == 3
    assert not list(Path("metrics").glob(".*")), "no half files beside it"


def test_a_terminal_shows_text_alone_and_json_is_json_alone(ran, monkeypatch):
    for arguments in (["run", "job.yaml", "--new-run"], ["run", "job.yaml"], ["resume", RUN]):
        leader, follower = pty.openpty()
        with open(follower, "w") as terminal:
            assert code_with(monkeypatch, arguments, terminal, make_stream("whole")) == 0
            text = os.read(leader, 1 << 16).decode()
            assert "{" not in text and ("3 ok" in text or "Nothing" in text), arguments
            assert code_with(monkeypatch, [*arguments, "--json"], terminal, make_stream("whole")) == 0
            assert json.loads(os.read(leader, 1 << 16).decode())["exit_code"] == 0
        os.close(leader)
        piped = make_stream("whole")
        assert code_with(monkeypatch, arguments, piped, make_stream("whole")) == 0
        first, *_, last = written(piped).splitlines()
        assert json.loads(last)["ok"] == 3 and not first.startswith("{")
