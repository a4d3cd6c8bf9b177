"""Compiled kernels in the user's cache: damaged ones are repaired, and a user without a cache has kernels too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache.kernels.cpu import build
from tests.kvcache.kernel_builds import needs_compiler

ROOT = Path(__file__).parents[3]
# A single small library stands for all of them.
SOURCE = 'extern "C" int kvb_answer() { return 42; }'


@pytest.fixture
def sources(tmp_path, monkeypatch):
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(build.tempfile, "tempdir", None)  # read anew
    build._warn.cache_clear()
    yield folder
    build._warn.cache_clear()


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "half", "flipped", "text"])
def test_a_damaged_library_is_compiled_again(sources, tmp_path, damage):
    cache = tmp_path / "cache"
    first = build.compile_and_load(build.find_compiler(), cache, sources=sources)
    [file] = cache.glob("*.so")
    whole = file.read_bytes()
    middle = len(whole) // 2
    file.unlink()  # its mapping stays as it is
    file.write_bytes(
        {
            "empty": b"",
            "half": whole[:middle],  # the loader would die of it
            "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "text": b"no library",
        }[damage]
    )
    again = build.compile_and_load(build.find_compiler(), cache, sources=sources)
    assert first.kvb_answer() == again.kvb_answer() == 42
    [repaired] = cache.glob("*.so")
    assert len(repaired.read_bytes()) == len(whole)
    inode = repaired.stat().st_ino
    build.compile_and_load(build.find_compiler(), cache, sources=sources)
    assert [f.stat().st_ino for f in cache.glob("*.so")] == [inode], "a whole one is loaded as it is"


@needs_compiler
@pytest.mark.parametrize("home", ["none", "a file", "nowhere"])
def test_without_a_cache_the_kernels_run_from_a_temporary_place(sources, tmp_path, monkeypatch, caplog, home):
    monkeypatch.delenv("KVBATCH_CACHE", raising=False)
    if home == "none":
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("HOME", str(tmp_path / "file") if home == "a file" else "/proc/nowhere")
    for _ in range(2):
        build.library.cache_clear()
        try:
            assert build.library(sources).kvb_answer() == 42
        finally:
            build.library.cache_clear()
    assert [r.message.count("set KVBATCH_CACHE to a directory") for r in caplog.records] == [1]
    assert not list(tmp_path.glob("kvbatch-*")), "nothing is left behind"


@needs_compiler
def test_a_locale_without_utf8_is_no_obstacle(sources, tmp_path):
    (sources / "answer.cpp").write_text(f"// é\n{SOURCE}", encoding="utf-8")
    code = (
        "import sys\nfrom pathlib import Path\nfrom kvcache.kernels.cpu import build\n"
        "build.compile_and_load(build.find_compiler(), Path(sys.argv[1]), sources=Path(sys.argv[2]))"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(sources)]
    subprocess.run(command, env=os.environ | ascii_only | {"PYTHONPATH": str(ROOT)}, check=True)
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1
