"""`kvbatch cache`: what is listed is what is there, and nothing but kvbatch's own is removed."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from engine.calibration import keep_file
from engine.kept_policies import PolicyKey
from kvbatch.cache_folder.contents import KINDS
from kvbatch.cli import cli
from kvbatch.estimate.step_time import keep_speed
from kvbatch.model import precision
from kvbatch.model.cache import cached_model, remove_model
from kvbatch.model.file_hashes import FileHashes
from kvcache.config import KVCacheConfig
from kvcache.kernels.cpu import build

DAY_S = 86400
POLICY = {
    "model": "bb2b1fa9becc907527d1",
    "preset": "default",
    "dtype": "float32",
    "device": "cpu",
    "kl": 0.0028,
    "kv_ratio": 0.1296,
    "created": "2026-12-01T13:04:27+00:00",
    "seconds": 40,
    "cpu": "a CPU",
}
DAMAGED = ["", "[]", "[" * 100_000, '"\\ud800"', "{}", json.dumps(POLICY | {"kl": "low"})]
DAMAGED += [json.dumps(POLICY | {"kv_ratio": 10**400}), json.dumps(POLICY | {"kl": float("nan")})]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder without anything in it."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("KVBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def call(*arguments: str, code: int = 0, **options) -> str:
    done = CliRunner().invoke(cli, ["cache", *arguments], **options)
    assert done.exit_code == code, done.output
    return done.output


def listed() -> dict:
    return json.loads(call("list", "--json"))


def put(path: Path, text: str = "1234", days: int = 0) -> Path:
    """Write a file that is so many days old; it makes a directory of its parent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - days * (DAY_S + 60),) * 2)
    return path


def name(digit: str = "0") -> str:
    return digit * 20


def convert(out: Path) -> None:
    (out / "config.json").write_text("{}")


def test_whatever_is_written_to_the_cache_has_a_kind(cache, tmp_path, monkeypatch):
    cached_model(cache, f"small-{'0' * 12}", convert, look_only=False)
    weights = put(tmp_path / "weights", days=1)
    FileHashes(cache, lambda: time.time_ns() + 10**10).of([weights])
    keep_file(PolicyKey("m", "float32", None, "cpu", "default").place, lambda path: put(Path(path)))
    keep_file(Path("calibration", f"{name()}.pt"), lambda path: put(Path(path)))  # as `measured_once`
    monkeypatch.setattr(precision, "_machine", lambda: {"cpu": "of a test"})
    precision.choose_precision("auto", "cpu", measure=lambda quant: {"bfloat16": 1.0, "float32": 2.0})
    files = SimpleNamespace(revision="r")
    opened = SimpleNamespace(
        model=SimpleNamespace(files=files, dtype="float32", device="cpu"),
        job=SimpleNamespace(model=SimpleNamespace(weight_quant=None)),
    )
    config = SimpleNamespace(cache=KVCacheConfig(), step_tokens=256, deterministic=False)
    keep_speed(opened, config, SimpleNamespace(num_steps=99, steps_s=1.0, coefficients=lambda: (1.0,)), 2.0)
    try:
        source = put(tmp_path / "sources" / "one.cpp", 'extern "C" int one() { return 1; }')
        build.compile_and_load(build.find_compiler(), build.cache_folder(), sources=source.parent)
    except FileNotFoundError:  # no compiler here
        put(cache / "kernels" / f"{name()}-{name()}.so")

    found = listed()
    assert {kind: about["num_entries"] for kind, about in found["kinds"].items()} == dict.fromkeys(
        [kind.name for kind in KINDS], 1
    )
    assert found["not_counted"] == [] and found["num_entries"] == len(KINDS)
    assert all(kind.loss in call("list") for kind in KINDS)
    assert f"removed      {len(KINDS)} entries" in call("clear", "--yes")
    left = [path for path in cache.rglob("*") if not path.is_dir()]
    assert left and all(path.suffix == ".lock" for path in left), "a waiting process may have them open"


def test_policies_are_told_and_damaged_ones_break_nothing(cache):
    put(cache / "policies" / f"{name('a')}.json", json.dumps(POLICY), days=3)
    question = {key: value for key, value in POLICY.items() if key != "kl"} | {
        "nll": 0.03,
        "preset": "x\x1b[2J",
    }
    put(cache / "policies" / f"{name('b')}.json", json.dumps(question))
    for digit, text in enumerate(DAMAGED):
        put(cache / "policies" / f"{name(str(digit))}.json", text)
    text = call("list")
    told = "default for model bb2b1fa9becc907527d1 (float32, cpu): 13.0% of the bytes, KL 0.0028, "
    assert told in text and "bytes, 3d old" in text
    assert r"x\u001b[2J for model" in text and "NLL of the answer +0.0300" in text
    assert text.count("no policy that can be read") == len(DAMAGED)
    entries = {entry["name"][0]: entry for entry in listed()["kinds"]["policies"]["entries"]}
    assert entries["a"]["policy"] == POLICY and entries["a"]["age_s"] // DAY_S == 3
    assert entries["0"]["policy"] is None and len(entries) == len(DAMAGED) + 2


def test_what_is_behind_a_link_or_not_of_kvbatch_stays(cache, tmp_path):
    outside = [put(tmp_path / "outside" / f"{name(digit)}.pt").parent for digit in "12"][0]
    own_model = put(tmp_path / "elsewhere" / "config.json").parent
    linked, whole = (cache / "models" / f"{stem}-{'0' * 12}-v1" for stem in ("linked", "whole"))
    (cache / "models").mkdir()
    linked.symlink_to(own_model)
    (cache / "models" / f".{whole.name}-other").symlink_to(own_model)
    (cache / "calibration").mkdir()
    (cache / "calibration" / f"{name('1')}.pt").symlink_to(outside / f"{name('1')}.pt")
    (cache / "precision").symlink_to(outside)
    put(cache / "models" / "my-model-v1" / "config.json")
    put(cache / "speed" / "notes.json")
    put(cache / "photos" / f"{name()}.json")
    foreign = {*tmp_path.rglob("*")}
    put(whole / "config.json")
    put(linked.with_name(f".{linked.name}-killed") / "config.json")
    put(cache / "calibration" / f"{name('3')}.pt")
    assert (listed()["num_entries"], listed()["num_bytes"], len(listed()["not_counted"])) == (3, 12, 7)
    text = call("clear", "--yes")
    assert text.count("a link, not followed") == 4 and text.count("not written by kvbatch") == 3
    assert "removed      3 entries, 12 bytes" in text
    assert {path for path in tmp_path.rglob("*") if path.suffix != ".lock"} == foreign


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--dry-run"], ""),
        (["--dry-run", "--yes"], ""),
        (["--older-than", "7d", "--yes"], "bd"),
        (["--kind", "speed", "--kind", "hashes", "--yes"], "cd"),
        (["--kind", "speed", "--older-than", "7d", "--yes"], "d"),
        (["--older-than", "1000d"], ""),
        (["--yes"], "abcd"),
    ],
)
def test_clear_removes_what_was_chosen(options, gone, cache):
    files = {
        "a": put(cache / "policies" / f"{name('a')}.json", days=1),
        "b": put(cache / "policies" / f"{name('b')}.json", days=8),
        "c": put(cache / "speed" / f"{name('c')}.json", days=1),
        "d": put(cache / "speed" / f"{name('d')}.json", days=8),
    }
    text = call("clear", *options)
    assert "".join(key for key, file in files.items() if not file.exists()) == gone
    chosen = "abcd" if "--dry-run" in options else gone
    verb = "dry run" if "--dry-run" in options else "removed"
    assert (
        f"{verb:<12} {len(chosen)} entr{'y' if len(chosen) == 1 else 'ies'}, {4 * len(chosen)} bytes" in text
    )


def test_clear_asks_first(cache, monkeypatch):
    file = put(cache / "speed" / f"{name()}.json")
    assert "add --yes" in call("clear", code=2) and file.exists()
    monkeypatch.setattr("kvbatch.commands.cache._is_terminal", lambda: True)
    for answer in ("n\n", ""):
        text = call("clear", input=answer)
        assert "Remove 1 entry, 4 bytes?" in text and "removed      nothing" in text and file.exists()
    call("clear", input="y\n")
    assert not file.exists()


def test_a_model_that_is_being_made_stays_and_the_rest_of_a_killed_one_goes(cache):
    def convert_while_another_process_clears(out: Path) -> None:
        convert(out)
        (model,) = listed()["kinds"]["models"]["entries"]
        assert (model["state"], model["num_bytes"]) == ("busy", 2)
        text = call("clear", "--yes")
        assert "a process is making it" in text and "removed      0 entries" in text
        assert not remove_model(cache / "models" / model["name"]), "nor if it began after the listing"

    key = f"small-{'0' * 12}"
    final = cached_model(cache, key, convert_while_another_process_clears, look_only=False)
    assert (final / "config.json").exists()
    final.rename(final.with_name(f".{final.name}-killed"))
    fresh, old = (put(cache / "kernels" / f"tmp0000000{days}" / "one.o", days=days) for days in (0, 1))
    os.utime(old.parent, (0, 0))
    states = [
        entry["state"] for kind in ("models", "kernels") for entry in listed()["kinds"][kind]["entries"]
    ]
    assert states == ["unfinished", "busy", "unfinished"]
    assert "removed      2 entries" in call("clear", "--yes")
    assert fresh.exists() and not old.parent.exists()
    assert [path.name for path in (cache / "models").iterdir()] == [f".{final.name}.lock"]
    assert cached_model(cache, key, convert, look_only=False) == final


def test_a_folder_that_is_missing_or_cannot_be_read_or_written(cache, monkeypatch):
    file = put(cache / "speed" / f"{name()}.json")
    put(cache / "hashes" / f"{'0' * 32}.json")

    def unlink(path: Path) -> None:
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        os.unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        text = call("clear", "--yes", code=73)
    assert f"{file} cannot be removed: Permission denied" in text and "removed      1 entry" in text
    monkeypatch.setenv("KVBATCH_CACHE", str(cache / "nowhere"))
    assert all("nothing is cached" in call(command) for command in ("list", "clear"))
    assert listed()["exists"] is False
    monkeypatch.setenv("KVBATCH_CACHE", str(file))
    assert "Not a directory" in call("list", code=66)
    monkeypatch.delenv("KVBATCH_CACHE")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert all("no home directory" in call(command, code=66) for command in ("list", "clear"))
