"""Bad rows: they keep their place, are tried again, counted against limits, and copied with their input."""

import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbatch.errors import LimitExceeded
from kvbatch.plan.unique_ids import UniqueIds
from kvbatch.report.summary import load_summary
from kvbatch.report.summary_text import render
from kvbatch.run_dir.find_runs import open_run
from tests.kvbatch.fakes import Backwards
from tests.kvbatch.helpers import RECORDS, output, run


def letters(run_dir):
    return pl.concat([pl.read_parquet(path) for path in sorted((run_dir.path / "deadletter").glob("*"))])


class Flaky(Backwards):
    """An engine on which some rows fail a number of times."""

    def __init__(self, failures):
        super().__init__()
        self.failures = dict(failures)

    @property
    def fail(self):
        return [row for row, left in self.failures.items() if left > 0]

    @fail.setter
    def fail(self, rows):
        pass

    def _answers(self, held):
        for result in super()._answers(held):
            row = result.request_id.row
            self.failures[row] = self.failures.get(row, 0) - 1
            yield result


def test_a_failed_row_is_tried_again(job_file):
    path = job_file(RECORDS, limits={"row_retries": 2}, output={"shard_rows": 4})
    engine = Flaky({0: 1, 3: 2, 10: 3})
    found = run(path, make_llm=lambda *_: engine).run
    rows = output(found)
    assert rows["id"].to_list() == [record["id"] for record in RECORDS]
    assert rows["kvb_status"].to_list() == ["ok"] * 10 + ["error"]
    assert rows["kvb_attempts"].to_list() == [2, 1, 1, 3, *[1] * 6, 3]
    assert [request.request_id.row for request in engine.requests].index(4) > 5, (
        "not only when all others are done"
    )
    log = [json.loads(line) for line in found.log.read_text().splitlines()]
    assert [line["row_id"] for line in log if line["event"] == "row retried"].count("r3") == 2
    assert "fox" not in found.log.read_text()


def test_a_row_that_fails_last_and_again_is_not_lost(job_file):
    engine = Backwards(fail={1}, num_held=1)
    found = run(job_file(RECORDS[:3], limits={"row_retries": 2}), make_llm=lambda *_: engine).run
    assert output(found)["kvb_status"].to_list() == ["ok", "error", "ok"]
    assert output(found)["kvb_attempts"].to_list() == [1, 3, 1]


def test_original_input_of_failed_rows(job_file):
    lines = [
        '{"id": "cut',
        '{"id": 1, "text": ["no", "string"], "more": 1}',
        '{"id": 2, "text": "fox"}',
        '{"id": 2, "text": "again"}',
        '{"id": "2", "text": "as text"}',
        '{"text": "no id"}',
    ]
    path = job_file(lines)
    Path("in.jsonl").write_bytes(Path("in.jsonl").read_bytes() + b'{"id": 3, "text": "\xff"}\n')
    found = run(path, make_llm=lambda *_: Backwards()).run
    rows = output(found)
    assert rows["kvb_status"].to_list() == ["rejected"] * 2 + ["ok"] + ["rejected"] * 2 + ["ok", "rejected"]
    dead = letters(found)
    raw = [lines[0].encode(), lines[1].encode(), None, None, b'{"id": 3, "text": "\xff"}']
    assert dead["kvb_input_raw"].to_list() == raw
    assert dead["kvb_input_text"].to_list() == [None, None, "again", "as text", None]
    assert dead["kvb_input_row"].to_list() == [1, 2, 4, 5, 7]
    assert dead["kvb_error_code"].to_list() == ["bad_json", "text_type", *["duplicate_id"] * 2, "bad_utf8"]
    assert "in.jsonl:4: an earlier row has the id '2'" in dead["kvb_error_message"][2]
    texts = pa.array([b"fox", b"\xff\xfe", None], pa.binary())
    pq.write_table(pa.table({"id": [7, 8, 9], "text": texts}), "in.parquet")
    dead = letters(run(path, "input.path=in.parquet", make_llm=lambda *_: Backwards()).run)
    assert dead["kvb_input_raw"].to_list() == [b"\xff\xfe", None] and dead["id"].to_list() == [8, 9]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_error_ratio": 0.49}, r"2 of 4 rows \(50.0%\) got no answer"),
        ({"max_truncated_ratio": 0.1}, r"1 of 4 rows \(25.0%\) were cut to fit"),
        ({"max_error_ratio": 0.5, "max_truncated_ratio": 0.25}, None),
    ],
)
def test_limits(job_file, limits, message):
    records = [{"id": n, "text": text} for n, text in enumerate(["fox", "", "x y " * 900, None])]
    path = job_file(records, limits=limits, long_document={"on_too_long": "truncate"})
    if message:
        with pytest.raises(LimitExceeded, match=message):
            run(path, make_llm=lambda *_: Backwards())
    else:
        run(path, make_llm=lambda *_: Backwards())
    found = open_run(Path("runs/test"))
    assert found.is_success != bool(message)
    assert len(output(found)) == 4, "what was done is committed"
    summary = load_summary(found.path)
    assert summary["status"] == ("over_limits" if message else "complete")
    assert ("over limits" in render(summary)) == bool(message)
    # the same job with other limits needs no forward pass, and no other run
    again = run(path, "limits.max_error_ratio=1", "limits.max_truncated_ratio=1", make_llm=None)
    assert again.run.path == found.path and again.run.is_success


def test_ids_that_came_before():
    ids = UniqueIds()
    windows = [[f"{n}" for n in range(start, start + 7)] for start in range(0, 700, 7)]
    assert not any(any(ids.repeated(window)) for window in windows)
    assert ids.repeated(["a", "699", "a", "0", "700"]) == [False, True, True, True, False]
    assert ids.repeated([]) == [] and ids.repeated(["700"]) == [True]
