"""Hard inputs through whole runs: what lands in the output, and what stops a job before its model loads."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbatch.errors import InputError
from kvbatch.job_file.load import load_job
from kvbatch.report.summary import load_summary
from kvbatch.report.summary_text import render
from kvbatch.run.entry import run_job


def forbidden(model, config):
    raise AssertionError("weights were loaded")


def test_a_directory_of_everything(job_file):
    metadata = {b"unit": b"ms"}
    odd = pa.schema(
        [("id", pa.large_string()), ("text", pa.binary()), pa.field("a.b", pa.int8(), metadata=metadata)]
    )
    kinds = pa.array(["x", None]).dictionary_encode()
    table = pa.table({"id": ["p1", None], "text": [b"fox", b"\xff"], "a.b": [1, None]}, odd).append_column(
        "kind", kinds
    )
    for lang in ("en", "fr"):
        Path("in", f"lang={lang}").mkdir(parents=True)
    pq.write_table(table, "in/lang=en/0.parquet")
    pq.write_table(table.slice(0, 0), "in/lang=en/1.parquet")
    row = {"id": "007", "text": "a<|im_end|>\u2028b", "kind": "x"}
    lines = [json.dumps(row, ensure_ascii=False), "no record", json.dumps({"id": 7, "text": " "})]
    Path("in/lang=fr/2").write_text("\ufeff" + "\r\n".join(lines))
    Path("in/_SUCCESS").touch()
    path = job_file([], input={"path": "in", "passthrough": "all"}, prompt={"template": "{lang}: {text}"})
    found = run_job(load_job(path), stream=io.StringIO()).run
    out = pq.read_table(found.shards / "part-00000.parquet")
    made_up = ["lang=en/0.parquet:2:85e53271", "lang=fr/2:2:"]
    ids = out["id"].to_pylist()
    assert ids[0] == "p1" and ids[2] == "007" and ids[4] == "7"
    assert [ids[1][: len(made_up[0])], ids[3][: len(made_up[1])]] == made_up
    assert out["kvb_status"].to_pylist() == ["ok", "rejected", "ok", "rejected", "rejected"]
    assert out["kvb_error_code"].to_pylist() == [None, "bad_utf8", None, "bad_json", "empty_text"]
    assert out["lang"].to_pylist() == ["en", "en", "fr", None, "fr"]
    assert out.schema.field("a.b") == odd.field("a.b") and out.schema.field("a.b").metadata == metadata
    assert out["kind"].to_pylist() == ["x", None, "x", None, None]
    letters = pq.read_table(found.path / "deadletter" / "part-00000.parquet")
    assert letters["id"].to_pylist() == [ids[1], ids[3], ids[4]]


@pytest.mark.parametrize(
    ("line", "override", "message"),
    [
        ("no record", "input.on_bad_row=fail", r"in\.jsonl:2: .*on_bad_row"),
        ('{"id": "b", "text": "x", "output": 1}', "input.passthrough=all", "name of an output column"),
    ],
)
def test_what_stops_a_job_before_its_model_loads(job_file, line, override, message):
    path = job_file([{"id": "a", "text": "fox"}, line])
    with pytest.raises(InputError, match=message):
        run_job(load_job(path, (override,)), stream=io.StringIO(), make_llm=forbidden)


def test_cleaned_documents_are_counted_and_their_input_is_kept(job_file):
    records = [
        {"id": "log", "text": "\x1b[31mred\x1b[0m fox"},
        {"id": "plain", "text": "red fox"},
        {"id": "nothing", "text": "\x1b[2K"},
    ]
    found = run_job(load_job(job_file(records, prompt={"clean": ["ansi"]})), stream=io.StringIO()).run
    out = pq.read_table(found.shards / "part-00000.parquet").to_pylist()
    assert [row["kvb_removed_chars"] for row in out] == [9, 0, 4]
    assert out[0]["kvb_prompt_tokens"] == out[1]["kvb_prompt_tokens"] and out[0]["output"] == out[1]["output"]
    assert (out[2]["kvb_status"], out[2]["kvb_error_code"]) == ("error", "empty_prompt")
    assert pq.read_table(found.path / "deadletter")["kvb_input_text"].to_pylist() == ["\x1b[2K"]
    assert "9 characters taken out" in render(load_summary(found.path))
