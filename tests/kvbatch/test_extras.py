"""Where an optional library is missing, what needs it names the extra to install, before it does any work."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbatch.cli import cli
from kvbatch.errors import JobFileError, ModelUnavailable
from kvbatch.job_file.load import load_job
from kvbatch.model.source import resolve_model
from kvbatch.prompts.structured_output import answer_form
from kvbatch.report.html.plots import draw_throughput


@pytest.fixture
def without(monkeypatch):
    """Return a function that makes a library missing."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


def test_a_gguf_model(without, tmp_path):
    without("gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelUnavailable, match=r"m\.gguf needs gguf, .*'kvbatch\[gguf\]'"):
        resolve_model(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "cache")


def test_a_schema_and_choices(without, job_file):
    path = job_file([{"id": "a", "text": "fox"}], generation={"choices": ["yes", "no"]})
    choices = load_job(path).generation
    path = job_file([{"id": "a", "text": "fox"}], generation={"json_schema": {"type": "object"}})
    without("llguidance")
    with pytest.raises(
        JobFileError, match=r"generation\.json_schema.* needs llguidance, .*'kvbatch\[grammar\]'"
    ):
        load_job(path)
    with pytest.raises(JobFileError, match=r"generation\.choices needs llguidance, .*'kvbatch\[grammar\]'"):
        answer_form(choices, None)


def test_charts(without, tmp_path):
    without("matplotlib")
    chart = draw_throughput({"elapsed_s": [0.0, 1.0], "tokens_per_s": [1.0, 2.0]})
    assert chart.startswith("<p") and "kvbatch[report]" in chart, (
        "the page is written, and says what is missing"
    )
    Path(tmp_path / "job.yaml").write_text("version: 1\n")  # not read any more
    found = CliRunner().invoke(cli, ["tune", str(tmp_path / "job.yaml"), "--plot", str(tmp_path / "p.svg")])
    assert found.exit_code == 69 and "kvbatch[report]" in found.output
