"""A GGUF file becomes a model directory that gives the logits and tokens of the model it was made from."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvbatch.errors import ModelUnavailable
from kvbatch.gguf_model import convert_gguf
from tests.engine.models.tiny_models import tiny_model

NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = CONTROL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["12", "the", "Ġt", "he"]


def write_gguf(
    path: Path, model: PreTrainedModel, arch: str, *, pre: str = "smollm", rope: Any = None
) -> None:
    """Write a model and a byte-level tokenizer the way GGUF files hold them."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL_TOKENS) + [1] * (len(TOKENS) - len(CONTROL_TOKENS)))
    writer.add_token_merges(["1 2", "h e", "t he", "Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    if rope is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope, dtype=np.float32))
    for name, tensor in model.state_dict().items():
        *_, part, suffix = name.split(".")
        values = tensor.float().numpy()
        if arch == "llama" and part in ("q_proj", "k_proj"):  # GGUF interleaves rotary pairs in llama files
            values = values.reshape(-1, 2, 8, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        at = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        writer.add_tensor(f"{at}{NAMES[part]}.{suffix}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
