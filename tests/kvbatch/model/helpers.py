"""GGUF files of tiny models."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

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
