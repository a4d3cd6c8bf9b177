"""The tokenizer inside a GGUF file, written as tokenizer.json and tokenizer_config.json.

Byte-level BPE only, and only with a known pre-tokenizer: GGUF names how text is split before merging
(`tokenizer.ggml.pre`) but does not hold it. A wrong split gives other tokens than the model was trained on,
and no error at all, so an unknown name is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvbatch.errors import ModelUnavailable

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# pre-tokenizer -> how many digits stay together, for those that split by the newer pattern
_DIGITS_TOGETHER = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}


def write_tokenizer(metadata: Mapping[str, Any], out: Path, *, max_context: int) -> tuple[int, ...]:
    """Write a GGUF file's tokenizer and return the ids that end a generation.

    Args:
        metadata: The file's key/value pairs.

    Raises:
        ModelUnavailable: the tokenizer is of a kind that cannot be rebuilt exactly.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelUnavailable(
            f"the GGUF file's tokenizer is {kind!r}, only byte-level BPE ('gpt2') is read; "
            "use the model's safetensors version"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # llama-bpe takes a whole word from the vocabulary before it tries merges.
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (CONTROL, USER_DEFINED):
            special = token_type == CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])

    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    tokenizer.save(str(out / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_context,
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return _end_ids(metadata, tokens, types, template or "")


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        split_digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([split_digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre in _DIGITS_TOGETHER:
        pattern = Regex("|".join((_CONTRACTIONS, _WORDS, _DIGITS_TOGETHER[pre], _REST)))
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    known = ", ".join(("default", "gpt-2", "smollm", *_DIGITS_TOGETHER))
    raise ModelUnavailable(
        f"the GGUF file's pre-tokenizer {pre!r} is not known (known: {known}); "
        "use the model's safetensors version"
    )


def _end_ids(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], template: str
) -> tuple[int, ...]:
    """Return the end tokens: those the file names, then the one that ends a turn in its chat template."""
    named = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    ends = [token_id for token_id in named if token_id is not None]
    turn_ends = [mark for mark in ("<|im_end|>", "<|eot_id|>") if mark in template and mark in tokens]
    ends += [tokens.index(mark) for mark in turn_ends]
    return tuple(dict.fromkeys(i for i in ends if types[i] == CONTROL or i == ends[0]))
