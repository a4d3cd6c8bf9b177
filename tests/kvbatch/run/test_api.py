"""`kvbatch.run(job)` from a script: the same run as by the command, and its rows as a table."""

import subprocess
import sys

import polars as pl
import pytest
import yaml

import kvbatch
from kvbatch.errors import JobFileError
from kvbatch.run_dir.find_runs import open_run

RECORDS = [{"id": n, "text": "The quick brown fox." * (n + 1)} for n in range(3)]


def test_a_job_by_path_and_by_mapping(job_file):
    path = job_file(RECORDS)
    first = kvbatch.run(path, overrides=["generation.max_new_tokens=3"])
    assert first.is_new and first.summary["ok"] == 3 and first.path == open_run(first.path.parent).path
    rows = first.output()
    assert rows["id"].to_list() == [0, 1, 2] and rows["kvb_completion_tokens"].max() <= 3
    job = yaml.safe_load(path.read_text())
    job["generation"] = job.get("generation", {}) | {"max_new_tokens": 3}
    again = kvbatch.run(job)
    assert (again.is_new, again.path) == (False, first.path)
    assert pl.concat([pl.from_arrow(table) for table in again.tables(2)]).equals(rows)
    with pytest.raises(JobFileError, match="unknown key 'input.pth'") as error:
        kvbatch.run(job | {"input": {"pth": "x"}})
    assert "did you mean 'path'?" in str(error.value)
    with pytest.raises(
        JobFileError, match="'long_document.drop' is called 'long_document.truncation_side' now"
    ):
        kvbatch.run(job | {"long_document": {"drop": "head"}})


def test_a_run_without_rows_has_an_empty_table(job_file):
    path = job_file([])
    assert kvbatch.run(path).output().is_empty()


def test_it_is_found_without_its_modules_being_imported_first():
    code = (
        "import kvbatch; print(callable(kvbatch.run)); import kvbatch.run.entry; print(callable(kvbatch.run))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "True"]
