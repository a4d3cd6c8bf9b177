"""A GGUF file becomes a model directory that gives the logits and tokens of the model it was made from."""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbatch.errors import ModelUnavailable
from kvbatch.model.gguf import convert_gguf
from kvbatch.model.source import describe_model_files, resolve_model
from tests.engine.models.tiny_models import tiny_model
from tests.kvbatch.model.helpers import TOKENS, write_gguf


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_converted_weights_give_the_same_logits(tmp_path: Path, arch: str) -> None:
    model = tiny_model(arch, vocab_size=len(TOKENS), tie_word_embeddings=arch == "qwen2")
    write_gguf(tmp_path / "m.gguf", model, arch)
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "m.gguf", out)
    converted = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits)
    # The file's own end token, then the one that ends a turn in the chat template.
    assert converted.generation_config.eos_token_id == [0, 2]


def test_rope_divisors_of_llama_3_are_kept(tmp_path: Path) -> None:
    llama3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = llama3 | {"rope_type": "llama3", "rope_theta": 1e3, "original_max_position_embeddings": 16}
    model = tiny_model("llama", vocab_size=len(TOKENS), rope_parameters=rope)
    plain = 1.0 / (1e3 ** (np.arange(0, 16, 2) / 16))
    write_gguf(
        tmp_path / "m.gguf", model, "llama", rope=plain / model.model.rotary_emb.inv_freq.float().numpy()
    )
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "m.gguf", out)
    converted = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.testing.assert_close(
        converted.model.rotary_emb.inv_freq,
        torch.tensor(plain).float() / torch.tensor(converted.config.rope_parameters["short_factor"]),
    )


@pytest.mark.parametrize(
    ("pre", "digits"),
    [("smollm", ["1", "2"]), ("gpt-2", ["12"]), ("qwen2", ["1", "2"]), ("llama-bpe", ["12"])],
)
def test_tokenizer_splits_as_its_name_says_and_loses_nothing(
    tmp_path: Path, pre: str, digits: list[str]
) -> None:
    model = tiny_model("llama", vocab_size=len(TOKENS))
    write_gguf(tmp_path / "m.gguf", model, "llama", pre=pre)
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "m.gguf", out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.tokenize("12") == digits
    text = "x = 12  # ünï 漢字 🙂\n\tdef f():\r\n  return 'the'"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False).endswith(
        "<|im_end|>"
    )


@pytest.mark.parametrize(
    ("arch", "pre", "message"),
    [("gemma", "smollm", "architecture 'gemma'"), ("llama", "deepseek", "'deepseek'")],
)
def test_what_cannot_be_converted_exactly_is_refused(
    tmp_path: Path, arch: str, pre: str, message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("llama", vocab_size=len(TOKENS)), arch, pre=pre)
    with pytest.raises(ModelUnavailable, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


@pytest.mark.parametrize("keep_ratio", [0.0, 0.05, 0.9])
def test_truncated_file_is_refused(tmp_path: Path, keep_ratio: float) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, tiny_model("llama", vocab_size=len(TOKENS)), "llama")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep_ratio)])
    with pytest.raises(ModelUnavailable, match="corrupt"):
        convert_gguf(file, tmp_path)


def split_gguf(source: Path, num_parts: int, *, stem: str = "m") -> list[Path]:
    """Cut a file as llama-gguf-split does: the metadata in the first part, a few tensors in each."""
    reader = gguf.GGUFReader(source)
    paths = [source.with_name(f"{stem}-{i + 1:05d}-of-{num_parts:05d}.gguf") for i in range(num_parts)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", num_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::num_parts]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_split_file_is_read_whole_whichever_part_is_named(tmp_path: Path) -> None:
    whole = tmp_path / "m.gguf"
    write_gguf(whole, tiny_model("llama", vocab_size=len(TOKENS)), "llama")
    parts = split_gguf(whole, 3)
    for name in ("whole", "part"):
        (tmp_path / name).mkdir()
    convert_gguf(whole, tmp_path / "whole")
    convert_gguf(parts[1], tmp_path / "part")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part"))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

    cache = tmp_path / "cache"
    assert len({resolve_model(str(part), cache_dir=cache).revision for part in parts}) == 1
    assert len(describe_model_files(str(parts[2]))) == 3
    parts[1].rename(tmp_path / "away.gguf")
    with pytest.raises(ModelUnavailable, match="part 2 of 3 .*m-00002-of-00003.gguf.*merge"):
        resolve_model(str(parts[0]), cache_dir=cache)
    with pytest.raises(ModelUnavailable, match="is part 2 of 3 of a split GGUF.*merge"):
        resolve_model(str(tmp_path / "away.gguf"), cache_dir=cache)
    parts[2].rename(parts[1])
    (tmp_path / "away.gguf").rename(parts[2])
    with pytest.raises(ModelUnavailable, match="part 2 of 3 .* is part 3 of 3"):
        resolve_model(str(parts[0]), cache_dir=cache)


def test_file_that_lacks_tensors_is_refused_and_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    model = tiny_model("llama", vocab_size=len(TOKENS))
    model.model.layers = model.model.layers[:1]  # the metadata still says two
    write_gguf(file, model, "llama")
    with pytest.raises(ModelUnavailable, match="does not hold the whole model: 9 tensors are missing"):
        resolve_model(str(file), cache_dir=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache/models").iterdir() if path.is_dir()]


def test_kinds_of_quantization_that_cannot_be_undone_are_named_with_the_tensor(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, tiny_model("llama", vocab_size=len(TOKENS)), "llama")
    content = bytearray(file.read_bytes())
    field = gguf.GGUFReader(file).tensors[1].field
    at = field.offset + sum(part.nbytes for part in field.parts[:4])
    assert content[at : at + 4] == bytes(4)  # float32
    name = re.escape(gguf.GGUFReader(file).tensors[1].name)
    for number, kind in ((139, "type 139"), (gguf.GGMLQuantizationType.Q8_1.value, "Q8_1")):
        content[at : at + 4] = number.to_bytes(4, "little")
        file.write_bytes(content)
        with pytest.raises(ModelUnavailable, match=f"{name}.*quantized as {kind}.*Q4_K_M"):
            convert_gguf(file, tmp_path)


@pytest.mark.parametrize("content", [b"<!DOCTYPE html><html>", b"PK\x03\x04 and so on"])
def test_file_that_is_no_gguf_is_not_called_corrupt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelUnavailable, match="is a web page|is no GGUF file"):
        resolve_model(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "cache")
