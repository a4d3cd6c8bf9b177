"""The command line: exit codes, what goes to stdout, and what is not imported."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbatch import errors
from kvbatch.cli import cli
from kvbatch.signals import stop_on_signals

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "transformers", "polars")


def kvbatch(*args, check_imports=()):
    """Run the command line in a process of its own; report which modules it imported."""
    code = (
        "import sys, atexit\n"
        f"names = {check_imports!r}\n"
        "atexit.register(lambda: print([m for m in names if m in sys.modules], file=sys.stderr))\n"
        "from kvbatch.cli import main; main()"
    )
    # a locale without UTF-8, as a service may have: files are UTF-8 all the same
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = os.environ | ascii_only | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )


def test_run_report_and_nothing_new(job_file):
    path = str(job_file([{"id": 7, "text": "The quick brown fox."}, {"id": 8, "text": ""}]))
    done = kvbatch("run", path)
    assert done.returncode == 0, done.stderr
    assert "2: 1 ok, 0 errors, 1 rejected" in done.stdout
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    again = kvbatch("run", path, check_imports=HEAVY)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # of the processor: a busy machine is not our fault
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    assert again.returncode == 0 and again.stdout.startswith("Nothing new")
    assert again.stderr.strip() == "[]", "a rerun with nothing new imports nothing heavy"
    report = json.loads(kvbatch("report", "runs/test", "--json").stdout)
    assert (report["rows"], report["ok"], report["rejected"], report["status"]) == (2, 1, 1, "complete")
    plain = kvbatch("report", report["output"].removesuffix("/shards"))
    *summary, line = done.stdout.splitlines()
    assert plain.stdout.splitlines() == summary
    assert json.loads(line)["run_id"] == report["run_id"]


def test_help_imports_nothing_heavy():
    helped = kvbatch("--help", check_imports=(*HEAVY, "pyarrow", "pydantic"))
    assert helped.returncode == 0 and helped.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.LimitExceeded, 65),
        (errors.InputError, 66),
        (errors.ModelUnavailable, 69),
        (errors.KvbatchError, 70),
        (ValueError, 70),
        (errors.OutputError, 73),
        (errors.Interrupted, 75),
        (errors.JobFileError, 78),
        (errors.JobChanged, 78),
        (errors.Skipped, 0),
    ],
)
def test_exit_codes(error, code, job_file, monkeypatch):
    def fail(*args, **kwargs):
        raise error("what went wrong")

    monkeypatch.setattr("kvbatch.run.entry.run_job", fail)
    result = CliRunner().invoke(cli, ["run", str(job_file([]))])
    assert result.exit_code == code
    # what a library or a fault of ours says may quote a document
    assert ("what went wrong" in result.stderr) == issubclass(error, errors.KvbatchError)
    assert "Traceback" not in result.stderr
    assert json.loads(result.stdout)["exit_code"] == code, "one line for machines, and nothing else"


def test_wrong_command_lines_and_missing_things(job_file):
    invoke = CliRunner().invoke
    assert invoke(cli, ["run"]).exit_code == 2
    assert invoke(cli, ["fly"]).exit_code == 2
    assert invoke(cli, ["run", "nowhere.yaml"]).exit_code == 78
    assert invoke(cli, ["report", "nowhere"]).exit_code == 66
    path = str(job_file([{"id": "a", "text": "b"}]))
    Path("file").write_text("")
    assert invoke(cli, ["run", path, "-s", "output.dir=file/runs"]).exit_code == 73


def test_what_fails_behind_a_signal_does_not_hide_it():
    with pytest.raises(errors.Interrupted, match="SIGTERM"), stop_on_signals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            raise ValueError("half a change")
    with pytest.raises(ValueError, match="no signal"), stop_on_signals():
        raise ValueError("no signal")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_stops_the_run_and_keeps_finished_shards(name, job_file, monkeypatch):
    from engine import EngineCore

    generate = EngineCore.generate

    def interrupted(self, requests):
        for number, result in enumerate(generate(self, requests)):
            yield result
            if number == 4:
                os.kill(os.getpid(), getattr(signal, name))

    monkeypatch.setattr(EngineCore, "generate", interrupted)
    records = [{"id": n, "text": "fox"} for n in range(8)]
    path = str(job_file(records, output={"shard_rows": 2}, engine={"max_sequences": 1}))
    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in the background
    result = CliRunner().invoke(cli, ["run", path])
    assert result.exit_code == 75 and name in result.stderr
    run = Path("runs/test/latest")
    assert sorted(p.name for p in (run / "shards").iterdir()) == ["part-00000.parquet", "part-00001.parquet"]
    assert not (run / "_SUCCESS").exists()
    assert signal.getsignal(signal.SIGINT) is before, "handlers are put back"
    monkeypatch.setattr(EngineCore, "generate", generate)
    result = CliRunner().invoke(cli, ["run", path])
    assert result.exit_code == 0 and "5 rows were finished before" in result.stdout
    assert json.loads((run / "summary.json").read_text())["ok"] == 8
