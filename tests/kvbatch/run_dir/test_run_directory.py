"""A run directory that somebody else had a hand in: its links, its lock, its order among others, older releases."""

import json
import os
import random
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbatch.cli import cli
from kvbatch.errors import Damaged, Interrupted
from kvbatch.run_dir.commit import check_shard, finished_rows
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.find_runs import job_runs, latest_run, open_run
from kvbatch.run_dir.lock import IfLocked, job_lock
from kvbatch.run_dir.verify import find_problems
from tests.kvbatch import helpers
from tests.kvbatch.fakes import Backwards, Stopping
from tests.kvbatch.helpers import output, stop_after

RECORDS = [{"id": f"r{n}", "text": f"{n} fox"} for n in range(7)]
HOME = Path("runs/test")


def run(path, *overrides, **kwargs) -> RunDirectory:
    return helpers.run(path, *overrides, **kwargs).run


def invoke(*args):
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def test_a_deleted_shard_is_named_by_all_and_made_again(job_file):
    path = job_file(RECORDS, output={"shard_rows": 2})
    found = run(path, make_llm=lambda *_: Backwards())
    assert invoke("verify", HOME).exit_code == 0
    for harm in (found.shard_file(1).unlink, found.commit_file(2).unlink):
        harm()
        for args in (
            ["status"],
            ["status", "--json"],
            ["report"],
            ["report", "--json"],
            ["export"],
            ["diff", HOME],
        ):
            told = invoke(*args, HOME)
            assert told.exit_code == 66 and f"kvbatch resume {found.path}" in told.stderr, args
            assert "part-0000" in told.stderr and "is missing" in told.stderr
        told = invoke("verify", HOME, "--json")
        problems = json.loads(told.stdout)["problems"]
        assert told.exit_code == 66 and [each["problem"] for each in problems] == ["is missing"]
        engine = Backwards()
        assert run(path, make_llm=lambda *_: engine).path == found.path  # noqa: B023
        assert len(engine.requests) == 2 and found.is_success and not find_problems(found, deep=True)
        assert output(found)["id"].to_list() == [record["id"] for record in RECORDS]


def test_no_flipped_bit_of_a_shard_goes_unseen(job_file):
    found = run(job_file(RECORDS), make_llm=lambda *_: Backwards())
    file, chance = found.shard_file(0), random.Random(0)
    whole, times = file.read_bytes(), file.stat()
    for _ in range(400):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(Damaged, match="SHA-256"):
            check_shard(found, 0, deep=True)
    assert invoke("export", HOME).exit_code == invoke("report", HOME).exit_code == 66
    file.write_bytes(whole)  # at another time: the same file
    assert not find_problems(found) and invoke("export", HOME).exit_code == 0


def test_damaged_dead_letters_cost_no_answer(job_file):
    path = job_file([*RECORDS, "no json"])
    found = run(path, make_llm=lambda *_: Backwards())
    letters = found.deadletter_file(0).read_bytes()
    found.deadletter_file(0).unlink()

    def forbidden(*_):
        raise AssertionError("weights were loaded")

    assert run(path, make_llm=forbidden).path == found.path
    assert found.deadletter_file(0).read_bytes() == letters and not find_problems(found, deep=True)


@pytest.mark.parametrize("text", ["{}", "[]", "", '{"format": 3, "job": "test"}', '{"format": 99}'])
def test_a_manifest_that_is_none_ends_the_start_by_name(text, job_file):
    path = job_file(RECORDS, output={"shard_rows": 2})
    found = stop_after(path, 5)
    found.manifest.write_text(text)
    for args in (["run", path], ["resume", HOME], ["status", HOME], ["report", HOME], ["verify", HOME]):
        told = invoke(*args)
        assert told.exit_code == 66 and str(found.manifest) in told.output, args
    assert len(job_runs(HOME)) == 1
    told = invoke("run", path).stderr
    assert "--new-run" in told or "newer: update kvbatch" in told


def test_what_decides_nothing_may_hold_anything(job_file):
    path = job_file(RECORDS, output={"shard_rows": 2})
    found = stop_after(path, 5)
    (found.commits / "part-x.json").write_text("{")
    (found.commits / "part-99999.json").mkdir()
    (found.shards / "part-copy.parquet").write_text("mine")
    for beat in ('{"time": 5}', "[1]", '{"time": "now"}', '{"phase": "running", "time": null}', "\udcff"):
        found.heartbeat.write_bytes(beat.encode("utf-8", "surrogateescape"))
        with job_lock(HOME, IfLocked()):
            assert invoke("status", HOME).exit_code == 0
    found.log.write_bytes(b"\xff{")
    assert run(path, make_llm=lambda *_: Backwards()).path == found.path
    assert len(invoke("export", HOME).stdout.splitlines()) == len(RECORDS)
    told = invoke("verify", HOME)
    assert (
        told.exit_code == 66 and "part-copy.parquet does not belong to the run; move it away" in told.stdout
    )


def test_latest_is_found_without_its_link(job_file):
    path = job_file(RECORDS, output={"shard_rows": 2})
    with pytest.raises(KeyboardInterrupt):
        run(path, "output.dir=elsewhere", make_llm=lambda *_: Stopping(5))
    found = open_run(Path("elsewhere"))
    link = Path("elsewhere/latest")
    link.unlink()
    assert open_run(Path("elsewhere")).path == found.path
    link.symlink_to("gone")
    assert run(path, "output.dir=elsewhere", make_llm=lambda *_: Backwards()).path == found.path
    link.unlink()
    shutil.copytree(found.path, link)
    assert latest_run(Path("elsewhere")).path == found.path
    told = invoke("run", path, "--new-run", "-s", "output.dir=elsewhere")
    assert told.exit_code == 73 and "latest is a directory" in told.stderr
    assert len(job_runs(Path("elsewhere"))) == 1, "a refused start leaves nothing"
    Path("runs/test").mkdir(parents=True)
    Path("runs/test/LOCK").mkdir()
    assert invoke("run", path).exit_code == 73


def test_whoever_removes_the_lock_ends_its_holder(job_file):
    class Robbed(Backwards):
        def _answers(self, held):
            for result in super()._answers(held):
                if self.num_answers == 3:
                    (HOME / "LOCK").unlink()
                yield result

    path = job_file(RECORDS, output={"shard_rows": 2})
    with pytest.raises(Interrupted, match=r"LOCK was removed or replaced"):
        run(path, make_llm=lambda *_: Robbed())
    assert len(list(finished_rows(open_run(HOME)))) == 2, "nothing is written from then on"
    with job_lock(HOME, IfLocked()) as first:
        (HOME / "LOCK").unlink()
        with job_lock(HOME, IfLocked()) as second:
            assert second.is_held and not first.is_held
    assert output(run(path, make_llm=lambda *_: Backwards()))["id"].to_list() == [r["id"] for r in RECORDS]


def test_runs_are_ordered_by_what_they_say(job_file):
    """Neither a time of a file in the future nor a clock that was set back makes rows be done again."""
    path = job_file(RECORDS[:3], input={"incremental": True})
    first = run(path, make_llm=lambda *_: Backwards())

    def night(records):
        Path("in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        engine = Backwards()
        return run(path, make_llm=lambda *_: engine), len(engine.requests)

    second, done = night(RECORDS[:5])
    assert done == 2 and [r.path for r in job_runs(HOME)] == [second.path, first.path]
    os.utime(first.manifest, (4e9, 4e9))
    second.write_manifest(replace(second.read_manifest(), created="2001-01-01T00:00:00+00:00"))
    third, done = night(RECORDS)
    assert done == 2 and third.read_manifest().number == 3
    assert datetime.fromisoformat(third.read_manifest().created) < datetime.now(UTC)


def test_every_command_refuses_a_run_directory_of_another_format(job_file):
    path = job_file(RECORDS, output={"shard_rows": 2})
    found = run(path, make_llm=lambda *_: Backwards())
    for number, remedy in ((2, "it is older: kvbatch run --new-run"), (99, "it is newer: update kvbatch")):
        for file in (found.manifest, found.summary, *found.commits.iterdir()):
            file.write_text(json.dumps(json.loads(file.read_text()) | {"format": number}))
        for args in (
            ["run", path],
            ["status", HOME],
            ["report", HOME],
            ["verify", HOME],
            ["diff", HOME, HOME],
            ["export", HOME],
            ["resume", HOME],
            ["retry", HOME, "--status", "error"],
        ):
            told = invoke(*args)
            assert told.exit_code == 66 and f"format {number}" in told.output and remedy in told.output, args
    assert run(path, new_run=True, make_llm=lambda *_: Backwards()).is_success


@pytest.mark.parametrize("changes", [False, True])
def test_a_plan_that_cannot_be_made_again_is_named(changes, job_file, monkeypatch):
    path = job_file(RECORDS, output={"shard_rows": 2})
    found = stop_after(path, 5)
    found.plan.write_bytes(found.plan.read_bytes()[:-100])
    if changes:
        manifest = found.read_manifest()
        found.write_manifest(replace(manifest, plan=replace(manifest.plan, num_bins=77)))
        told = invoke("resume", HOME)
        assert told.exit_code == 66 and "plan.parquet" in told.stderr and "--new-run" in told.stderr
        return
    engine = Backwards()
    assert run(path, make_llm=lambda *_: engine).path == found.path
    assert len(engine.requests) == 2 and not find_problems(found, deep=True)
