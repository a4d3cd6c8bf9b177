"""Values from the environment: names in files and messages, never what they stand for, and a change is noticed."""

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbatch.cli import cli
from kvbatch.errors import JobChanged, JobFileError
from kvbatch.estimate.preview import plan_job
from kvbatch.job_file.environment import KEY_FILE, Environment, without_credentials
from kvbatch.job_file.load import load_job, to_yaml
from kvbatch.run.entry import run_job
from tests.kvbatch.fakes import Backwards

SECRET = "hush-4711"
ROWS = [{"id": str(n), "text": f"row {n}", "lang": "en"} for n in range(4)]


class Stopped(Backwards):
    def generate(self, requests):
        for result in super().generate(requests):
            yield result
            raise KeyboardInterrupt


@pytest.fixture
def path(job_file, monkeypatch):
    monkeypatch.setenv("KVB_TOKEN", SECRET)
    monkeypatch.setenv("KVB_ROWS", "in.jsonl")
    monkeypatch.setattr("kvbatch.run.entry.load_llm", lambda *_: Backwards())
    return job_file(
        ROWS,
        input={"path": "${KVB_ROWS}", "where": "lang != '${KVB_TOKEN}'", "incremental": True},
        prompt={"system": "Bearer ${KVB_TOKEN}; ${KVB_NOTHING:-nothing} costs $${{x}}."},
        generation={"stop": ["END", "${KVB_TOKEN}"], "max_new_tokens": "${KVB_NEW:-8}"},
        engine={"memory_budget": "${KVB_MEMORY:-64MiB}"},
        output={"dir": "runs/${KVB_ROWS}"},
    )


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, arguments)
    assert SECRET not in done.output and "hush" not in done.output
    return done.exit_code, done.output


def files_holding(text: str) -> list[str]:
    return [str(f) for f in Path("runs").rglob("*") if f.is_file() and text.encode() in f.read_bytes()]


def test_no_file_of_a_run_holds_a_value(path):
    plan_job(load_job(path))
    run = run_job(load_job(path)).run
    assert run.is_success and run.path.parent == Path("runs/in.jsonl")
    invoke("report", str(run.path))
    assert not files_holding(SECRET) and not files_holding("hush")
    kept = (run.path / "job.resolved.yaml").read_text()
    assert "Bearer ${KVB_TOKEN}; ${KVB_NOTHING:-nothing} costs $${{x}}." in kept
    assert "path: in.jsonl" in kept and "dir: runs/in.jsonl" in kept, "places stand as they are"
    key = run.path / KEY_FILE
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert (run.path / "../plan" / KEY_FILE).read_text() == key.read_text(), "the run took the plan over"
    semantic = json.loads(run.manifest.read_text())["semantic"]
    assert semantic["prompt.system"].startswith("${KVB_TOKEN}: keyed hash ")
    assert semantic["prompt.template"].startswith("Summarise"), "what the job file says itself stands there"


def test_the_same_value_is_the_same_job_and_another_one_is_not(path, monkeypatch):
    first = run_job(load_job(path))
    assert not run_job(load_job(path)).is_new
    Path("in.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in [*ROWS, {"id": "9", "text": "new", "lang": "en"}])
    )
    second = run_job(load_job(path)).run
    assert second.read_summary()["carried"] == 4, "a new run is compared by the key of the last"
    hashes = [json.loads(run.manifest.read_text())["config_hash"] for run in (first.run, second)]
    assert hashes[0] == hashes[1]
    monkeypatch.setenv("KVB_TOKEN", "another")
    third = run_job(load_job(path)).run
    assert third.read_summary()["carried"] == 0


def test_resume_reads_the_environment_again(path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        run_job(load_job(path), make_llm=lambda *_: Stopped())
    monkeypatch.setenv("KVB_TOKEN", "another-hush")
    code, said = invoke("resume", "runs/in.jsonl")
    assert code == 78 and "prompt.system: " in said and "${KVB_TOKEN}: keyed hash" in said
    assert "another-hush" not in said
    monkeypatch.delenv("KVB_TOKEN")
    code, said = invoke("resume", "runs/in.jsonl")
    assert code == 78 and "KVB_TOKEN" in said and "not set" in said
    monkeypatch.setenv("KVB_TOKEN", SECRET)
    key = next(Path("runs/in.jsonl").glob("2*")) / KEY_FILE
    whole = key.read_bytes()
    for damaged in (None, b"", whole[:40], whole.replace(whole[:1], b"f" if whole[:1] != b"f" else b"e", 1)):
        key.unlink() if damaged is None else key.write_bytes(damaged)
        code, said = invoke("resume", "runs/in.jsonl")
        assert code == 66 and KEY_FILE in said and "--new-run" in said
    key.write_bytes(whole)
    assert invoke("resume", "runs/in.jsonl")[0] == 0
    assert not files_holding(SECRET) and not files_holding("another-hush")


@pytest.mark.parametrize(
    "section",
    [
        {"prompt": {"template": "{text} ${KVB_BAD}"}},
        {"prompt": {"system": "say {${KVB_BAD}}"}},
        {"generation": {"max_new_tokens": "${KVB_BAD}"}},
        {"engine": {"memory_budget": "${KVB_BAD}"}},
        {"input": {"where": "${KVB_BAD} +"}},
        {"input": {"text_column": "${KVB_BAD}"}},
        {"cache": {"preset": "${KVB_BAD}"}},
        {"generation": {"json_schema": "${KVB_BAD}.json"}},
    ],
)
def test_no_message_holds_a_value(path, job_file, monkeypatch, section):
    monkeypatch.setenv("KVB_BAD", "hush{x}")
    path = job_file(ROWS, **section)
    invoke("validate", str(path))
    code, said = invoke("run", str(path))
    assert code and not files_holding("hush"), said


def test_places_lose_user_and_query_of_a_url():
    for url, shown in {
        "https://me:hush@host/a/b.jsonl?sig=hush&x=1": "https://host/a/b.jsonl",
        "s3://bucket/in/*.jsonl": "s3://bucket/in/*.jsonl",
        "pypi:a==1.0#sha256=ab": "pypi:a==1.0#sha256=ab",
        "docs/a?b@c.jsonl": "docs/a?b@c.jsonl",
    }.items():
        assert without_credentials(url) == shown


def test_a_url_from_the_environment_is_cut_in_files_and_messages(path, monkeypatch):
    monkeypatch.setenv("KVB_ROWS", "https://me:hush@host/in.jsonl?sig=hush")
    job = load_job(path)
    assert "https://host/in.jsonl" in to_yaml(job) and "hush" not in to_yaml(job)
    assert job.input.path == "https://me:hush@host/in.jsonl?sig=hush"
    code, said = invoke("run", str(path), "-s", "output.dir=runs/x")
    assert code == 66 and "https://host/in.jsonl" in said


def test_an_override_from_the_environment_keeps_its_name(path):
    job = load_job(path, ["prompt.system=Key ${KVB_TOKEN}"])
    assert job.prompt.system == f"Key {SECRET}" and "Key ${KVB_TOKEN}" in to_yaml(job)
    again = Path("again.yaml")
    again.write_text(to_yaml(job))
    assert load_job(again) == job
    again = Path("runs/in.jsonl/begun/job.resolved.yaml")  # of a run that had no key
    again.parent.mkdir(parents=True)
    again.write_text(to_yaml(job.with_environment(Environment())))
    (again.parent / "manifest.json").write_text("{}")
    assert load_job(again, ["generation.stop=['${KVB_TOKEN}']"]).generation.stop == (SECRET,)
    with pytest.raises(JobFileError, match="KVB_UNSET"):
        load_job(path, ["prompt.system=${KVB_UNSET}"])


def test_a_changed_job_is_told_by_names(path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        run_job(load_job(path), make_llm=lambda *_: Stopped())
    with pytest.raises(JobChanged, match="generation.seed: 0 before, 1 now"):
        run_job(load_job(path, ["generation.seed=1"]))


def test_a_job_may_take_all_it_says_from_the_environment(job_file, monkeypatch):
    """A fingerprint then holds hashes where numbers stood, which nothing that reads it may calculate with."""
    path = job_file(
        ROWS,
        input={"path": "in.jsonl", "limit": "${KVB_A:-3}", "incremental": "${KVB_B:-false}"},
        prompt={"system": "${KVB_C:-hello}", "chat": "${KVB_D:-auto}"},
        generation={"max_new_tokens": "${KVB_E:-4}", "seed": "${KVB_F:-1}", "ignore_eos": "${KVB_G:-true}"},
        long_document={"on_too_long": "${KVB_H:-truncate}"},
        limits={"max_cut_ratio": "${KVB_I:-1}", "row_retries": "${KVB_J:-0}"},
        engine={"memory_budget": "${KVB_K:-64MiB}", "deterministic": "${KVB_L:-true}"},
        output={"shard_rows": "${KVB_M:-2}"},
    )
    for command in (["plan", str(path)], ["run", str(path)], ["run", str(path)], ["status", "runs/test"]):
        assert invoke(*command)[0] == 0
    code, told = invoke("report", "runs/test")
    assert code == 0 and "by length: raise generation.max_new_tokens\n" in told
    assert invoke("retry", "runs/test", "--status", "length", "--max-new-tokens", "5")[0] == 0
