"""What stays on disk of a start that is refused or killed, and what a run that did not end says of itself."""

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbatch import planning
from kvbatch.cli import cli
from kvbatch.errors import KvbatchError, ModelUnavailable
from kvbatch.job_file.load import load_job
from kvbatch.report.status import load_status
from kvbatch.run.entry import run_job
from kvbatch.run_dir.find_runs import open_run
from tests.kvbatch.fakes import Backwards, Stopping

RECORDS = [{"id": f"r{n}", "text": f"{n} fox " * (1 + n)} for n in range(7)]
HOME = Path("runs/test")


@pytest.fixture
def kvbatch(monkeypatch):
    """Run the command line on an engine without a model."""

    def invoke(*arguments, engine=Backwards):
        monkeypatch.setattr("kvbatch.run.entry.load_llm", lambda *_: engine())
        return CliRunner().invoke(cli, [str(argument) for argument in arguments])

    return invoke


def run(path, *overrides, make_llm=lambda *_: Backwards(), **kwargs):
    return run_job(load_job(path, overrides), stream=io.StringIO(), make_llm=make_llm, **kwargs).run


def tree(path=HOME):
    """Return every file and link of a job's directory with its content; the lock says nothing of a run."""
    return {
        str(file): file.readlink() if file.is_symlink() else file.read_bytes() if file.is_file() else None
        for file in sorted(path.rglob("*"))
        if file.name != "LOCK"
    }


def test_what_is_refused_changes_nothing(job_file, kvbatch, monkeypatch):
    monkeypatch.setattr("kvbatch.report.html.page.write_page", lambda *_: None)
    path = job_file(RECORDS, output={"shard_rows": 4})
    run(path)
    assert kvbatch("plan", path).exit_code == 0
    before = tree()

    def refused(code, *arguments):
        done = kvbatch(*arguments)
        assert done.exit_code == code and tree() == before, done.output
        return done

    told = refused(78, "retry", "runs/test", "--status", "stop", "-s", "input.limit=1").stdout.splitlines()[
        -1
    ]
    assert json.loads(told)["run_id"] is None
    column = ("-s", "prompt.template='{nope} {text}'")
    refused(78, "run", path, "--new-run", *column)
    refused(78, "plan", path, *column)
    make_plan = planning.make_plan

    def fails(error):
        def plan_and_fail(*arguments):
            make_plan(*arguments)
            raise error

        for module in ("kvbatch.run.session", "kvbatch.estimate.preview"):
            monkeypatch.setattr(f"{module}.make_plan", plan_and_fail)

    fails(ValueError("secret"))
    done = refused(70, "run", path, "--new-run", "-s", "generation.seed=1")
    assert "run.jsonl" not in done.stderr, "the log is gone with the run"
    fails(KeyboardInterrupt())
    refused(75, "run", path, "-s", "generation.seed=1")
    fails(KvbatchError("no"))
    refused(70, "plan", path, "-s", "generation.seed=1")
    assert kvbatch("run", path).stdout.startswith("Nothing new")


def test_a_run_that_is_planned_is_seen_and_what_a_kill_leaves_of_it_is_cleared(job_file, monkeypatch):
    monkeypatch.setattr("kvbatch.report.html.page.write_page", lambda *_: None)
    path = job_file(RECORDS)
    complete = run(path)
    make_plan, seen = planning.make_plan, []

    def watched(opened, memory, draft, progress):
        seen.append((draft.run_id, load_status(HOME), load_status(HOME / draft.run_id)))
        assert open_run(HOME).run_id == complete.run_id, "the others look at what there is"
        return make_plan(opened, memory, draft, progress)

    monkeypatch.setattr("kvbatch.run.session.make_plan", watched)
    leftover = HOME / ".new" / complete.run_id
    leftover.mkdir(parents=True)
    (leftover / "manifest.json").write_bytes(complete.manifest.read_bytes())
    assert load_status(HOME)["state"] == "complete", "nobody holds the lock"
    later = run(path, new_run=True)
    [(run_id, by_home, by_name)] = seen
    assert run_id == later.run_id and by_home["run_id"] == by_name["run_id"] == run_id
    assert (by_home["state"], by_home["planned_rows"], by_home["locked"]) == ("running", None, True)
    assert open_run(HOME).run_id == run_id and not (HOME / ".new").exists()


def test_a_model_that_cannot_be_loaded_leaves_a_planned_run_that_says_so(job_file, kvbatch):
    def unloaded(*_):
        raise ModelUnavailable("no weights")

    path = job_file(RECORDS, output={"shard_rows": 4})
    with pytest.raises(ModelUnavailable):
        run(path, make_llm=unloaded)
    planned = open_run(HOME)
    exported = kvbatch("export", HOME)
    assert exported.exit_code == 66 and not exported.stdout
    assert f"none of 7 rows; kvbatch resume {planned.path}" in exported.stderr
    assert "none of 7 is in a shard yet" in kvbatch("report", HOME).stdout
    assert kvbatch("resume", HOME, engine=lambda: Stopping(6)).exit_code == 75
    exported = kvbatch("export", HOME)
    assert exported.exit_code == 0 and len(exported.stdout.splitlines()) == 4
    assert "4 of 7 rows are in its shards; kvbatch resume" in exported.stderr
    assert kvbatch("resume", HOME).exit_code == 0 and open_run(HOME).path == planned.path
    exported = kvbatch("export", HOME)
    assert (len(exported.stdout.splitlines()), exported.stderr) == (7, "")


@pytest.mark.parametrize("gone", [["_SUCCESS"], ["_SUCCESS", "summary.json"]])
def test_a_run_killed_between_its_last_row_and_its_end_is_stopped(job_file, kvbatch, gone):
    path = job_file(RECORDS)
    found = run(path)
    for name in gone:
        (found.path / name).unlink()
    status = load_status(HOME)
    assert (status["state"], status["done_rows"]) == ("stopped", 7)
    assert "test, run " in (text := kvbatch("report", HOME).stdout) and "incomplete" in text.splitlines()[0]
    told = json.loads(kvbatch("run", path).stdout.splitlines()[-1])
    assert (told["run_id"], told["status"], told["ok"]) == (found.run_id, "complete", 7)
    assert load_status(HOME)["state"] == "complete" and "complete" in found.page.read_text()


def test_an_incremental_run_goes_on_in_a_new_one_which_takes_its_place(job_file, kvbatch):
    path = job_file(RECORDS, input={"incremental": True})
    limited = ("-s", "limits.row_retries=2")
    assert kvbatch("run", path, *limited, engine=lambda: Stopping(4)).exit_code == 75
    first = open_run(HOME)
    assert load_status(HOME)["continue"] == f"kvbatch run {path} -s limits.row_retries=…"
    Path("in.jsonl").write_text("\n".join(map(json.dumps, [*RECORDS, {"id": "new", "text": "x"}])) + "\n")
    refused = kvbatch("resume", first.path)
    assert refused.exit_code == 78 and f"kvbatch run {path}" in refused.stderr
    assert "superseded" not in refused.stderr and "--new-run" not in refused.stderr
    assert kvbatch("run", path).exit_code == 0
    later = open_run(HOME)
    assert later.path != first.path and later.read_summary()["carried"] == 4
    status = load_status(first.path)
    assert (status["state"], status["superseded_by"], status["continue"]) == (
        "superseded",
        later.run_id,
        None,
    )
    assert f"superseded by run {later.run_id}" in kvbatch("report", first.path).stdout
    assert f"was superseded by run {later.run_id}" in kvbatch("resume", first.path).stderr
    assert f"run {later.run_id} took its place" in kvbatch("export", first.path).stderr


def test_a_run_that_was_killed_before_latest_moved_is_the_latest(job_file, monkeypatch):
    path = job_file(RECORDS)
    first = run(path)

    def killed(home, run_id):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("kvbatch.run.entry.point_latest", killed)
        run(path, new_run=True)
    assert (HOME / "latest").resolve().name == first.run_id
    stranded = open_run(HOME)
    assert stranded.run_id != first.run_id
    assert run(path).run_id == stranded.run_id, "the next start goes on with it"
    assert (HOME / "latest").resolve().name == stranded.run_id
