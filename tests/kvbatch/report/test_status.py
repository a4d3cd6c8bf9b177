"""What `kvbatch status` says of runs that go on, were stopped, or ended."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbatch.cli import cli
from kvbatch.errors import LimitExceeded
from kvbatch.report.status import load_status, render_status
from kvbatch.run_dir.event_log import write_heartbeat
from kvbatch.run_dir.find_runs import open_run
from kvbatch.run_dir.lock import IfLocked, job_lock
from tests.kvbatch.fakes import Backwards
from tests.kvbatch.helpers import RECORDS, run


def test_who_holds_the_lock_decides_what_a_run_is_at(job_file):
    class Stopped(Backwards):
        def generate(self, requests):
            raise KeyboardInterrupt

    path = job_file(RECORDS)
    with pytest.raises(KeyboardInterrupt):
        run(path, make_llm=lambda *_: Stopped())
    found = open_run(Path("runs/test"))
    home = found.path.parent
    write_heartbeat(found.heartbeat, "running", rows=1, tokens=5, elapsed_s=2.0)
    with job_lock(home, IfLocked(), "plan"):
        status = load_status(home)
        assert (status["state"], status["holder"]) == ("stopped", f"kvbatch plan, process {os.getpid()}")
        assert "held by kvbatch plan" in render_status(status)
    with job_lock(home, IfLocked()):
        assert (load_status(home)["state"], load_status(home)["phase"]) == ("running", "running")
        beat = json.loads(found.heartbeat.read_text())
        found.heartbeat.write_text(json.dumps(beat | {"pid": 1}))  # of an earlier session
        status = load_status(home)
        assert (status["state"], status["phase"], status["heartbeat_age_s"]) == ("running", None, None)
    assert CliRunner().invoke(cli, ["plan", str(path)]).exit_code == 0
    for command in ("status", "resume", "report"):
        refused = CliRunner().invoke(cli, [command, str(home / "plan")])
        assert refused.exit_code == 66 and "is a plan" in refused.stderr


def test_a_run_from_its_first_row_to_its_end(job_file):
    seen = []

    class Watched(Backwards):
        def _answers(self, held):
            for result in super()._answers(held):
                yield result
                write_heartbeat(
                    open_run(Path("runs/test")).heartbeat, "running", rows=9, tokens=50, elapsed_s=2.0
                )
                seen.append(load_status(Path("runs/test")))
                if self.num_answers == 9:
                    raise KeyboardInterrupt

    path = job_file([*RECORDS, "no json"], output={"shard_rows": 4})
    with pytest.raises(KeyboardInterrupt):
        run(path, make_llm=lambda *_: Watched())
    status = seen[5]
    assert (status["state"], status["phase"], status["locked"]) == ("running", "running", True)
    assert status["rows"] == {"ok": 6, "error": 0, "rejected": 0} and status["planned_rows"] == 12
    assert 0 < seen[0]["progress_ratio"] < status["progress_ratio"] < 1
    assert 0 <= status["heartbeat_age_s"] < 60
    plan = open_run(Path("runs/test")).read_manifest().plan
    done = status["progress_ratio"] * plan.prompt_tokens
    assert status["eta_s"] == pytest.approx((plan.prompt_tokens - done + 5) * 2.0 / 50)
    assert "6 of 12: 6 ok, 0 errors, 0 rejected" in render_status(status) and "left" in render_status(status)

    stopped = load_status(Path("runs/test"))
    assert (stopped["state"], stopped["phase"], stopped["locked"], stopped["eta_s"]) == (
        "stopped",
        None,
        False,
        None,
    )
    assert f"kvbatch resume {stopped['run']}" in render_status(stopped)
    run(path, make_llm=lambda *_: Backwards())
    done = json.loads(CliRunner().invoke(cli, ["status", "runs/test", "--json"]).stdout)
    assert (done["state"], done["done_rows"], done["progress_ratio"]) == ("complete", 12, 1.0)
    assert done["rows"] == {"ok": 11, "error": 0, "rejected": 1} and done["run_id"] == stopped["run_id"]
    with pytest.raises(LimitExceeded):
        run(path, "limits.max_error_ratio=0", new_run=True, make_llm=lambda *_: Backwards())
    assert load_status(Path("runs/test"))["state"] == "over_limits"
    assert CliRunner().invoke(cli, ["status", "nowhere"]).exit_code == 66
