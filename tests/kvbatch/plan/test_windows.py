"""Windows of rows that end where their texts come to a number of bytes: the plan's shards, which everything follows."""

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvbatch.corpus.document import Document
from kvbatch.run.shard import OpenShard
from kvbatch.run_dir.manifest import RunDirectory
from kvbatch.run_dir.plan_file import bounded_windows, shard_starts
from tests.kvbatch.fakes import Backwards
from tests.kvbatch.run.test_run import output, run


def sizes(run: RunDirectory):
    return [pq.read_metadata(file).num_rows for file in sorted(run.shards.glob("*.parquet"))]


@pytest.fixture
def small_windows(monkeypatch):
    """Windows of about 1,000 bytes."""
    monkeypatch.setattr("kvbatch.run_dir.plan_file.WINDOW_BYTES", 1000)


RECORDS = [{"id": f"r{n}", "text": f"{n} " + "fox " * (300 if n in (2, 5) else 1)} for n in range(9)]


def test_a_window_ends_with_the_row_that_fills_it(small_windows):
    documents = [Document("f", n, n, "", "ok", None, None, num_bytes=n) for n in (10, 990, 1, 5000, 2, 3, 4)]
    found = [[document.num_bytes for document in window] for window in bounded_windows(documents, 2)]
    assert found == [[10, 990], [1, 5000], [2, 3], [4]]
    assert [len(window) for window in bounded_windows(iter(documents), 100)] == [2, 2, 3]


def test_shards_are_those_windows_in_a_run_that_is_stopped_and_for_rows_reused(
    job_file, small_windows, monkeypatch
):
    path = job_file(RECORDS, input={"incremental": True}, generation={"max_new_tokens": 2},
                    long_document={"on_too_long": "truncate"})  # fmt: skip

    class Dying(Backwards):
        def _answers(self, held):
            for result in super()._answers(held):
                if self.num_answers == 6:
                    raise KeyboardInterrupt
                yield result

    with pytest.raises(KeyboardInterrupt):
        run(path, make_llm=lambda *_: Dying())
    monkeypatch.setattr(
        "kvbatch.run_dir.plan_file.WINDOW_BYTES", 10**9
    )  # of another release: the plan stands
    first = run(path, make_llm=lambda *_: Backwards()).run
    assert sizes(first) == [3, 3, 3] and shard_starts(first.path) == [0, 3, 6]
    made = output(first)
    assert made["id"].to_list() == [record["id"] for record in RECORDS]
    assert made["output"].to_list() == [f"answer {n}" for n in range(9)]
    assert made["kvb_shard"].to_list() == [0, 0, 0, 1, 1, 1, 2, 2, 2]

    records = [{"id": "new", "text": "fox"}, *RECORDS[::-1]]
    Path("in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    os.utime("in.jsonl", ns=(1, 1))
    second = run(path, make_llm=lambda *_: Backwards()).run
    assert sizes(second) == [10]
    assert output(second)["output"].to_list() == ["answer 0", *(f"answer {n}" for n in range(8, -1, -1))]


def test_texts_of_rows_that_have_their_answer_are_let_go(job_file, monkeypatch):
    path = job_file(RECORDS, limits={"row_retries": 0}, long_document={"on_too_long": "truncate"})
    held, write = [], OpenShard.write

    def look(shard, *arguments):
        held.append([document.text for document in shard.documents])
        return write(shard, *arguments)

    monkeypatch.setattr(OpenShard, "write", look)
    found = run(path, make_llm=lambda *_: Backwards(fail=(1,))).run
    assert held == [[None, RECORDS[1]["text"], *[None] * 7]]
    assert pq.read_table(found.path / "deadletter")["kvb_input_text"].to_pylist() == [RECORDS[1]["text"]]
