"""A run that is killed, stopped or out of disk goes on where it was: no row lost, doubled or changed."""

import errno
import io
import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runner import Runner
from kvbatch.cli import cli
from kvbatch.errors import Interrupted, JobChanged, OutputError, Skipped
from kvbatch.job_file.load import load_job
from kvbatch.run.entry import Caller, run_job
from kvbatch.run_dir.commit import committed_files, finished_rows
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.find_runs import open_run
from kvbatch.run_dir.lock import Holder, IfLocked, job_lock, lock_holder
from kvbatch.run_dir.output_schema import OUTPUT_FIELDS
from kvbatch.run_dir.wal import WriteAheadFile, read_rows
from kvbatch.signals import Stopper, parse_duration, seconds_until, stop_on_signals
from tests.kvbatch.crash import at_step, run_and_kill
from tests.kvbatch.fakes import Backwards
from tests.kvbatch.helpers import RECORDS, stop_after

OF_THE_RUN = ("kvb_run_id", "kvb_prefill_s", "kvb_decode_s", "kvb_wait_s")


def run(path, *overrides, **kwargs) -> RunDirectory:
    return run_job(load_job(path, overrides), stream=io.StringIO(), **kwargs).run


def output(found: RunDirectory) -> pa.Table:
    """Return a run's output; shards that do not count are an error."""
    files = sorted(found.shards.glob("*"))
    assert files == committed_files(found)
    return pa.concat_tables([pq.read_table(file) for file in files])


def as_bytes(table: pa.Table) -> bytes:
    """Return a table's content but what belongs to the run."""
    sink = pa.BufferOutputStream()
    table = table.drop_columns(OF_THE_RUN).combine_chunks()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def kill_until_done(job_file, tmp_path, num_rows: int, num_kills: int, steps: range) -> None:
    records = [{"id": n, "text": f"{n} fox " * (1 + n * 7 % 23)} for n in range(num_rows)]
    sections = {"output": {"shard_rows": 4}, "engine": {"deterministic": True, "max_sequences": 3}}
    path = job_file(records, **sections, generation={"temperature": 0.8})
    expected = output(run(path, "output.dir=whole"))
    assert expected["id"].to_pylist() == list(range(num_rows))
    chance, kills = random.Random(num_rows), 0
    while code := run_and_kill(tmp_path, path, chance.choice(steps)):
        assert code == -signal.SIGKILL
        kills += 1
        for manifest in Path("runs/test").glob("2*/manifest.json"):
            found = RunDirectory(manifest.parent)
            rows = [planned.index for planned, _ in finished_rows(found)]
            assert len(rows) == len(set(rows)), "no row is finished twice"
            for file in committed_files(found):
                pq.read_table(file)
    assert kills >= num_kills
    found = open_run(Path("runs/test"))
    assert found.is_success and as_bytes(output(found)) == as_bytes(expected)
    assert not list((found.path / "wal").iterdir()) and not list(found.path.rglob("*.tmp"))


def test_killed_at_any_step_it_goes_on_and_writes_the_same_bytes(job_file, tmp_path):
    kill_until_done(job_file, tmp_path, 10, 3, range(12, 30))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_fifty_kills(job_file, tmp_path):
    kill_until_done(job_file, tmp_path, 160, 50, range(1, 24))


def test_a_row_of_several_answers_is_read_back(tmp_path):
    row = {"kvb_status": "ok", "kvb_answers": [{"question": "Who?", "output": "She."}]}
    file = WriteAheadFile(tmp_path / "rows.arrow", OUTPUT_FIELDS)
    for place in range(3):
        file.append(place, row)
    file.close()
    rows = read_rows(tmp_path / "rows.arrow", OUTPUT_FIELDS, cut=True)
    assert list(rows) == [0, 1, 2] and rows[2]["kvb_answers"][0]["output"] == "She."


def test_only_rows_in_flight_are_run_again(job_file):
    path = job_file(RECORDS, output={"shard_rows": 4})
    found = stop_after(path, 7)
    finished = {planned.row_id for planned, _ in finished_rows(found)}
    assert len(finished) == 7
    engine = Backwards()
    assert run(path, make_llm=lambda *_: engine).path == found.path
    again = {RECORDS[request.request_id.row]["id"] for request in engine.requests}
    assert again == {record["id"] for record in RECORDS} - finished
    rows = output(found)
    assert rows["id"].to_pylist() == [record["id"] for record in RECORDS]
    assert rows["output"].to_pylist() == [f"answer {n}" for n in range(11)]
    assert found.read_summary()["continued_rows"] == 7 and found.read_summary()["rows"] == 11


def test_resume_by_name_with_other_memory_and_other_shards(job_file):
    path = job_file(RECORDS, output={"shard_rows": 4})
    found = stop_after(path, 5)
    other = run(
        path, "generation.seed=3", "output.shard_rows=3", new_run=True, make_llm=lambda *_: Backwards()
    )
    job = load_job(found.path / "job.resolved.yaml", ["output.shard_rows=5", "engine.memory_budget=32MiB"])
    assert run_job(job, resume=found, stream=io.StringIO(), make_llm=lambda *_: Backwards()).is_new
    assert output(found)["id"].to_pylist() == [record["id"] for record in RECORDS]
    assert open_run(Path("runs/test")).path == other.path, "latest is the newest"
    result = CliRunner().invoke(cli, ["resume", str(found.path)])
    assert result.exit_code == 0 and "is complete" in result.stdout


def test_damaged_shards_are_made_again(job_file):
    path = job_file(RECORDS, output={"shard_rows": 2})
    found = run(path, make_llm=lambda *_: Backwards())
    (found.path / "_SUCCESS").unlink()
    whole = found.shard_file(1).read_bytes()
    found.shard_file(1).write_bytes(whole[:-20])
    found.shard_file(3).write_bytes(b"\0" * len(whole))
    found.commit_file(4).unlink()
    (found.shards / ".part-00002.parquet.77.tmp").write_bytes(b"half")
    assert len(committed_files(found)) == 3
    engine = Backwards()
    assert run(path, make_llm=lambda *_: engine).path == found.path
    assert sorted(request.request_id.row for request in engine.requests) == [2, 3, 6, 7, 8, 9]
    assert output(found)["id"].to_pylist() == [record["id"] for record in RECORDS]


def test_another_job_is_refused_by_name(job_file):
    path = job_file(RECORDS, output={"shard_rows": 4})
    found = stop_after(path, 6)
    with pytest.raises(JobChanged) as caught:
        run(path, "prompt.template='Translate. {text}'", "generation.seed=1", "cache.preset=logs")
    message = str(caught.value)
    assert caught.value.exit_code == 78 and "--new-run" in message
    assert (
        'prompt.template: "Summarise the document below.' in message and '"Translate. {text}" now' in message
    )
    assert "generation.seed: 0 before, 1 now" in message
    assert 'cache.compress_method: "none" before, "sparse+quant" now' in message
    assert "engine" not in message
    Path("in.jsonl").touch()  # another time, the same content
    text = Path("in.jsonl").read_text()
    Path("in.jsonl").write_text(text.replace("3 fox", "3 cat", 1))
    with pytest.raises(JobChanged, match=r"input file in\.jsonl: .* before, .* now"):
        run(path)
    Path("in.jsonl").write_text(text)
    assert run(path, "engine.max_sequences=2", make_llm=lambda *_: Backwards()).path == found.path
    assert found.is_success


def test_to_be_deterministic_the_engine_must_be_told_the_same(job_file):
    path = job_file(RECORDS, engine={"deterministic": True})
    stop_after(path, 6)
    with pytest.raises(JobChanged, match="engine.step_tokens: 1024 before, 512 now"):
        run(path, "engine.step_tokens=512")


def test_a_run_without_a_finished_row_is_no_reason_to_refuse(job_file):
    path = job_file(RECORDS)
    found = stop_after(path, 0)
    other = run(path, "generation.seed=1", make_llm=lambda *_: Backwards())
    assert other.path != found.path and other.is_success


def test_a_full_disk_at_any_step_loses_no_finished_row(job_file, monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    path = job_file(RECORDS[:4], output={"shard_rows": 2})
    job, step, num_steps = load_job(path), 1, 1
    while step <= num_steps:
        engine = Backwards(num_held=1)
        with monkeypatch.context() as patch:
            count = at_step(patch.setattr, step, full)
            try:
                run(path, f"output.dir=runs/{step}", make_llm=lambda *_: engine)  # noqa: B023
                num_steps = count[0]
            except OutputError as error:
                assert error.exit_code == 73 and "No space left" in str(error)
                num_steps = step + 3
        home = Path(f"runs/{step}")
        if (home / "latest").exists():
            finished = list(finished_rows(open_run(home)))
            assert len(finished) >= engine.num_answers - 1, "what ended before is readable"
        found = run(path, f"output.dir=runs/{step}", make_llm=lambda *_: Backwards())
        assert output(found)["id"].to_pylist() == ["r0", "r1", "r2", "r3"], step
        step += 3  # to save time: with 1 it is as true
    assert step > 30 and job.output_dir == "runs/test"


ROW = {"output": "a ö", "kvb_status": "ok", "kvb_prefill_s": 0.1, "kvb_seed": 1 << 62}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_torn_write_ahead_file_gives_whole_rows_alone(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("wal") / "wal" / "part.arrow"
    ends, rows = [], data.draw(st.lists(st.text(max_size=20), min_size=1, max_size=4))

    def append(texts):
        file = WriteAheadFile(path, OUTPUT_FIELDS)
        for place, text in texts:
            file.append(place, ROW | {"output": text})
            ends.append(path.stat().st_size)
        file.close()

    append(enumerate(rows))
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    zeros = data.draw(st.integers(0, 300))
    path.write_bytes(whole[:cut] + bytes(min(zeros, len(whole) - cut)))
    found = read_rows(path, OUTPUT_FIELDS, cut=True)
    count = sum(end <= cut for end in ends)
    assert len(found) in (count, count + 1), "zeros may be what was there"
    assert {place: row["output"] for place, row in found.items()} == dict(list(enumerate(rows))[: len(found)])
    assert all(row["kvb_seed"] == 1 << 62 and row["kvb_prefill_s"] == 0.1 for row in found.values())
    append([(9, "more")])
    assert list(read_rows(path, OUTPUT_FIELDS)) == [*range(len(found)), 9]


def _hold(home: str, is_held) -> None:
    with job_lock(Path(home), IfLocked()):
        is_held.set()
        time.sleep(60)


def test_one_process_a_job(job_file):
    path = job_file(RECORDS[:1])
    context = multiprocessing.get_context("forkserver")
    is_held = context.Event()
    holder = context.Process(target=_hold, args=(str(Path("runs/test").absolute()), is_held))
    holder.start()
    assert is_held.wait(60) and lock_holder(Path("runs/test")) == Holder(holder.pid, "run")
    with pytest.raises(Interrupted, match=f"process {holder.pid}"):
        run(path)
    result = CliRunner().invoke(cli, ["run", str(path)])
    assert result.exit_code == 75 and str(holder.pid) in result.stderr
    result = CliRunner().invoke(cli, ["run", str(path), "--if-locked", "skip"])
    assert result.exit_code == 0 and "nothing was done" in result.stderr
    with pytest.raises(Skipped):
        run(path, caller=Caller(IfLocked.parse("skip")))
    threading.Timer(0.5, lambda: os.kill(holder.pid, signal.SIGKILL)).start()
    assert run(path, caller=Caller(IfLocked.parse("wait:60")), make_llm=lambda *_: Backwards()).is_success
    assert lock_holder(Path("runs/test")) is None
    for wrong in ("never", "wait:", "wait:-1"):
        assert CliRunner().invoke(cli, ["run", str(path), "--if-locked", wrong]).exit_code == 2


def test_the_second_signal_ends_the_process(monkeypatch):
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    stopper = Stopper()
    with pytest.raises(KeyboardInterrupt), stopper.shield():
        stopper.handle(signal.SIGTERM, None)
        assert not exits
        stopper.handle(signal.SIGTERM, None)
        assert exits == [75]


def test_the_time_is_up():
    with (
        pytest.raises(Interrupted, match="stopped by --max-runtime"),
        stop_on_signals(stop_at=(0.05, "--max-runtime")),
    ):
        time.sleep(10)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert seconds_until("06:00", datetime(2026, 11, 29, 5, 59)) == 60
    assert seconds_until("06:00", datetime(2026, 11, 29, 6, 0)) == 24 * 3600
    assert (parse_duration("5h"), parse_duration("1h30m"), parse_duration("90s")) == (18000, 5400, 90)
    for function, text in (
        (seconds_until, "25:00"),
        (seconds_until, "soon"),
        (parse_duration, "5"),
        (parse_duration, "5h3"),
    ):
        with pytest.raises(ValueError, match=text):
            function(text)


class Cramped(Backwards):
    """An engine with too little memory for some rows, unless as little runs at once as they need.

    Args:
        needs: by row: 1 where a smaller step is enough, 2 where two rows are, 3 where one alone is.
    """

    def __init__(self, needs: dict[int, int]):
        super().__init__(num_held=4)
        self.needs, self.level = needs, 0

    @contextmanager
    def limited(self, step_ratio: float, max_sequences: int):
        self.num_held, self.level = max_sequences, {4: 1, 2: 2, 1: 3}[max_sequences]
        yield
        self.num_held, self.level = 4, 0

    def _answers(self, held):
        if any(self.needs.get(request.request_id.row, 0) > self.level for request in held):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return super()._answers(held)


def test_rows_without_memory_are_redone_with_less_at_once(job_file):
    records = [{"id": f"r{n}", "text": "fox"} for n in range(11)]  # of one length: run in their order
    found = run(job_file(records), make_llm=lambda *_: Cramped({2: 1, 5: 2, 6: 9}))
    rows = output(found).to_pylist()
    assert [row["id"] for row in rows] == [record["id"] for record in records]
    chunk, in_bin, alone = "smaller_chunk", "smaller_chunk,smaller_bin", "smaller_chunk,smaller_bin,row_alone"
    steps = [chunk] * 4 + [in_bin, in_bin, f"{alone},dead_letter", alone] + [None] * 3
    assert [row["kvb_oom_steps"] for row in rows] == steps
    assert [row["kvb_attempts"] for row in rows] == [2] * 4 + [3, 3, 4, 4] + [1] * 3
    assert [row["output"] for row in rows] == [None if n == 6 else f"answer {n}" for n in range(11)]
    assert (rows[6]["kvb_status"], rows[6]["kvb_error_code"]) == ("error", "out_of_memory")
    assert rows[6]["kvb_error_message"].endswith("ran alone: CUDA out of memory.")
    assert pq.read_table(found.deadletter_file(0))["id"].to_pylist() == ["r6"]


def test_the_engine_goes_on_after_it_ran_out_of_memory(job_file, monkeypatch):
    """The real one, whose step fails at its first try of every row of some length."""
    path = job_file(RECORDS, engine={"deterministic": True})
    expected = output(run(path))
    execute, sizes = Runner.execute, []

    def cramped(self, plan):
        sizes.append(plan.num_tokens)
        if plan.num_tokens > 60:
            torch.empty(1 << 46)
        return execute(self, plan)

    monkeypatch.setattr(Runner, "execute", cramped)
    found = run(path, "output.dir=cramped", "engine.step_tokens=200")
    steps = output(found)["kvb_oom_steps"].to_pylist()
    assert "smaller_chunk" in steps and {"smaller_chunk", None} >= set(steps) and max(sizes) > 60
    assert output(found)["output"].to_pylist() == expected["output"].to_pylist()
