"""Rows reused from an earlier run: incremental jobs, `kvbatch retry`, and what both must refuse."""

import json
import os
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from kvbatch.cli import cli
from kvbatch.errors import JobChanged
from kvbatch.report.summary import load_summary
from kvbatch.run_dir.find_runs import open_run
from kvbatch.run_dir.reuse import Reuse
from tests.kvbatch.fakes import Backwards
from tests.kvbatch.helpers import output, run

RECORDS = [{"id": f"r{n}", "text": f"{n} fox " * (1 + n), "title": "t"} for n in range(9)]
INCREMENTAL = {"incremental": True, "passthrough": ["title"]}


class Fake(Backwards):
    """An engine that says which rows it was given and puts its name before each answer."""

    def __init__(self, fail=(), name=""):
        super().__init__(fail)
        self.name = name

    def _answers(self, held):
        for result in super()._answers(held):
            yield replace(result, text=f"{self.name} {result.text}")

    @property
    def done(self):
        return sorted(request.request_id.row for request in self.requests)


def forbidden(model, config):
    raise AssertionError("weights were loaded")


def rewrite(records):
    Path("in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    os.utime("in.jsonl", ns=(len(records), 1))


def test_only_new_and_changed_rows_are_done(job_file):
    path = job_file([*RECORDS, {"id": "bad", "text": ""}], input=INCREMENTAL, output={"shard_rows": 4})
    first = run(path, make_llm=lambda *_: Fake(name="first")).run
    records = [RECORDS[8], {"id": "new", "text": "a new one"}, *RECORDS[:6], {"id": "bad", "text": ""}]
    records[3] = records[3] | {"text": "changed"}  # r1
    records[4] = records[4] | {"title": "changed"}  # r2: shown in the output, no part of the prompt
    rewrite(records)
    engine = Fake(name="second")
    found = run(path, make_llm=lambda *_: engine).run
    assert engine.done == [1, 3]
    rows, before = output(found), output(first)
    assert rows["id"].to_list() == ["r8", "new", "r0", "r1", "r2", "r3", "r4", "r5", "bad"], (
        "r6 and r7 are gone"
    )
    assert rows["title"][4] == "changed", "what is passed through is that of today"
    assert [text.split()[0] for text in rows["output"][:8]] == [
        *["first", "second", "first", "second"],
        *["first"] * 4,
    ]
    own = [i in (1, 3, 8) for i in range(9)]
    assert rows["kvb_run_id"].to_list() == [found.run_id if each else first.run_id for each in own]
    assert rows["kvb_shard"].to_list() == [0] * 4 + [1] * 4 + [2]
    same = ["id", "output", "kvb_finish_reason", "kvb_prompt_tokens", "kvb_seed", "kvb_kv_kept_bytes"]
    reused = rows.filter(pl.col("kvb_run_id") == first.run_id).select(same)
    assert reused.sort("id").equals(before.join(reused, on="id", how="semi").select(same).sort("id"))
    summary = load_summary(found.path)
    assert (summary["rows"], summary["ok"], summary["rejected"], summary["carried"]) == (9, 8, 1, 6)
    assert summary["completion_tokens"] == 2, "only what this run computed"

    third = run(path, make_llm=forbidden)
    assert not third.is_new and third.run.path == found.path
    Path("in.jsonl").write_text(
        "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    )
    assert run(path, make_llm=forbidden).run.path == found.path
    records[4]["title"] = "again"
    rewrite(records)
    last = run(path, make_llm=forbidden).run
    assert output(last)["title"][4] == "again" and load_summary(last.path)["carried"] == 8
    assert set(output(last)["kvb_run_id"].unique()) == {first.run_id, found.run_id, last.run_id}


def test_a_new_file_beside_those_of_yesterday(job_file):
    path = job_file([], input=INCREMENTAL | {"path": "day-*.jsonl", "passthrough": []})
    Path("day-1.jsonl").write_text('{"text": "no id"}\n{"text": "no id"}\n')
    run(path, make_llm=lambda *_: Fake())
    Path("day-2.jsonl").write_text('{"text": "no id"}\n')
    engine = Fake()
    assert run(path, make_llm=lambda *_: engine).run and engine.done == [2]
    # the prompt decides what may be reused, the paths do not
    engine = Fake()
    run(path, "input.path=day-2.jsonl", make_llm=lambda *_: engine)
    assert engine.done == []
    run(path, "prompt.template='{text}'", make_llm=lambda *_: engine)
    assert engine.done == [0, 1, 2]


def test_a_column_of_the_prompt_belongs_to_the_content(job_file):
    path = job_file(RECORDS[:2], input=INCREMENTAL, prompt={"template": "{title}: {text}"})
    run(path, make_llm=lambda *_: Fake())
    rewrite([RECORDS[0] | {"title": "new"}, RECORDS[1]])
    engine = Fake()
    run(path, make_llm=lambda *_: engine)
    assert engine.done == [0]


def test_a_stopped_run_is_built_upon_even_if_the_input_grew_meanwhile(job_file):
    class Stopped(Fake):
        def generate(self, requests):
            for number, result in enumerate(super().generate(requests)):
                if number == 6:
                    raise KeyboardInterrupt
                yield result

    path = job_file(RECORDS, input=INCREMENTAL, output={"shard_rows": 4})
    run(path, "input.limit=2", make_llm=lambda *_: Fake())
    with pytest.raises(KeyboardInterrupt):
        run(path, make_llm=lambda *_: Stopped())
    rewrite([{"id": "new", "text": "x"}, *RECORDS])
    engine = Fake()
    found = run(path, make_llm=lambda *_: engine).run
    assert len(engine.done) == 2 and engine.done[0] == 0, (
        "six of seven rows were finished, not all in a shard"
    )
    rows = output(found)
    assert rows["id"].to_list() == ["new", *(record["id"] for record in RECORDS)]
    assert rows["kvb_run_id"].n_unique() == 3 and rows["kvb_status"].unique().to_list() == ["ok"]
    # what changes the answers changes everything
    engine = Fake()
    run(path, "generation.seed=1", make_llm=lambda *_: engine)
    assert len(engine.done) == 10


def test_rows_without_an_answer_are_not_reused(job_file):
    path = job_file(RECORDS, input=INCREMENTAL, limits={"row_retries": 0})
    first = run(path, make_llm=lambda *_: Fake(fail=(3,))).run
    assert run(path, make_llm=forbidden).run.path == first.path, "nothing is new"
    rewrite(RECORDS[:8])
    engine = Fake()
    found = run(path, make_llm=lambda *_: engine).run
    assert engine.done == [3] and load_summary(found.path)["carried"] == 7
    (first.shards / "part-00000.parquet").write_bytes(b"torn")
    (found.path / "plan.parquet").unlink()
    (found.path / "_SUCCESS").unlink()
    rewrite(RECORDS[:6])
    engine = Fake()
    run(path, make_llm=lambda *_: engine)
    assert len(engine.done) == 6, "a torn shard holds nothing to reuse"


def test_retry_does_the_failed_rows_again_and_reuses_the_rest(job_file, monkeypatch):
    path = job_file(
        [*RECORDS, "no json", {"id": "long", "text": "x y " * 900}],
        limits={"row_retries": 0},
        input={"passthrough": "all"},
    )
    first = run(path, make_llm=lambda *_: Fake(fail=(2, 5), name="first")).run
    engine = Fake(name="again")
    monkeypatch.setattr("kvbatch.run.entry.load_llm", lambda *_: engine)
    done = CliRunner().invoke(cli, ["retry", "runs/test", "--status", "error", "--max-new-tokens", "3"])
    assert done.exit_code == 0, done.output
    assert engine.done == [2, 5] and engine.requests[0].sampling.max_new_tokens == 3
    found = open_run(Path("runs/test"))
    rows = output(found)
    assert rows["id"].to_list() == output(first)["id"].to_list()
    assert [text.split()[0] for text in rows["output"][:9]] == [
        "again" if n in (2, 5) else "first" for n in range(9)
    ]
    assert rows["kvb_error_code"].to_list()[9:] == ["bad_json", "too_long"]
    assert rows["kvb_config_hash"].n_unique() == 2, "each row says by which configuration it was made"
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["run_id"], told["carried"], told["ok"]) == (found.run_id, 7, 9)
    engine = Fake()
    nothing = CliRunner().invoke(cli, ["retry", "runs/test", "--status", "length"])
    assert nothing.exit_code == 0 and nothing.stdout.startswith("Nothing to do") and not engine.done
    assert CliRunner().invoke(cli, ["retry", "runs/test", "--status", "length,nope"]).exit_code == 2


def test_retry_refuses_another_input_or_model(job_file, tiny_model):
    path = job_file(RECORDS)
    first = run(path, make_llm=lambda *_: Fake()).run

    def again():
        reuse = Reuse((str(first.path),), ("stop",), same_input=True)
        return run(path, reuse=reuse, make_llm=lambda *_: Fake())

    assert len(output(again().run)) == 9
    for records in (
        RECORDS[:8],
        [*RECORDS, {"id": "new", "text": "x"}],
        [RECORDS[0] | {"text": "x"}, *RECORDS[1:]],
    ):
        rewrite(records)
        with pytest.raises(JobChanged, match="input changed"):
            again()
    manifest = first.read_manifest()
    first.write_manifest(replace(manifest, semantic=manifest.semantic | {"model content": "another"}))
    with pytest.raises(JobChanged, match="model changed"):
        again()
