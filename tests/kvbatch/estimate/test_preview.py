"""What the plan command says is what the run does; it needs no weights, and the run uses it."""

import json
import random

import polars as pl
import pytest
from click.testing import CliRunner

from engine.forecast import Forecast, PlannedRow, SpeedFit, forecast
from engine.memory_division import Budget
from kvbatch.cli import cli
from kvbatch.estimate import preview as planning
from kvbatch.prompts.tokenizer import PieceTokenizer
from kvbatch.run_dir.directory import RunDirectory
from kvcache.sizes.full import CacheLayout, LayerGroup


def documents(count: int, seed: int = 5) -> list[dict]:
    chance = random.Random(seed)
    return [{"id": f"r{i}", "text": "fox " * chance.randrange(5, 90)} for i in range(count)]


def call(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, list(args))
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture
def no_weights(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("engine.models.decoder.load_weights", forbidden)


@pytest.fixture
def tokenized(monkeypatch):
    """Count the texts that are tokenized."""
    counts, original = [], PieceTokenizer.documents
    monkeypatch.setattr(
        PieceTokenizer, "documents", lambda self, texts: counts.append(len(texts)) or original(self, texts)
    )
    return counts


def test_the_plan_needs_no_weights_and_the_run_uses_it(job_file, tokenized, monkeypatch):
    path = str(job_file([*documents(20), {"id": "long", "text": "x" * 900}]))
    with monkeypatch.context() as patch:
        patch.setattr("engine.models.decoder.load_weights", None)
        found = json.loads(call("plan", path, "--json"))
    assert found["outcomes"] == {"fits": 20, "too_long": 1} and found["num_running"] == 20
    assert sum(item["rows"] for item in found["lengths"]) == 21
    planned = pl.read_parquet(found["plan"])
    assert found["kv_full_bytes"] == planned["predicted_kv_full_bytes"].sum() == found["kv_bytes"]
    tokenized.clear()
    text = call("plan", path)
    assert "made earlier" in text and "20 fits, 1 too_long" in text and not tokenized
    call("run", path)
    assert sum(tokenized) == 20, "only what runs is tokenized, by the second pass"
    assert pl.read_parquet("runs/test/latest/plan.parquet").equals(planned)
    summary = json.loads(call("report", "runs/test", "--json"))
    assert summary["kv_peak_bytes_measured"] == found["predicted_kv_peak_bytes"]


def test_known_tokens_are_not_counted_again_and_a_changed_input_is(job_file, tokenized):
    records = documents(10)
    path = str(job_file(records))
    first = json.loads(call("plan", path, "--json"))
    tokenized.clear()
    other = json.loads(call("plan", path, "-s", "output.shard_rows=3", "--json"))
    # the plan stands, but for how it is cut; nothing of it hangs on the cache
    assert not tokenized and other["prompt_tokens"] == first["prompt_tokens"]
    records[3]["text"] += " and one more"
    job_file(records)
    again = json.loads(call("plan", path, "--json"))
    assert tokenized == [1] and again["prompt_tokens"] > first["prompt_tokens"]


def test_an_incremental_job_plans_the_rows_that_its_run_will_do(job_file, tokenized):
    records, sections = documents(10), {"input": {"incremental": True}}
    path = str(job_file(records[:8], **sections))
    call("run", path)
    job_file(records, **sections)
    found = json.loads(call("plan", path, "--json"))
    assert found["outcomes"] == {"reused": 8, "fits": 2} and found["num_running"] == 2
    for key, num_running in (("engine.deterministic=true", 10), ("engine.max_sequences=1", 2)):
        found = json.loads(call("plan", path, f"--what-if={key}", "--json"))
        assert found["num_running"] == found["what_if"]["num_running"] == num_running
    tokenized.clear()
    call("run", path)
    assert sum(tokenized) == 2, "the run uses the plan"
    assert json.loads(call("report", "runs/test", "--json"))["carried"] == 8
    assert "none: nothing is to run" in call("plan", path)


def test_rows_of_one_text_and_other_ids_are_counted_apart(job_file):
    records = [{"id": "x" * n, "text": "the same"} for n in (1, 40)]
    template = {"template": "Document {id}: {text}"}
    call("plan", str(job_file(records, prompt=template)))
    path = str(job_file([*records, {"id": "y" * 20, "text": "the same"}], prompt=template))
    found = json.loads(call("plan", path, "--json"))
    tokens = pl.read_parquet(found["plan"])["prompt_tokens"].to_list()
    assert tokens[0] < tokens[2] < tokens[1]
    call("run", path)


def test_one_long_document_does_not_flatten_the_histogram(tmp_path):
    pl.DataFrame({"prompt_tokens": [*range(200), 5400]}).write_parquet(tmp_path / "plan.parquet")
    classes = planning._classes(planning._prompt_tokens(RunDirectory(tmp_path)))
    assert [count for _, _, count in classes] == [20] * 10 + [0, 0, 1]
    assert classes[-1] == (240, 5401, 1)


def test_what_if_is_what_a_plan_of_it_says(job_file, no_weights):
    path = str(job_file(documents(30)))
    keys = ["engine.memory_budget=1MiB", "engine.max_sequences=2"]
    found = json.loads(call("plan", path, *[f"--what-if={key}" for key in keys], "--json"))
    assert found["what_if"]["num_bins"] > found["num_bins"]
    text = call("plan", path, *[f"--what-if={key}" for key in keys])
    assert "as planned" in text and " ".join(keys) in text
    planned = json.loads(call("plan", path, *[f"-s{key}" for key in keys], "--json"))
    for name in ("num_bins", "predicted_kv_peak_bytes", "outcomes", "packing_efficiency"):
        assert found["what_if"][name] == planned[name]
    refused = CliRunner().invoke(cli, ["plan", path, "--what-if", "generation.max_new_tokens=3"])
    assert refused.exit_code == 78 and "generation.max_new_tokens" in refused.stderr


def test_the_time_is_known_once_something_ran(job_file, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBATCH_CACHE", str(tmp_path / "cache"))
    path = str(job_file(documents(12), generation={"max_new_tokens": 30}))
    assert json.loads(call("plan", path, "--json"))["seconds"] is None
    found = json.loads(call("plan", path, "--measure", "--price-per-hour", "3600", "--json"))
    assert found["seconds"] > 0 and found["cost"] == pytest.approx(found["seconds"])
    assert found["answer_tokens"] == 30
    assert "tokens an answer, as in the calibration" in call("plan", path)
    # what is known of one cache says nothing of another
    for key in ("cache.preset=none", "cache.chunk_size=128"):
        text = call("plan", path, "--what-if", key, "--price-per-hour", "3600")
        assert ("unknown at 3600 an hour" in text) == (key != "cache.preset=none")


def test_coefficients_come_back_and_a_forecast_plays_the_scheduler():
    chance, true = random.Random(1), (0.01, 1e-4, 2e-6, 1e-3, 0.0)
    fit = SpeedFit()
    for _ in range(200):
        decodes = chance.randrange(8)
        prefill = chance.choice([0, 256, 1024])
        parts = (1.0, prefill, prefill * chance.random(), float(decodes), decodes * chance.random())
        fit.add(parts, sum(c * x for c, x in zip(true, parts, strict=True)))
    assert fit.coefficients() == pytest.approx(true, rel=1e-3, abs=1e-6)

    layout = CacheLayout((LayerGroup(1, 1, 8),), 4)
    budget = Budget(layout, 0, step_tokens=100, max_sequences=2, capacity_pages=4)
    rows = [PlannedRow(150, 3, 3), PlannedRow(50, 3, 1), PlannedRow(10, 1, 4)]
    # 100 of the first | its 50, and 50 of the second | two steps of both | the last, alone
    assert forecast(rows, budget, (1, 0, 0, 0, 0)) == Forecast(5, 4)
    assert forecast(rows, budget, (0, 1, 0, 0, 0)).seconds == 210
    assert forecast(rows, budget, (0, 0, 0, 1, 0)).seconds == 4
    assert forecast(rows[2:], budget, (0, 0, 1000, 0, 0)).seconds == 50


def test_a_prefix_that_nobody_uses_makes_room():
    budget = Budget(
        CacheLayout((LayerGroup(1, 1, 8),), 4), 0, step_tokens=100, max_sequences=2, capacity_pages=4
    )
    rows = [PlannedRow(50, 1, 1, shared_tokens=20), PlannedRow(60, 1, 4)]
    assert forecast(rows, budget, (0, 1, 0, 0, 0), prefix=PlannedRow(20, 0, 2)) == Forecast(90, 4)
