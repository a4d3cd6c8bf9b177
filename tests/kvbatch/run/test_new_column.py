"""An output column is added in two places: its name and type, and its value where a row ends."""

import polars as pl
import pyarrow as pa
import pytest

from kvbatch.run import shard
from kvbatch.run_dir.output_schema import OUTPUT_FIELDS
from kvbatch.run_dir.read_output import iter_tables
from tests.kvbatch.fakes import Backwards
from tests.kvbatch.helpers import RECORDS, output, run


@pytest.fixture
def answer_chars(monkeypatch):
    """Add the column `kvb_answer_chars`."""
    columns_of = shard._result_columns
    monkeypatch.setattr(
        shard, "_result_columns", lambda result: columns_of(result) | {"kvb_answer_chars": len(result.text)}
    )
    OUTPUT_FIELDS.append(pa.field("kvb_answer_chars", pa.int32()))
    yield
    OUTPUT_FIELDS.pop()


@pytest.mark.usefixtures("answer_chars")
def test_a_column_is_written_read_and_reused(job_file):
    path = job_file([*RECORDS[:3], {"id": "empty", "text": ""}], input={"incremental": True})
    first = run(path, make_llm=lambda *_: Backwards()).run
    rows = output(first)
    expected = [None if text is None else len(text) for text in rows["output"]]
    assert rows["kvb_answer_chars"].to_list() == expected and expected[0] > 0 and expected[3] is None
    exported = pl.concat([pl.from_arrow(table) for table in iter_tables(first)])
    assert exported["kvb_answer_chars"].to_list() == expected

    job_file([*RECORDS[:4], {"id": "empty", "text": ""}], input={"incremental": True})
    again = output(run(path, make_llm=lambda *_: Backwards()).run)
    assert again["kvb_answer_chars"].to_list()[:3] == expected[:3], "reused with the rows"
