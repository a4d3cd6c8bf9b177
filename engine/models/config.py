"""What a model is, read from its config.json and generation_config.json; no weights are touched here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import AutoConfig

from engine.errors import ModelError, UnsupportedModelError
from engine.model_files import read_json
from engine.models.rope import RopeConfig, rope_config, rope_context, rope_parameters


@dataclass(frozen=True)
class Architecture:
    """What tells a decoder from the others; a string names the field of its config.json that decides."""

    qkv_bias: str | bool = False
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: bool = False


# By the `model_type` of config.json; a GGUF calls them the same.
_BY_TYPE = {
    "llama": ("LlamaForCausalLM", Architecture("attention_bias", "attention_bias", "mlp_bias")),
    "mistral": ("MistralForCausalLM", Architecture()),
    "qwen2": ("Qwen2ForCausalLM", Architecture(qkv_bias=True)),
    "qwen3": ("Qwen3ForCausalLM", Architecture("attention_bias", "attention_bias", qk_norm=True)),
}
ARCHITECTURES: dict[str, Architecture] = dict(_BY_TYPE.values())
NAME_BY_TYPE: dict[str, str] = {model_type: name for model_type, (name, _) in _BY_TYPE.items()}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder and what it needs from the engine."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_context: int
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, max_context: int | None = None, trust_remote_code: bool = False
    ) -> Self:
        """Read the configuration of the model in a local directory.

        Args:
            max_context: Positions wanted; None takes all that the model has.

        Raises:
            UnsupportedModelError: an architecture or feature that the engine does not run, by name.
            ModelError: the files are missing, unreadable or contradict each other.
        """
        path = Path(path)
        architecture = _architecture(path)
        try:
            config = AutoConfig.from_pretrained(
                path, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:  # of many kinds; each means that transformers cannot use this config.json
            raise ModelError(
                f"{path / 'config.json'}: {error}; take the file that belongs to the model"
            ) from error
        _refuse_unsupported(config, architecture)
        parameters = rope_parameters(config)
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        if num_heads % num_kv_heads:
            raise ModelError(
                f"config.json: {num_heads} heads cannot share {num_kv_heads} key/value heads evenly"
            )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        traits = ARCHITECTURES[architecture]
        context = _context(config, rope_context(config, parameters), max_context)
        return cls(
            architecture=architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=config.rms_norm_eps,
            max_context=context,
            tie_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=_flag(config, traits.qkv_bias),
            output_bias=_flag(config, traits.output_bias),
            mlp_bias=_flag(config, traits.mlp_bias),
            qk_norm=traits.qk_norm,
            rope=rope_config(config, parameters, head_dim),
            eos_token_ids=_eos_token_ids(path, config),
        )


def _architecture(path: Path) -> str:
    # Checked before transformers reads the directory, so that the message for an unknown model is ours.
    raw = read_json(path / "config.json")
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return name
    if not names and raw.get("model_type") in NAME_BY_TYPE:
        return NAME_BY_TYPE[raw["model_type"]]
    asked = ", ".join(map(str, names)) or raw.get("model_type") or "not named in config.json"
    raise UnsupportedModelError(
        f"architecture {asked} is not supported; supported: {', '.join(ARCHITECTURES)} ({path})"
    )


def _refuse_unsupported(config: Any, architecture: str) -> None:
    activation = getattr(config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"{architecture} with hidden_act {activation!r} is not supported; only silu is"
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"weights quantized with {method} are not supported; use the bf16 model or a GGUF"
        )


def _context(config: Any, limit: int, wanted: int | None) -> int:
    if wanted is not None and not 0 < wanted <= limit:
        raise ModelError(f"model.max_context is {wanted}, but this model has 1 to {limit} positions")
    context = wanted or limit
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)  # none: every layer slides
    slides = layer_types is None or "sliding_attention" in layer_types
    if slides and window is not None and context > window:
        raise UnsupportedModelError(
            f"sliding window attention (window {window}, context {context}) is not supported; "
            f"set model.max_context to {window} or less"
        )
    return context


def _flag(config: Any, source: str | bool) -> bool:
    return source if isinstance(source, bool) else bool(getattr(config, source, False))


def _eos_token_ids(path: Path, config: Any) -> tuple[int, ...]:
    # The generation config decides where there is one: an instruct model ends turns with more than one token.
    generation = path / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    if eos is None:
        eos = config.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
