"""No error that a row can meet reuses document text to a log, a terminal or the page."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from kvbatch.cli import cli
from kvbatch.corpus import Corpus, InputSpec
from kvbatch.errors import InputError
from kvbatch.run_dir.find_runs import open_run
from tests.kvbatch.fakes import Backwards

SECRET = "Geheimnis"
BAD_LINES = {
    "bad_json": f'{{"id": "a", "text": "{SECRET}',
    "not_an_object": f'["{SECRET}"]',
    "bad_utf8": f'{{"id": "a", "text": "{SECRET} \udcff"}}',
    "text_type": f'{{"id": "a", "text": ["{SECRET}"]}}',
    "empty_text": f'{{"id": "a", "text": "", "year": 2000, "title": "{SECRET}"}}',
    "missing_text": f'{{"id": "a", "title": "{SECRET}", "title": "{SECRET}"}}',
    "bad_unicode": f'{{"id": "a", "text": "{SECRET} \\ud800"}}',
    "row_too_large": f'{{"id": "a", "text": "{SECRET * 1000}"}}',
    "where_type": f'{{"id": "a", "text": "{SECRET}", "year": "{SECRET}"}}',
    "duplicate_id": f'{{"id": "ok", "text": "{SECRET}"}}',
    "too_long": f'{{"id": "a", "text": "{SECRET * 300}"}}',
}
SECTIONS = {
    "input": {
        "max_row_bytes": 5000,
        "passthrough": ["title"],
        "where": "year IS NULL OR CAST(year AS INT) > 1999",
    }
}


class Quoting(Backwards):
    """An engine whose errors, and whose answers, quote the document."""

    def _answers(self, held):
        for result in super()._answers(held):
            message = result.error_message and f"cannot read '{SECRET}'"
            yield replace(result, text=f"no JSON: {SECRET}", error_message=message)


@pytest.fixture
def said(monkeypatch, caplog):
    """Run a command; return its exit code and all that it said: terminal, log, page."""

    def invoke(*arguments, fail=()):
        monkeypatch.setattr("kvbatch.run.entry.load_llm", lambda *_: Quoting(fail))
        done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        texts = [done.stdout, done.stderr, caplog.text, repr(done.exception)]
        if Path("runs/test/latest").exists():
            run = open_run(Path("runs/test"))
            texts += [file.read_text() for file in (run.log, run.page, run.manifest) if file.exists()]
        return done.exit_code, "\n".join(texts)

    return invoke


def test_rows_that_cannot_be_used(job_file, said):
    path = job_file([{"id": "ok", "text": f"{SECRET} fox", "year": "2000", "title": "t"}], **SECTIONS)
    lines = [line.replace('"id": "a"', f'"id": "{code}"') for code, line in BAD_LINES.items()]
    with open("in.jsonl", "ab") as file:
        file.write("\n".join(lines).encode("utf-8", "surrogateescape"))
    exit_code, text = said("run", path)
    out = pq.read_table(open_run(Path("runs/test")).shards / "part-00000.parquet")
    assert exit_code == 0 and out["kvb_error_code"].to_pylist() == [None, *BAD_LINES]
    assert "missing_text" in text and SECRET not in text
    exit_code, text = said("validate", path)
    assert (
        exit_code == 0
        and "where_type 1" in text
        and "key 'title' occurs twice" in text
        and SECRET not in text
    )
    for line in lines[:-2]:  # the last two are found by the plan, which rejects them in any case
        Path("one.jsonl").write_bytes(line.encode("utf-8", "surrogateescape"))
        with pytest.raises(InputError, match=r"one\.jsonl:1: .*on_bad_row") as caught:
            list(Corpus(InputSpec(("one.jsonl",), on_bad_row="fail", **SECTIONS["input"])).documents())
        assert SECRET not in str(caught.value)


def test_what_the_engine_says_of_a_row_stands_in_its_row_alone(job_file, said):
    path = job_file(
        [{"id": f"r{n}", "text": f"{SECRET} {n}"} for n in range(4)],
        generation={"json_schema": {"type": "object"}},
        limits={"max_error_ratio": 1},
    )
    exit_code, text = said("run", path, fail=(1,))
    out = pq.read_table(open_run(Path("runs/test")).shards / "part-00000.parquet").to_pylist()
    assert exit_code == 65 and SECRET in out[1]["kvb_error_message"]
    assert [row["kvb_error_code"] for row in out] == [
        "invalid_output",
        "engine",
        "invalid_output",
        "invalid_output",
    ]
    assert "row failed" in text and "row retried" in text and SECRET not in text


def test_conditions_and_types_that_meet_a_value_of_a_parquet_file(job_file, said):
    rows = [{"id": "a", "text": "fox", "year": "2000"}, {"id": "b", "text": "fox", "year": SECRET}]
    pq.write_table(pa.Table.from_pylist(rows), "in.parquet")
    path = job_file([], input={"path": "in.parquet", "where": "CAST(year AS INT) > 1999"})
    assert said("run", path)[0] == 0
    out = pq.read_table(open_run(Path("runs/test")).shards / "part-00000.parquet").to_pylist()
    assert out[1]["kvb_error_message"] == (
        "in.parquet:2: `where` cannot be decided: conversion from `str` to `i32` failed"
    )
    exit_code, text = said("run", path, "-s", "input.where=year + 1 > 2", "--new-run")
    assert exit_code == 66 and SECRET not in text


def test_an_error_of_the_program_is_named_without_its_message(job_file, said, monkeypatch):
    path = job_file([{"id": "a", "text": SECRET}])

    def broken(document, columns):
        raise ValueError(f"cannot hash {document.text}")

    monkeypatch.setattr("kvbatch.plan.planner.prompt_content", broken)
    exit_code, text = said("run", path)
    assert exit_code == 70 and "ValueError at test_no_text_in_logs.py" in text and SECRET not in text
