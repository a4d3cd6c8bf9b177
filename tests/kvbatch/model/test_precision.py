"""The precision of `model.dtype: auto`: by measurement, kept, and the same for rows that stand side by side."""

import pytest

from kvbatch.job_file.load import load_job
from kvbatch.model import precision
from kvbatch.model.precision import choose_precision
from kvbatch.run.entry import run_job
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.find_runs import open_run
from tests.kvbatch.fakes import Backwards


@pytest.fixture
def rates(tmp_path, monkeypatch):
    """Measure what the test says; counts how often that is asked for."""
    monkeypatch.setenv("KVBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(precision, "_machine", lambda: {"cpu": "of a test"})
    found = {"bfloat16": 100.0, "float32": 100.0, "asked": 0}

    def measure(weight_quant):
        found["asked"] += 1
        return {name: found[name] for name in precision.NAMES}

    monkeypatch.setattr(precision, "_measure", measure)
    return found


@pytest.mark.parametrize(
    ("bfloat16", "chosen"), [(200.0, "bfloat16"), (90.0, "bfloat16"), (89.0, "float32"), (50.0, "float32")]
)
def test_the_faster_one_and_bfloat16_within_a_tenth(rates, bfloat16, chosen):
    rates["bfloat16"] = bfloat16
    found = choose_precision("auto", "cpu")
    assert found.dtype == chosen and found.gflops == {"bfloat16": bfloat16, "float32": 100.0}
    assert f"bfloat16 {bfloat16:.0f} GFLOP/s, float32 100 GFLOP/s" in str(found)
    rates["bfloat16"] = 1.0
    assert choose_precision("auto", "cpu") == found and rates["asked"] == 1, "kept in the user's cache"
    assert choose_precision("float32", "cpu").dtype == "float32" and rates["asked"] == 1
    assert choose_precision("auto", "cuda").dtype == "bfloat16" and rates["asked"] == 1


def test_a_cache_that_cannot_be_used_is_no_failure(rates, tmp_path, monkeypatch):
    choose_precision("auto", "cpu")
    [file] = (tmp_path / "cache").rglob("*.json")
    for damaged in ("", "[]", "{}", '{"gflops": {"bfloat16": 0, "float32": "x"}}'):
        file.write_text(damaged)
        assert choose_precision("auto", "cpu").dtype == "bfloat16"
    assert rates["asked"] == 5
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVBATCH_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        assert choose_precision("auto", "cpu").dtype == "bfloat16"
    assert rates["asked"] == 7


def dtype_of(run: RunDirectory) -> str:
    manifest = run.read_manifest()
    assert manifest.precision["dtype"] == manifest.model.dtype
    return manifest.model.dtype


def test_a_choice_holds_on_and_a_new_run_chooses_anew(job_file, rates, tmp_path):
    rows = [{"id": str(n), "text": f"row {n}"} for n in range(4)]
    path = job_file(rows, model={"dtype": "auto"}, input={"incremental": True})
    asked = []

    class Stopped(Backwards):
        def generate(self, requests):
            for result in super().generate(requests):
                yield result
                raise KeyboardInterrupt

    def engine(make):
        def made(model, config):
            asked.append(str(model.dtype))
            return make()

        return made

    with pytest.raises(KeyboardInterrupt):
        run_job(load_job(path), make_llm=engine(Stopped))
    first = open_run(tmp_path / "runs/test")
    rates |= {"bfloat16": 10.0}
    for file in (tmp_path / "cache").rglob("*.json"):  # another machine
        file.unlink()
    run_job(load_job(path), make_llm=engine(Backwards))
    assert open_run(tmp_path / "runs/test").run_id == first.run_id and dtype_of(first) == "bfloat16"
    job_file([*rows, {"id": "9", "text": "a new one"}], model={"dtype": "auto"}, input={"incremental": True})
    second = run_job(load_job(path), make_llm=engine(Backwards)).run
    assert dtype_of(second) == "bfloat16" and second.read_summary()["carried"] == 4
    third = run_job(load_job(path), new_run=True, make_llm=engine(Backwards)).run
    assert dtype_of(third) == "float32" and third.read_summary()["carried"] == 0
    assert asked == ["torch.bfloat16"] * 3 + ["torch.float32"]


def test_both_products_can_be_timed():
    import torch

    from engine.product_speed import product_speeds

    for quant in (None, "int8"):
        speeds = product_speeds((torch.bfloat16, torch.float32), quant)
        assert all(speed > 0 for speed in speeds.values()) and len(speeds) == 2
