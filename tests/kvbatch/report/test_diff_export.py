"""Two runs side by side, and a run's rows in other formats."""

import csv
import io
import json
import shutil
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from kvbatch.atomic_file import write_table
from kvbatch.cli import cli
from kvbatch.corpus.openai_batch import parse_body
from kvbatch.job_file.load import load_job
from kvbatch.report.export import ExportOptions, export_rows
from kvbatch.run.entry import run_job
from kvbatch.run_dir.commit import commit_shard
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.text import escaped
from tests.kvbatch.fakes import Backwards

RECORDS = [{"id": f"r{n}", "text": f"{n} fox " * (3 + n), "n": n} for n in range(6)]


def invoke(*arguments):
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout_bytes.decode()


def write_like(run, name, rows):
    """Copy a run, with other rows."""
    other = run.path.parent / name
    shutil.copytree(run.path, other)
    file = other / "shards" / "part-00000.parquet"
    facts = write_table(pa.Table.from_pylist(rows, pq.read_schema(file)), file)
    commit_shard(RunDirectory(other), 0, facts)
    return other


def test_diff(job_file):
    run = run_job(load_job(job_file([*RECORDS, {"id": "bad", "text": ""}]))).run
    rows = pl.read_parquet(run.shards / "*.parquet").to_dicts()
    rows.append(dict(rows[0]))  # an id may stand twice
    changed = [dict(row) for row in rows[::-1] if row["id"] != "r5"] + [rows[0] | {"id": "new"}]
    for row in changed:
        row["kvb_kv_kept_bytes"] = row["kvb_kv_kept_bytes"] and row["kvb_kv_kept_bytes"] // 2
        if row["id"] == "r3":
            long = row["output"] + " same" * 100
            row["output"] = long + " new" * 100
        if row["id"] == "r4":
            row |= {"kvb_status": "error", "output": None}
    for row in rows:
        if row["id"] == "r3":
            row["output"] += " same" * 100 + " old" * 100
    quality = pl.DataFrame({"row_id": ["r1"], "nll_delta": [0.125]})
    first, other = write_like(run, "first", rows), write_like(run, "other", changed)
    quality.write_parquet(other / "stats" / "quality.parquet")

    found = json.loads(invoke("diff", first, other, "--json"))
    # r0 stands twice in both runs, and is joined in its order
    assert (found["rows_both"], found["rows_only_a"], found["rows_only_b"]) == (7, 1, 1)
    assert found["changed_row_ids"] == ["r3"] and found["other_status_row_ids"] == ["r4"]
    both = [row for row in rows if row["id"] in ("r0", "r1", "r2", "r3")]
    assert found["rows_answered_by_both"] == len(both) == 5
    assert found["a"]["kv_kept_bytes"] == sum(row["kvb_kv_kept_bytes"] for row in both)
    assert found["b"]["kv_kept_bytes"] == sum(row["kvb_kv_kept_bytes"] // 2 for row in both)
    assert found["a"]["quality"] == {} and found["b"]["quality"] == {"nll_delta": 0.125}
    text = invoke("diff", first, other)
    assert "0.50" in text.splitlines()[2] and "4 the same, 1 changed" in text and "0.1250" in text
    [changed] = found["changed"]
    assert changed["row_id"] == "r3" and changed["a"].startswith("…") and changed["a"].endswith("…")
    assert "same old old" in changed["a"] and "same new new" in changed["b"] and len(changed["a"]) < 250
    assert f"  A  {changed['a']}" in text and f"  B  {changed['b']}" in text
    whole = invoke("diff", first, other, "--full")
    answer = next(row["output"] for row in rows if row["id"] == "r3")
    assert f"  A  {escaped(answer)}" in whole


QUESTIONS = {"template": "{text} {question}", "questions": ["Who?", "When?"]}


def test_export_of_chosen_columns_and_rows(job_file):
    records = RECORDS[:3] + [{"id": "=bad", "text": "", "n": 3}]
    path = job_file(records, prompt=QUESTIONS, input={"passthrough": ["n"], "incremental": True})
    run_job(load_job(path), make_llm=lambda *_: Backwards())
    job_file([*records, {"id": "new", "text": "ü fox", "n": 4}], prompt=QUESTIONS,
             input={"passthrough": ["n"], "incremental": True})  # fmt: skip
    run = run_job(load_job(path), make_llm=lambda *_: Backwards()).run

    text = invoke("export", run.path, "--format", "csv", "--columns", "n,answer_2,id,kvb_input_file", "--bom")
    assert text.startswith("\ufeffn,answer_2,id,kvb_input_file\r\n")
    cells = list(csv.DictReader(io.StringIO(text[1:], newline="")))
    rows = [json.loads(line) for line in invoke("export", run.path).splitlines()]
    assert [row["n"] for row in cells] == ["0", "1", "2", "3", "4"] and cells[3]["id"] == "'=bad"
    for cell, row in zip(cells, rows, strict=True):
        answers = [answer["output"] for answer in row["kvb_answers"] or ()] or [None, None]
        assert [row["answer_1"], row["answer_2"]] == answers and cell["answer_2"] == (answers[1] or "")
        assert cell["kvb_input_file"] == row["kvb_input_file"] == str(Path("in.jsonl"))
    new = [json.loads(line) for line in invoke("export", run.path, "--new", "--columns", "id").splitlines()]
    assert new == [{"id": "=bad"}, {"id": "new"}], "a rejected row is read and rejected anew"

    for arguments, named in (
        (["--columns", "id,titel"], ["titel", "answer_1", "kvb_status"]),
        (["--columns", "id,,n"], ["empty"]),
        (["--bom"], ["csv"]),
        (["--format", "openai-batch", "--columns", "id"], ["jsonl"]),
    ):
        refused = CliRunner().invoke(cli, ["export", str(run.path), *arguments])
        assert refused.exit_code == 2 and refused.stdout == "", arguments
        assert all(name in refused.stderr for name in named), refused.stderr
    letters = pq.read_schema(run.deadletter_file(0)).names
    assert len(letters) == len(set(letters)) and "kvb_input_file" in letters


def test_export_keeps_every_row_and_value(job_file, tmp_path):
    times = pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns", "UTC"))
    table = {"id": ["a", 'ü,\n"b"'], "text": ["the fox", ""], "time": times, "tags": [["x", "y"], None]}
    path = job_file([], input={"path": "in.parquet", "passthrough": "all"})
    pq.write_table(pa.table(table), "in.parquet")
    run = run_job(load_job(path)).run
    rows = [json.loads(line) for line in invoke("export", run.path).splitlines()]
    assert [row["id"] for row in rows] == table["id"] and rows[0]["tags"] == ["x", "y"]
    assert rows[0]["time"] == "2023-11-14T22:13:20.123456789+00:00"
    assert rows[1]["output"] is None and rows[1]["kvb_error_code"] == "empty_text"
    target = tmp_path / "out" / "rows.csv"
    assert invoke("export", run.path, "--format", "csv", "-o", target) == ""
    cells = list(csv.DictReader(io.StringIO(target.read_bytes().decode(), newline="")))
    assert [row["id"] for row in cells] == table["id"] and json.loads(cells[0]["tags"]) == ["x", "y"]
    assert [each.name for each in target.parent.iterdir()] == ["rows.csv"]


def test_openai_batch_there_and_back(job_file):
    run = run_job(load_job(job_file(RECORDS[:2] + [{"id": 9, "text": ""}]))).run
    answers = [
        json.loads(line) for line in invoke("export", run.path, "--format", "openai-batch").splitlines()
    ]
    assert [answer["custom_id"] for answer in answers] == ["r0", "r1", "9"]
    body = answers[0]["response"]["body"]
    row = pl.read_parquet(run.shards / "*.parquet").row(0, named=True)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": row["output"]}
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == row["kvb_prompt_tokens"] + row["kvb_completion_tokens"]
    assert answers[2]["response"] is None and answers[2]["error"]["code"] == "empty_text"
    assert len({answer["id"] for answer in answers}) == 3
    # an answer may be the next request's message
    message = body["choices"][0]["message"]
    assert parse_body(json.dumps({"messages": [message]})).messages == (("assistant", row["output"]),)


@pytest.mark.parametrize("command", ["report", "export", "diff"])
def test_a_damaged_shard_is_named(command, job_file):
    shards = run_job(load_job(job_file(RECORDS))).run.shards
    with (shards / "part-00000.parquet").open("r+b") as file:
        file.truncate(1000)
    paths = ["runs/test"] * (2 if command == "diff" else 1)
    done = CliRunner().invoke(cli, [command, *paths])
    assert done.exit_code == 66 and "part-00000.parquet" in done.stderr and "--new-run" in done.stderr


@pytest.mark.parametrize("command", [["diff", ".", "."], ["export", "."]])
def test_no_run(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli, command).exit_code == 66
    assert list(Path().iterdir()) == []


def test_a_spreadsheet_runs_no_cell(monkeypatch):
    formulas = [
        "=1+1",
        "+49 170",
        "-HYPERLINK(A1)",
        "@SUM(A1)",
        "\tx",
        "\r=1",
        "\nx",
        "  =1+1",
        '"=1',
        "'=1",
        "＝1",
        "\ufeff=1",
    ]
    harmless = [
        "",
        "a=b",
        "-5",
        "+1.5",
        "-2.5e-3",
        "'tis",
        '"yes" - no',
        "{-1}",
        "–5",
        -5,
        -1.5,
        None,
        True,
        ["=1"],
    ]
    row = {f"={n}": value for n, value in enumerate(formulas)} | dict(enumerate(harmless))
    monkeypatch.setattr("kvbatch.report.export._rows", lambda *_: [row])
    monkeypatch.setattr("kvbatch.report.export._columns", lambda *_: list(row))

    def cells(**how):
        out = io.BytesIO()
        export_rows(None, "csv", out, ExportOptions(**how))
        return list(csv.reader(io.StringIO(out.getvalue().decode(), newline="")))

    plain = [
        "",
        "a=b",
        "-5",
        "+1.5",
        "-2.5e-3",
        "'tis",
        '"yes" - no',
        "{-1}",
        "–5",
        "-5",
        "-1.5",
        "",
        "true",
        '["=1"]',
    ]
    header, values = cells()
    assert header == [f"'={n}" for n in range(len(formulas))] + [str(n) for n in range(len(harmless))]
    assert values == [f"'{text}" for text in formulas] + plain
    header, values = cells(raw=True)
    assert header[0] == "=0" and values == formulas + plain
