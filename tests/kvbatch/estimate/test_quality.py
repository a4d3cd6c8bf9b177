"""The guard measures what the compressed cache costs, and the job then does what it was told to do."""

import io
import json
import random
import shutil

import polars as pl
import pytest
import torch
from click.testing import CliRunner

from engine import EngineConfig, EngineCore, Request, SamplingParams
from engine.models import load_model
from engine.teacher_forcing import answer, drift, reading
from kvbatch.cli import cli
from kvbatch.errors import LimitExceeded
from kvbatch.estimate.sample import sample_requests
from kvbatch.estimate.tune import CANDIDATES
from kvbatch.job_file.load import load_job
from kvbatch.opened_job import opened_job
from kvbatch.run.entry import run_job
from kvbatch.run_dir.find_runs import open_run
from kvcache.config import KVCacheConfig
from tests.engine.models.tiny_models import save_tiny_model

# So few tokens are kept that answers must differ.
RUINOUS = {"compress_method": "sparse", "keep_ratio": 0.05, "warmup_tokens": 1, "recent_tokens": 0}
RUINOUS |= {"tail_tokens": 0, "chunk_size": 16, "scorer": "random", "probe": False, "budget": "uniform"}


@pytest.fixture
def tiny_model(tiny_model, tmp_path_factory):
    """The same with heads that a compressed cache takes."""
    path = tmp_path_factory.mktemp("wide")
    save_tiny_model(path, "llama", vocab_size=320, max_position_embeddings=512)
    for file in tiny_model.glob("*token*.j*"):
        shutil.copy(file, path)
    return path


def documents(count: int) -> list[dict]:
    chance = random.Random(3)
    return [
        {"id": f"r{i}", "text": " ".join(str(chance.randrange(1000)) for _ in range(60))}
        for i in range(count)
    ]


def run(path, *overrides):
    return run_job(load_job(path, overrides), stream=io.StringIO()).run


def test_the_full_cache_agrees_with_itself_and_drift_is_what_it_says(tiny_model):
    model = load_model(tiny_model, dtype=torch.float32)
    llm, other = (EngineCore(model, EngineConfig(20_000_000, cache=KVCacheConfig()), str) for _ in range(2))
    request = Request(0, list(range(3, 200)), SamplingParams(max_new_tokens=12, ignore_eos=True))
    result, log_probs = answer(llm, request)
    with reading(other, request) as context:
        full = context.log_probs(result.token_ids)
    torch.testing.assert_close(log_probs, full, rtol=1e-3, atol=1e-4)
    same = drift(result.token_ids, log_probs, full)
    assert same.first_divergence is None and same.top1_agreement == 1 and abs(same.nll_delta) < 1e-4
    changed = full.clone()
    changed[5] = changed[5].roll(1)
    moved = drift(result.token_ids, log_probs, changed)
    assert moved.first_divergence == 5 and moved.top1_agreement == pytest.approx(11 / 12)
    assert moved.nll_delta == pytest.approx(
        float(log_probs[5, result.token_ids[5]] - changed[5, result.token_ids[5]]) / 12, abs=1e-4
    )
    assert llm.cache.used_bytes == other.cache.used_bytes == 0


def test_the_guard_warns_fails_or_falls_back_and_is_asked_once_a_run(job_file):
    guard = {"sample": 3, "max_nll_delta": 1e-4}
    path = job_file(documents(6), cache=RUINOUS, quality_guard=guard)
    warned = run(path)
    quality = pl.read_parquet(warned.quality)
    assert quality.height == 3 and quality["error"].null_count() == 3
    assert (quality["full_nll"] - quality["nll"] - quality["nll_delta"]).abs().max() < 1e-9
    found = warned.read_manifest().quality
    assert found["nll_delta"] == pytest.approx(quality["nll_delta"].mean()) and found["problems"]
    rows = pl.read_parquet(warned.shards / "*.parquet")
    assert rows["kvb_kv_kept_ratio"].max() < 0.9

    with pytest.raises(LimitExceeded, match=r"NLL grows by .* more than 0.0001.*kvbatch tune"):
        run(path, "quality_guard.action=fail")
    assert open_run(warned.path.parent).path == warned.path, "what is refused is no run"

    answered = CliRunner().invoke(cli, ["plan", str(path), "-s", "quality_guard.action=fallback_full"])
    assert answered.exit_code == 0, answered.output  # the plan that lies there is of the compressed cache
    fallen = run(path, "quality_guard.action=fallback_full")
    rows = pl.read_parquet(fallen.shards / "*.parquet")
    full = pl.read_parquet(
        run(path, "cache.preset=none", *[f"cache.{key}=null" for key in RUINOUS]).shards / "*.parquet"
    )
    assert rows["output"].to_list() == full["output"].to_list()
    assert rows["kvb_kv_kept_ratio"].min() > 0.9


def test_the_sample_does_not_depend_on_the_order_of_the_rows(job_file):
    def sampled(rows):
        found = run(job_file(rows, cache={"preset": "default"}, quality_guard={"sample": 2}))
        return set(pl.read_parquet(found.quality)["row_id"])

    rows = documents(8) + [{"id": "long", "text": "x" * 3000}]  # which cannot run
    assert sampled(rows) == sampled(rows[::-1])


def test_every_question_has_its_share_of_the_sample(job_file):
    asking = {"template": "{text} {question}", "questions": ["What?", "Who wrote all of it?", "When?"]}
    path = job_file(documents(12), prompt=asking, cache={"preset": "logs"}, quality_guard={"sample": 12})
    quality = pl.read_parquet(run(path).quality)
    assert quality["error"].null_count() == 12
    with opened_job(load_job(path)) as (opened, _):
        asked = [request for _, request in sample_requests(opened, 12)]
    tails = {tuple(request.prompt_token_ids[request.prefix_tokens :]) for request in asked}
    assert len(tails) == 3


def test_commands(job_file, tmp_path):
    path = str(job_file(documents(3), cache={"preset": "logs"}))
    answered = CliRunner().invoke(cli, ["quality", path, "--sample", "2", "--json"])
    assert answered.exit_code in (0, 65), answered.output
    found = json.loads(answered.stdout)
    assert found["num_rows"] == len(found["rows"]) == 2
    assert answered.exit_code == (65 if found["problems"] else 0)
    assert CliRunner().invoke(cli, ["quality", path, "-s", "cache.preset=none"]).exit_code == 78

    plot = tmp_path / "plot.svg"
    options = ["--sample", "2", "--max-nll-delta", "100", "--plot", str(plot)]
    answered = CliRunner().invoke(cli, ["tune", path, *options, "--json"])
    assert answered.exit_code == 0, answered.output
    found = json.loads(answered.stdout)
    assert {c["name"] for c in found["candidates"]} == set(CANDIDATES)
    ratios = [c["kv_kept_ratio"] for c in found["candidates"]]
    assert ratios == sorted(ratios, reverse=True) and found["best"] == found["candidates"][-1]["name"]
    assert found["best"] in plot.read_text()  # the cheapest is always on the frontier, which has its names
    none = CliRunner().invoke(cli, ["tune", path, "--sample", "1", "--max-nll-delta", "-100"])
    assert none.exit_code == 65 and "no candidate keeps the limits" in none.stdout


def test_answers_of_a_given_form_are_compared_by_what_the_caches_expect(job_file):
    found = run(
        job_file(
            documents(2),
            cache={"preset": "default"},
            generation={"choices": ["yes", "no"]},
            quality_guard={"sample": 2},
        )
    )
    quality = pl.read_parquet(found.quality)
    assert quality["kl"].is_finite().all() and quality["kl"].max() < 1 and quality["error"].null_count() == 2
