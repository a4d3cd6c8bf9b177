"""Whole runs on a tiny model: rows keep their place, and the engine's bytes are the plan's."""

import hashlib
import io
import json
import os
import shutil
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbatch.commands.validate import findings_of
from kvbatch.errors import (
    InputError,
    JobFileError,
    KvbatchError,
    LimitExceeded,
    ModelUnavailable,
    OutputError,
)
from kvbatch.job_file.load import load_job
from kvbatch.prompts.rendering import REPEAT
from kvbatch.prompts.sampling import row_seed
from kvbatch.report.summary import load_summary
from kvbatch.report.summary_text import render
from kvbatch.run.entry import run_job
from kvbatch.run_dir.event_log import RunLog
from kvbatch.run_dir.find_runs import open_run
from tests.engine.models.tiny_models import save_tiny_model
from tests.kvbatch.fakes import Backwards
from tests.kvbatch.helpers import RECORDS, output, run


def test_int8_weights_run_and_are_noted(job_file):
    outcome = run_job(load_job(job_file(RECORDS[:2], model={"weight_quant": "int8"})), stream=io.StringIO())
    table = pl.read_parquet(outcome.run.path / "shards" / "*.parquet")
    assert table["kvb_status"].to_list() == ["ok", "ok"]
    assert json.loads(outcome.run.manifest.read_text())["model"]["weight_quant"] == "int8"


def test_head_that_is_not_the_embedding_is_said_and_noted(job_file, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    said = io.StringIO()
    job = load_job(job_file(RECORDS[:1], model={"path": str(model)}))
    found = run_job(job, stream=said, make_llm=lambda model, config: Backwards()).run
    (note,) = found.read_manifest().model.notes
    assert "tie_word_embeddings" in note and f"warning: model {model}: {note}" in said.getvalue()
    assert ("model", "note", note) in [
        (each.about, each.kind, each.message) for each in findings_of(Path("job.yaml"), ())
    ]


@pytest.mark.parametrize("incremental", [False, True])
def test_edit_of_the_model_that_keeps_size_and_time_is_seen(job_file, tiny_model, tmp_path, incremental):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    path = job_file(RECORDS[:3], model={"path": str(model)}, input={"incremental": incremental})
    engine = {"make_llm": lambda model, config: Backwards()}
    run(path, **engine)
    assert not run(path, **engine).is_new
    weights = model / "model.safetensors"
    found = weights.stat()
    with weights.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    again = run(path, **engine)
    assert again.is_new and again.run.read_summary()["carried"] == 0


def test_model_that_changes_between_its_check_and_its_loading_is_refused(job_file, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")

    def make_llm(handle, config):
        os.utime(model / "model.safetensors")
        return handle.decoder

    with pytest.raises(ModelUnavailable, match="changed since the job began"):
        run(job_file(RECORDS[:1], model={"path": str(model)}), make_llm=make_llm)


def test_the_engine_is_told_how_to_ask_for_a_repetition(job_file):
    def make_llm(model, config):
        assert model.tokenizer.decode(config.repeat_token_ids) == REPEAT
        return Backwards()

    run(job_file(RECORDS), make_llm=make_llm)


def test_rows_come_out_in_input_order_whatever_the_engine_does(job_file):
    records = [
        *RECORDS[:5],
        {"id": "null", "text": None, "n": 5},
        *RECORDS[5:],
        {"id": "long", "text": "x y " * 900},
    ]
    path = job_file(records, input={"passthrough": ["n"]}, output={"shard_rows": 4})
    engine = Backwards(fail=(1,))
    found = run(path, make_llm=lambda model, config: engine).run
    rows = output(found)
    assert rows["id"].to_list() == [record["id"] for record in records]
    assert rows["n"].to_list() == [record.get("n") for record in records]
    running = [i for i in range(13) if i not in (1, 5, 12)]
    assert [rows["output"][i] for i in running] == [f"answer {i}" for i in running]
    assert rows["kvb_status"].to_list() == ["ok", "error", *["ok"] * 3, "rejected", *["ok"] * 6, "error"]
    assert rows["output"][1] is None and rows["kvb_error_code"][1] == "engine"
    assert rows["kvb_error_code"][12] == "too_long" and rows["kvb_attempts"].to_list()[12] == 0
    assert rows["kvb_kv_kept_ratio"][0] == 0.5
    assert len(rows["kvb_seed"].unique()) == 13 and rows["kvb_seed"][0] == row_seed(0, "r0")
    assert [request.sampling.seed for request in engine.requests if request.request_id.row == 0] == [
        row_seed(0, "r0")
    ]
    # failures are copied with their input
    letters = pl.concat([pl.read_parquet(p) for p in sorted((found.path / "deadletter").glob("*.parquet"))])
    assert letters["id"].to_list() == ["r1", "null", "long"]
    assert letters["kvb_input_text"].to_list() == [RECORDS[1]["text"], None, "x y " * 900]
    assert letters["kvb_input_row"].to_list() == [2, 6, 13]
    schemas = {pq.read_schema(p).remove_metadata() for p in found.shards.glob("*.parquet")}
    assert len(schemas) == 1, "all shards have one schema, whatever their rows"


def test_the_real_engine_keeps_the_plans_promise(job_file):
    found = run(job_file(RECORDS, output={"shard_rows": 5}), "engine.memory_budget=4MiB").run
    rows, summary = output(found), load_summary(found.path)
    assert rows["kvb_status"].to_list() == ["ok"] * 11
    assert rows["kvb_completion_tokens"].to_list() == [8] * 11
    assert (rows["kvb_cached_prompt_tokens"] > 0).all()
    assert summary["kv_peak_bytes_measured"] == summary["kv_peak_bytes_predicted"]
    assert summary["kv_allocated_bytes"] == summary["kv_peak_bytes_predicted"]
    assert summary["prompt_tokens"] == rows["kvb_prompt_tokens"].sum()
    plan = pl.read_parquet(found.path / "plan.parquet")
    assert plan["prompt_tokens"].to_list() == rows["kvb_prompt_tokens"].to_list()
    assert (plan["predicted_kv_bytes"] == rows["kvb_kv_peak_bytes"]).all()
    again = run(Path("job.yaml"), "output.dir=other", "output.shard_rows=3", "engine.max_sequences=1").run
    assert output(again)["output"].to_list() == rows["output"].to_list(), "packing does not change the output"


def test_run_directory(job_file):
    found = run(job_file(RECORDS)).run
    names = {str(path.relative_to(found.path)) for path in found.path.rglob("*") if path.is_file()}
    assert names >= {
        "manifest.json",
        "job.resolved.yaml",
        "plan.parquet",
        "stats/bins.parquet",
        "summary.json",
    }
    assert names >= {"shards/part-00000.parquet", "logs/run.jsonl", "_SUCCESS"}
    assert not any(name.endswith(".tmp") for name in names)
    assert (found.path.parent / "latest").readlink() == Path(found.run_id)
    manifest = found.read_manifest()
    assert manifest.num_rows == 11 and len(manifest.text_sha256["in.jsonl"]) == 64
    assert load_job(found.path / "job.resolved.yaml") == load_job(Path("job.yaml"))
    log = found.log.read_text()
    assert [json.loads(line)["event"] for line in log.splitlines()] == [
        "planned",
        "loaded",
        "shard written",
        "finished",
    ]
    assert "fox" not in log
    text = render(load_summary(found.path.parent))
    assert "11 ok, 0 errors, 0 rejected" in text and str(found.shards) in text


def test_nothing_new(job_file, tiny_model):
    path = job_file(RECORDS[:2])
    first = run(path)
    assert first.is_new and not run(path).is_new
    assert run(path).run.path == first.run.path
    assert run(path, new_run=True).is_new
    assert not run(path, "engine.max_sequences=2").is_new, "an operational key changes no output"
    assert run(path, "generation.seed=1").is_new
    assert run(path).is_new, "latest is another job's run now"
    os.utime("in.jsonl", ns=(1, 1))
    assert not run(path).is_new, "a touched file is the same file"
    text = Path("in.jsonl").read_text()
    Path("in.jsonl").write_text(text.replace("fox", "cat"))
    assert run(path).is_new
    (run(path).run.path / "_SUCCESS").unlink()
    assert run(path).is_new, "a run without _SUCCESS is not to be relied upon"


def test_more_memory_for_rows_that_did_not_fit_is_new(job_file):
    rows = [{"id": "a", "text": "x y " * 90}, {"id": "b", "text": "x"}]
    path = job_file(rows, engine={"memory_budget": "80KB"})
    assert output(run(path).run)["kvb_error_code"].to_list() == ["over_budget", None]
    assert not run(path).is_new
    more = run(path, "engine.memory_budget=64MiB")
    assert more.is_new and output(more.run)["kvb_status"].to_list() == ["ok", "ok"]
    assert not run(path, "engine.memory_budget=32MiB").is_new


def test_passthrough_types_that_polars_does_not_know(job_file):
    path = job_file([], input={"path": "in.parquet", "passthrough": "all"})
    times = pa.array([1, 2], pa.timestamp("us", "+05:30"))
    pq.write_table(pa.table({"id": ["a", "b"], "text": ["fox", "dog"], "time": times}), "in.parquet")
    found = run(path).run
    assert pq.read_table(found.shards / "part-00000.parquet")["time"].combine_chunks() == times
    assert load_summary(found.path)["ok"] == 2


def test_a_corrupt_model_is_told_before_any_document_is_read(job_file, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    weights = (model / "model.safetensors").read_bytes()
    path = job_file(RECORDS, model={"path": "model"})
    for content in (b"", weights[:100], weights[:-10], b"\xff" * 100):
        (model / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelUnavailable, match="truncated or corrupt"):
            run(path)
    assert [path.name for path in Path("runs/test").iterdir()] == ["LOCK"], "no run was begun"


def test_a_full_disk_is_told_as_one(tmp_path):
    log = RunLog(Path("/dev/full"))
    with pytest.raises(OutputError, match="No space left"):
        log.event("planned")
    log.failure(ValueError())
    log.close()


def test_a_job_where_nothing_can_run_loads_no_model(job_file):
    def forbidden(model, config):
        raise AssertionError("weights were loaded")

    with pytest.raises(LimitExceeded, match="none of 2 rows") as raised:
        run(job_file(['{"id": "a", "text": ""}', "no json"]), make_llm=forbidden)
    assert raised.value.exit_code == 65
    found = open_run(Path("runs/test"))
    assert not (found.path / "_SUCCESS").exists()
    assert output(found)["kvb_status"].to_list() == ["rejected"] * 2
    assert load_summary(found.path)["rejected"] == 2


@pytest.mark.parametrize(
    ("old", "new", "time_ns", "match"),
    [
        ("3 fox", "3 cat", 0, r"in\.jsonl, row 4 "),
        ('"n": 3', '"n": 4', 1, r"in\.jsonl: the input changed"),
        ('"n": 3', '"n": 30', 1, r"in\.jsonl: the input changed"),
    ],
)
def test_input_that_changes_under_the_run_is_noticed(job_file, old, new, time_ns, match):
    def change(model, config):
        file = Path("in.jsonl")
        stat = file.stat()
        file.write_text(file.read_text().replace(old, new, 1))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + time_ns))
        return Backwards()

    with pytest.raises(InputError, match=match):
        run(job_file(RECORDS, input={"passthrough": ["n"]}), make_llm=change)


def test_a_log_may_grow_under_the_run(job_file):
    def grow(model, config):
        with open("in.jsonl", "a", encoding="utf-8") as file:
            file.write('\n{"id": "new", "text": "fox", "n": 1}\n{"id": "half')
        return Backwards()

    path = job_file(RECORDS)
    before = hashlib.sha256(Path("in.jsonl").read_bytes()).hexdigest()
    found = run(path, make_llm=grow).run
    assert output(found)["id"].to_list() == [record["id"] for record in RECORDS]
    assert list(found.read_manifest().input_sha256.values()) == [before]


def test_what_does_not_go_together_is_said_before_weights_load(job_file, tmp_path):
    def forbidden(model, config):
        raise AssertionError("weights were loaded")

    path = job_file(RECORDS)
    for override, kind, match in [
        ("model.path=/nowhere", ModelUnavailable, "/nowhere"),
        ("input.path=nowhere.jsonl", InputError, "nowhere.jsonl"),
        ("generation.max_new_tokens=600", JobFileError, "leaves no room"),
        ("engine.memory_budget=1KiB", JobFileError, "; increase engine.memory_budget$"),
        ("model.max_context=30", JobFileError, "leaves no room"),
    ]:
        with pytest.raises(kind, match=match):
            run(path, override, make_llm=forbidden)
    assert not list(Path("runs/test").glob("*/")), "no run directory for a job that never started"
    with pytest.raises(JobFileError, match=r"prompt\.template uses \{title\}"):
        run(path, "input.passthrough=all", "prompt.template='{title} {text}'", make_llm=forbidden)


def test_an_internal_error_names_its_log_and_tells_it_no_text(job_file):
    class Broken(Backwards):
        def generate(self, requests):
            for _ in requests:
                raise ValueError("secret fox")
            yield from ()

    with pytest.raises(KvbatchError, match=r"ValueError.*logs/run\.jsonl") as caught:
        run(job_file(RECORDS), make_llm=lambda model, config: Broken())
    assert caught.value.exit_code == 70
    log = Path("runs/test/latest/logs/run.jsonl").read_text()
    assert '"kind": "ValueError"' in log and "secret" not in log
    assert load_summary(Path("runs/test"))["status"] == "incomplete"


@pytest.mark.parametrize("preset", ["none", "logs", "default"])
def test_statistics_of_the_cache(job_file, tmp_path, tiny_model, preset):
    save_tiny_model(tmp_path / "model", "llama", vocab_size=320, max_position_embeddings=512)
    for file in tiny_model.glob("*token*.j*"):
        shutil.copy(file, tmp_path / "model")
    records = [{"id": n, "text": f"{n} fox " * (60 + 5 * n)} for n in range(5)]
    cache = {"preset": preset, "tail_tokens": 0}  # these documents are little more than a tail
    if preset == "logs":  # as it is, whatever the model would need
        cache["keep_ratio"], cache["quant_bits"] = 0.3, 4
    elif preset == "default":
        cache["tiers"] = [[0.3, 4, 4], [0.7, 3, 2]]
    found = run(job_file(records, model={"path": "model"}, cache=cache)).run
    rows, summary = output(found), load_summary(found.path)
    steps = pl.read_parquet(found.path / "stats" / "steps.parquet")
    assert steps["kv_used_bytes"].max() == summary["kv_peak_bytes_measured"]
    assert (steps["kv_reserved_bytes"] >= steps["kv_used_bytes"]).all()
    assert (
        steps["num_tokens"].sum()
        == (
            rows["kvb_prompt_tokens"] - rows["kvb_cached_prompt_tokens"] + rows["kvb_completion_tokens"] - 1
        ).sum()
    )
    text = render(summary)
    assert f"of {summary['kv_pool_bytes'] / 1024:,.1f} KiB" in text
    full, kept = rows["kvb_kv_full_bytes"].sum(), rows["kvb_kv_kept_bytes"].sum()
    assert summary["kv_kept_ratio"] == kept / full
    lanes_file = found.path / "stats" / "kv_lanes.parquet"
    if preset == "none":
        assert not lanes_file.exists() and summary["kv_layers"] == [] and kept == full
        assert "KV kept" not in text
        return
    lanes = pl.read_parquet(lanes_file)
    assert list(zip(lanes["layer"], lanes["head"], strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    seen = (rows["kvb_prompt_tokens"] + rows["kvb_completion_tokens"] - 1).sum()
    assert lanes["tokens_seen"].to_list() == [seen] * 4
    tiers = lanes.explode("tiers").unnest("tiers")
    in_tiers = tiers.group_by("layer", "head", maintain_order=True).agg(pl.col("tokens").sum())["tokens"]
    assert (lanes["whole_tokens"] + in_tiers == lanes["tokens_kept"]).all()
    assert lanes["kv_bytes"].sum() <= kept
    assert summary["kv_kept_tokens_ratio"] == lanes["tokens_kept"].sum() / (4 * seen)
    assert [layer["kept_ratio_min"] for layer in summary["kv_layers"]] == [
        lanes["kept_ratio"][:2].min(),
        lanes["kept_ratio"][2:].min(),
    ]
    if preset == "logs":
        assert summary["kv_kept_tokens_ratio"] < 1 and "of its heads, % of the tokens" in text
        assert set(zip(tiers["key_bits"], tiers["value_bits"], strict=True)) == {(4, 4)}
    else:
        assert summary["kv_kept_tokens_ratio"] == 1 and "of its heads, bits an element" in text
        assert list(zip(tiers["key_bits"], tiers["value_bits"], strict=True))[:2] == [(4, 4), (3, 2)]
        assert 0 < summary["kv_bits_per_element"] < 16
