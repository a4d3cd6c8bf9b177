"""Figures that hold together, over rows of every kind; and answers that did not come to their own end."""

import io
import json
import shutil
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from kvbatch.cli import cli
from kvbatch.errors import LimitExceeded
from kvbatch.job_file.load import load_job
from kvbatch.report.summary import load_summary
from kvbatch.report.summary_text import render
from kvbatch.run.entry import run_job
from kvbatch.run_dir.find_runs import open_run
from tests.engine.models.tiny_models import save_tiny_model
from tests.kvbatch.fakes import Backwards

LINES = "".join(f"line {n} of the brown fox\n" for n in range(150))
INSTRUCTION = "Summarise what follows in one sentence, and leave nothing out that matters to a lazy dog. " * 2
COMPRESSED = {
    "preset": "logs",
    "budget": "uniform",
    "chunk_size": 32,
    "delay": 1,
    "recent_tokens": 32,
    "tail_tokens": 32,
    "warmup_tokens": 4,
}
ASKING = {"template": INSTRUCTION + "{text} {question}", "questions": ["What is it?", "Who?", "When?"]}


@pytest.fixture
def compressible(tmp_path, tiny_model):
    """A model whose heads a compressed cache can keep."""
    save_tiny_model(tmp_path / "model", "llama", vocab_size=320, max_position_embeddings=512)
    for file in (*tiny_model.glob("*token*.j*"), *tiny_model.glob("chat*")):
        shutil.copy(file, tmp_path / "model")
    return {"path": "model"}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"cache": COMPRESSED, "long_document": {"on_too_long": "stream"}},
        {"prompt": ASKING, "cache": COMPRESSED, "long_document": {"on_too_long": "split"}},
        {"long_document": {"on_too_long": "split", "part_tokens": 150}, "engine": {"max_sequences": 2}},
    ],
    ids=["full", "compressed-streamed", "compressed-questions-split", "split"],
)
def test_no_figure_contradicts_another(job_file, compressible, monkeypatch, sections):
    monkeypatch.setattr(
        "kvbatch.report.html.page.write_page", lambda *_: None
    )  # which takes longer than the run
    records = [{"id": n, "text": LINES[: 60 + 150 * n]} for n in range(6)] + [{"id": "long", "text": LINES}]
    path = job_file(
        records, model=compressible, **{"prompt": {"template": INSTRUCTION + "{text}"}} | sections
    )
    told = io.StringIO()
    found = run_job(load_job(path), stream=told).run
    summary = load_summary(found.path)
    rows = pl.read_parquet(found.shards / "*.parquet").filter(pl.col("kvb_status") == "ok")
    assert len(rows) >= 5 and (rows["kvb_cached_prompt_tokens"] > 0).any()
    assert (rows["kvb_kv_kept_bytes"] <= rows["kvb_kv_peak_bytes"]).all()
    assert (rows["kvb_kv_peak_bytes"] <= summary["kv_peak_bytes_measured"]).all()
    assert (rows["kvb_kv_kept_ratio"] > 0).all()
    seconds = rows["kvb_prefill_s"].sum() + rows["kvb_decode_s"].sum()
    assert rows["kvb_prefill_s"].min() > 0 < rows["kvb_decode_s"].min()
    assert seconds <= summary["running_s"], "the rows together took no longer than the run"
    prompt, generated = rows["kvb_prompt_tokens"].sum(), rows["kvb_completion_tokens"].sum()
    done = round(summary["tokens_per_s"] * summary["running_s"])
    uncached = prompt - rows["kvb_cached_prompt_tokens"].sum()
    assert uncached + generated < done < prompt + generated, "each shared prefix is computed once"
    if not sections:
        assert done == uncached + generated + found.read_manifest().prefix_tokens
    last = [line for line in told.getvalue().splitlines() if line.startswith("running")][-1]
    assert "KV 0" not in last and "at most" in last


def test_a_sample_is_counted_as_large_as_it_is(job_file, compressible):
    records = [{"id": n, "text": "fox " * (20 + n)} for n in range(3)]
    path = job_file(records, model=compressible, cache=COMPRESSED)
    done = CliRunner().invoke(cli, ["quality", str(path)])
    assert "comparing: 3 of 3 rows" in done.stderr and "quality      3 rows" in done.stdout, done.output


class Ending(Backwards):
    """End answers by reasons in turn."""

    def __init__(self, *reasons):
        super().__init__()
        self.reasons = reasons

    def _answers(self, held):
        from dataclasses import replace

        for result in super()._answers(held):
            yield replace(result, finish_reason=self.reasons[(self.num_answers - 1) % len(self.reasons)])


def test_cut_answers_are_counted_first_and_with_what_to_do(job_file, monkeypatch):
    path = job_file([{"id": n, "text": "fox"} for n in range(13)], output={"metrics": "test.prom"})
    monkeypatch.setattr("kvbatch.run.entry.load_llm", lambda *_: Ending("stop", *["length"] * 12))
    done = CliRunner().invoke(cli, ["run", str(path)])
    found = open_run(Path("runs/test"))
    lines, told = done.stdout.splitlines(), json.loads(done.stdout.splitlines()[-1])
    assert lines[1] == "answers      1 ended by itself, 12 cut"
    command = f"kvbatch retry {found.path} --status length --max-new-tokens 32"
    assert command in lines[2] and "13 ok" in lines[3]
    assert (told["answers"], told["ended"], told["cut"]) == (13, 1, 12) and command in told["advice"]
    assert f"12 of 13 answers were cut at 8 tokens: {command}" in found.page.read_text()
    assert 'run_cut_answers{job_name="test"} 12' in Path("test.prom").read_text()
    assert lines[1:4] == CliRunner().invoke(cli, ["report", "runs/test"]).stdout.splitlines()[1:4]
    with pytest.raises(
        LimitExceeded, match=r"12 of 13 answers \(92.3%\) were cut, .*max_cut_ratio .*kvbatch retry"
    ):
        run_job(
            load_job(path, ["limits.max_cut_ratio=0.9"]),
            new_run=True,
            make_llm=lambda *_: Ending("stop", *["length"] * 12),
        )


def test_every_answer_of_a_row_counts(job_file):
    records = [{"id": "a", "text": LINES[:1000]}]
    split = {"on_too_long": "split", "part_tokens": 150}
    path = job_file(records, prompt=ASKING | {"template": "{text} {question}"}, long_document=split)
    found = run_job(load_job(path), make_llm=lambda *_: Ending("stop", "stop", "length", "repetition")).run
    [row] = pl.read_parquet(found.shards / "*.parquet").to_dicts()
    num_answers = 3 * (row["kvb_n_parts"] + 1)
    assert row["kvb_n_answers"] == num_answers > 8 and 0 < row["kvb_n_cut"] <= num_answers / 2
    assert row["kvb_finish_reason"] == "repetition", "the worst of all, parts included"
    summary = load_summary(found.path)
    assert (summary["answers"], summary["cut"]) == (num_answers, row["kvb_n_cut"])
    assert "in circles" in render(summary)
