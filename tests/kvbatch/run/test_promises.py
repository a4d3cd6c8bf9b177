"""A job's cache preset keeps its promise: fitted before rows run, told everywhere, kept by the runs that follow."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvbatch.cli import cli
from kvbatch.errors import JobChanged, LimitExceeded, ModelUnavailable
from kvbatch.job_file.load import load_job
from kvbatch.report.summary import load_summary
from kvbatch.report.summary_text import render
from kvbatch.run_dir.directory import RunDirectory
from kvcache.promises import PROMISES
from kvcache.user_cache import user_cache
from tests.engine.models.tiny_models import tiny_model as make_model
from tests.kvbatch.helpers import output, run

RECORDS = [{"id": n, "text": f"{n} fox " * (30 + 5 * n)} for n in range(6)]
DEFAULT = {"cache": {"preset": "default"}, "model": {"path": "model"}, "engine": {"threads": 2}}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder without fitted policies."""
    path = tmp_path / "cache"
    path.mkdir()
    (path / "kernels").symlink_to(user_cache() / "kernels")
    monkeypatch.setenv("KVBATCH_CACHE", str(path))
    # the model's files are younger than the times of a file system tell apart
    monkeypatch.setattr("kvbatch.model.file_hashes._TICK_NS", -1)
    return path / "policies"


@pytest.fixture
def put_model(tmp_path, tiny_model):
    """Put a model of the same shape in the job's place: what its attention adds is scaled, and its scores."""

    def put(output: float = 0.01, sharpness: float = 1.0) -> None:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        model = make_model("llama", vocab_size=320, max_position_embeddings=1024)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight *= output
                layer.self_attn.q_proj.weight *= sharpness
                layer.self_attn.k_proj.weight *= sharpness
        model.save_pretrained(tmp_path / "model")
        for file in tiny_model.glob("*token*.j*"):
            shutil.copy(file, tmp_path / "model")

    put()
    return put


def printed(command: str, path: Path, *options: str) -> str:
    done = CliRunner().invoke(cli, [command, str(path), *options])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_job_is_fitted_once_and_its_promise_is_told(job_file, put_model, cache):
    path = job_file(RECORDS, **DEFAULT)
    assert "default, not calibrated for this model: about" in printed("validate", path)
    assert "not calibrated" in printed("plan", path) and not cache.exists()
    found = run(path)
    [kept] = cache.iterdir()
    record = json.loads(kept.read_text())
    assert record["preset"] == "default" and record["kl"] <= PROMISES["default"].limit
    manifest = found.run.read_manifest()
    assert manifest.cache_policy == record["fitted"] and manifest.cache_preset == "default"
    assert manifest.semantic["cache.promise"] == "kl 0.003" and manifest.semantic["cache policy"]
    summary = load_summary(found.run.path)
    longest = output(found.run)["kvb_prompt_tokens"].max()
    line = f"preset default: {manifest.fitted}, longest row {longest:,}"
    assert "of at most 0.003, measured at" in line and line in render(summary)
    assert "cache KL" in found.run.page.read_text() and summary["calibrating_s"] > 0
    for command in ("validate", "plan"):
        assert f"default, {manifest.fitted}" in printed(command, path)
    assert load_summary(run(path, new_run=True).run.path)["calibrating_s"] == 0


def test_another_model_in_its_place_takes_more_bytes_or_is_refused(job_file, put_model, cache):
    path = job_file(RECORDS, **DEFAULT)
    mild = run(path).run.read_manifest().fitted
    put_model(output=1.0)
    harsh = run(path, new_run=True).run.read_manifest().fitted
    assert harsh.kv_ratio > mild.kv_ratio and harsh.holds and mild.holds
    put_model(output=1.0, sharpness=4.0)
    before = set(Path("runs/test").iterdir())
    with pytest.raises(
        LimitExceeded, match=r"default cannot keep its promise on model model: .* set cache\.preset"
    ):
        run(path, new_run=True)
    assert set(Path("runs/test").iterdir()) == before, "no run begins"
    assert run(path, "cache.tiers=[[0.3,4,4],[0.7,3,2]]", new_run=True).is_new, (
        "as it is, told and not refused"
    )
    assert "KL" in str(load_summary(Path("runs/test"))["cache_loss"])


def test_runs_that_go_on_or_reuse_rows_keep_the_policy(job_file, put_model, cache, monkeypatch):
    path = job_file(RECORDS, **DEFAULT, input={"incremental": True})
    first = run(path).run
    fitted = first.read_manifest().fitted
    shutil.rmtree(cache)  # on another machine, say
    monkeypatch.setattr("kvbatch.estimate.calibration.replace", None)  # nothing is fitted again
    Path("in.jsonl").write_text(Path("in.jsonl").read_text() + '{"id": 99, "text": "one more fox"}\n')
    second = run(path).run
    assert second.path != first.path and second.read_manifest().fitted == fitted
    assert load_summary(second.path)["carried"] == len(RECORDS) and not cache.exists()
    manifest = second.read_manifest()
    assert manifest.semantic["cache policy"] == first.read_manifest().semantic["cache policy"]
    (second.path / "_SUCCESS").unlink()
    with pytest.raises(JobChanged, match=r"cache\.promise"):
        run(path, "cache.preset=logs", resume=RunDirectory(second.path))


def test_a_model_without_finite_logits_is_named(job_file, put_model, cache):
    put_model(output=float("inf"))
    with pytest.raises(ModelUnavailable, match="model model: its logits are not finite numbers"):
        run(job_file(RECORDS, **DEFAULT))


def test_calibrate_fits_presets_beforehand(job_file, put_model, cache):
    path = job_file(RECORDS, **DEFAULT)
    text = printed("calibrate", Path("model"), "--preset", "default", "--dtype", "float32")
    assert text.splitlines()[-1].startswith("default") and "measured at" in text
    assert "not calibrated" not in printed("validate", path), "the job finds what the command kept"
    found = CliRunner().invoke(
        cli, ["calibrate", "model", "--preset", "logs", "--dtype", "float32", "--json"]
    )
    presets = json.loads(found.stdout)["presets"]
    assert presets["logs"]["holds"] and presets["logs"]["limit"] == PROMISES["logs"].limit
    put_model(output=1.0, sharpness=4.0)
    refused = CliRunner().invoke(cli, ["calibrate", "model", "--preset", "default", "--dtype", "float32"])
    assert refused.exit_code == 65 and "its promise cannot be kept" in refused.output
    assert load_job(path).cache.promise == PROMISES["default"]
