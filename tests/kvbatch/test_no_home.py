"""A user without a home directory: what would be kept for him is not, and what must be names the remedy."""

from pathlib import Path

import pytest

from kvbatch.errors import ModelUnavailable
from kvbatch.job_file.load import load_job
from kvbatch.model import precision
from kvbatch.model.source import resolve_model
from kvbatch.run.entry import run_job
from kvcache.user_cache import user_cache
from tests.kvbatch.fakes import Backwards


@pytest.fixture
def homeless(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("KVBATCH_CACHE", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr(precision, "_machine", lambda: {"cpu": "of a test"})
    monkeypatch.setattr(precision, "_measure", lambda quant: {"bfloat16": 1.0, "float32": 2.0})


def test_a_job_on_a_local_model_runs(job_file, homeless):
    path = job_file([{"id": "1", "text": "fox"}], model={"dtype": "auto"}, output={"dir": "~/runs"})
    run = run_job(load_job(path), make_llm=lambda *_: Backwards()).run
    assert run.is_success and run.path.parent == Path("~/runs"), (
        "a directory of that name, as a shell would have it"
    )


def test_a_model_to_convert_says_what_to_set(tmp_path, homeless):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelUnavailable, match="set KVBATCH_CACHE to a directory"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_the_cache_is_where_it_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    for given, place in {
        "": "/home/someone/.cache/kvbatch",
        "~/k": "/home/someone/k",
        "k": f"{tmp_path}/k",
    }.items():
        monkeypatch.setenv("KVBATCH_CACHE", given)
        assert user_cache() == Path(place)
