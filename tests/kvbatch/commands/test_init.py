"""`kvbatch init` writes a job file that validates and runs as it is, or says what is wrong with the documents."""

import json
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from kvbatch.cli import cli
from kvbatch.job_file.load import load_job

LONG = "The quick brown fox jumps over the lazy dog. " * 60  # beyond the tiny model's context
SHORT = "A fox sat in the grass and looked at ten dogs."


def invoke(*arguments):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def write_jsonl(path: str, *rows: dict) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def nested():
    """Ids that repeat, an id of another name, a text inside an object, an output column of an earlier run."""
    rows = [
        {"id": 1, "url": f"https://x/{n}", "n": n, "kvb_x": "a b c", "doc": {"body": SHORT}} for n in range(3)
    ]
    write_jsonl("in/a.jsonl", *rows)
    return {"id_column": "url", "text_column": "doc.body", "passthrough": ("n",), "on": "error"}


def weird_parquet():
    """A column whose name YAML would take for a boolean, one of long codes, and texts that are too long."""
    Path("in").mkdir()
    frame = {"on": [f"{n}.5" for n in range(8)], "sha": ["0f" * 200] * 8, "content": [LONG] * 8}
    pl.DataFrame(frame).write_parquet("in/a b.parquet")
    return {"id_column": "on", "text_column": "content", "passthrough": (), "on": "split"}


def some_long():
    """Rows without an id, two files of which one is Parquet, one long text among many, a row without a text."""
    write_jsonl(
        "in/a.jsonl", *[{"text": SHORT, "lang": "en"}] * 11, {"text": LONG, "lang": "de"}, {"lang": "en"}
    )
    pl.DataFrame({"text": [SHORT], "lang": ["fr"]}).write_parquet("in/b.parquet")
    return {"id_column": None, "text_column": "text", "passthrough": ("lang",), "on": "truncate"}


def requests():
    body = {"messages": [{"role": "user", "content": SHORT}], "max_tokens": 4}
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n in range(2)
    ]
    write_jsonl("in/a.jsonl", *rows)
    return {"id_column": None, "text_column": "text", "passthrough": (), "on": "error"}


@pytest.mark.parametrize("make", [nested, weird_parquet, some_long, requests])
def test_what_it_writes_validates_and_runs(make, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = make()
    done = invoke("init", "in", "--model", tiny_model, "--out", "first.yaml")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["documents", "columns", "lengths", "cache", "written"]
    assert "kvbatch validate first.yaml" in lines[-1] and "context of 512" in lines[2]
    job = load_job("first.yaml")
    found = {"id_column": job.input.id_column, "text_column": job.input.text_column}
    found |= {"passthrough": job.input.passthrough, "on": job.long_document.on_too_long}
    assert (found, job.name) == (expected, "first")
    small = [
        "-s",
        "generation.max_new_tokens=4",
        "-s",
        "engine.memory_budget=64MiB",
        "-s",
        "engine.threads=1",
    ]
    assert invoke("validate", "first.yaml", *small).exit_code == 0
    assert invoke("run", "first.yaml", *small).exit_code == 0
    rows = pl.read_parquet("runs/first/latest/shards/*.parquet")
    num_bad = (
        sum("text" not in row for row in map(json.loads, Path("in/a.jsonl").read_text().splitlines()))
        if (make is some_long)
        else 0
    )
    assert (rows["kvb_status"] == "ok").sum() == len(rows) - num_bad
    again = invoke("init", "in", "--model", tiny_model, "--out", "first.yaml")
    assert again.exit_code == 73 and "--out" in again.stderr


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"in/a.jsonl": '{"n": 1, "id": "a1"}\n'},
            r"a\.jsonl: no column holds a text; the columns are n, id",
        ),
        ({"in/a.jsonl": ""}, r"in: the documents have no rows"),
        ({}, "in: no such file"),
        (
            {"in/a.jsonl": f'{{"text": "{SHORT}"}}\n', "in/b.jsonl": f'{{"body": "{SHORT}"}}\n'},
            r"b\.jsonl: there is no text column 'text', which other files have; its columns are body",
        ),
        ({"in/a.csv": "id,text\n1,fox\n"}, r"no input file found here; .*read_csv\('a\.csv'\)"),
        ({"in/a.pdf": "%PDF-1.7 x"}, r"no input file found here; .*a PDF.*pdftotext"),
        ({"in/a.txt": "fox"}, r"no input file found here; .*\*\.txt > a\.jsonl"),
    ],
)
def test_documents_that_no_job_can_read_are_named(files, message, tmp_path, monkeypatch):
    import re

    monkeypatch.chdir(tmp_path)
    for path, text in files.items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(text)
    done = invoke("init", "in", "--model", "nowhere")
    assert done.exit_code == 66 and re.search(message, done.stderr) and not Path("job.yaml").exists()


def test_a_file_that_cannot_be_read_is_told_how_to_convert_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("id,text\n1,fox\n")
    done = invoke("inspect", "a.csv")
    assert done.exit_code == 66 and "convert it: python -c" in done.stdout and "read_csv" in done.stdout
    done = invoke("init", "a.csv", "--model", "nowhere")
    assert done.exit_code == 66 and "a.csv: it is not JSONL" in done.stderr and "read_csv" in done.stderr
