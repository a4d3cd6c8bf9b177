"""A shard whose file was renamed into place and whose commit record was never written is counted by no command."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbatch.cli import cli
from kvbatch.run_dir.commit import commit_shard, finished_rows
from kvbatch.run_dir.find_runs import open_run
from tests.kvbatch.fakes import Backwards
from tests.kvbatch.helpers import run

RUN = Path("runs/test")


def invoke(*arguments):
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert done.exit_code == 0, (arguments, done.output)
    return done.stdout


@pytest.mark.parametrize("text", ["fox", ""], ids=["answered", "rejected"])
def test_a_shard_without_its_commit_record(job_file, monkeypatch, text):
    records = [{"id": "a", "text": "fox"}, {"id": "b", "text": "fox"}, {"id": "c", "text": text}]
    path = job_file(records, output={"shard_rows": 2})
    unbroken = run(path, make_llm=lambda *_: Backwards(num_held=1)).run

    def killed(run_, number, facts):
        if number == 1:
            raise KeyboardInterrupt
        commit_shard(run_, number, facts)

    monkeypatch.setattr("kvbatch.run.shard_loop.commit_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        run(path, new_run=True, make_llm=lambda *_: Backwards(num_held=1))
    found = open_run(RUN)
    assert found.shard_file(1).exists() and not found.commit_file(1).exists()

    exported = [json.loads(line)["id"] for line in invoke("export", RUN).splitlines()]
    assert exported == ["a", "b"]
    compared = json.loads(invoke("diff", unbroken.path, found.path, "--json"))
    assert (compared["rows_both"], compared["rows_only_a"]) == (2, 1)
    summary = json.loads(invoke("report", RUN, "--json"))
    assert (summary["rows"], summary["ok"], summary["rejected"], summary["problems"]) == (2, 2, 0, [])
    invoke("report", RUN)
    figures = json.loads(found.page.read_text().partition('id="figures">')[2].partition("</script>")[0])
    assert figures["summary"]["rows"] == 2 and figures["errors"] == []
    assert len(figures["slowest"]) == 2
    status = json.loads(invoke("status", RUN, "--json"))
    # the row that ran is whole in the write-ahead file; one that did not run is not done
    assert status["done_rows"] == len(list(finished_rows(found))) == (3 if text else 2)
    assert status["problems"] == [] and json.loads(invoke("verify", RUN, "--json"))["rows"] == 2
