"""The cache policy of a run: one object, validated when it is created."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from kvcache.scorers.registry import SCORERS

METHODS = ("none", "sparse", "quant", "sparse+quant")
# Bits per element of a key or value; 16 is the model's precision. `kvcache.quantize.codes` packs each width.
BITS: tuple[int, ...] = (16, 8, 4, 3, 2)
BUDGETS = ("calibrated", "global", "per_head", "uniform", "layered")


@dataclass(frozen=True)
class Tier:
    """The share of tokens that is kept at these bits."""

    ratio: float
    key_bits: int
    value_bits: int


@dataclass(frozen=True)
class KVCacheConfig:
    """How keys and values are kept.

    Args:
        compress_method: `none` keeps every token at the model's precision, `sparse` drops the least important,
            `quant` quantizes all but the newest to fewer bits, `sparse+quant` does both.
        keep_ratio: share of a prompt's tokens that are kept. It includes the tail, but neither sinks nor recent window.
        quant_bits: 16, 8, 4 or 3 bits for both keys and values, or a pair (keys, values).
        tiers: shares of tokens, each with its own bits; the highest scores take the first tier. With tiers,
            `keep_ratio` and `quant_bits` are ignored.
        warmup_tokens: number of first tokens (attention sinks) that are kept uncompressed.
        recent_tokens: number of newest tokens that are kept uncompressed; of a prompt, at most `delay` chunks.
        tail_tokens: number of tokens before the recent ones, at the prompt's end, that are never dropped, since most
            heads attend to near tokens. They fit into `delay` chunks and are at most half of the tokens kept.
        chunk_size: number of tokens that are scored and compressed at once.
        delay: number of whole chunks that must follow a chunk before it is compressed.
        scorer: method that scores tokens; the highest scores are kept (`kvcache.scorers.registry`).
        probe: the question's tokens attend to each chunk before it is compressed, if the question is known.
        budget: how the number of kept tokens is divided among lanes (`kvcache.compress.allocation`).
        floor_ratio: minimum that every lane keeps, as a fraction of the uniform share.
        layer_budget: one weight per layer, for budget `layered`.
        streaming: compress each chunk while the prompt is read; otherwise compress once, at the end of the prompt.
        dtype: precision of uncompressed tokens, which are all tokens of a full cache: `auto` is the model's precision.
        compensate: choose a quantized page's codes so that their errors cancel in attention scores and in the output
            projection (`error_compensation`); otherwise each number is rounded on its own.
        overlap: compress a chunk while the model reads the next one. Each chunk stays in its prefill buffer for one
            chunk longer, so the generated text may differ. An unset value is false.
        page_tokens: slots per page when nothing is compressed.

    Raises:
        ValueError: A value out of range or a contradiction, with the reason.
    """

    compress_method: Literal["none", "sparse", "quant", "sparse+quant"] = "none"
    keep_ratio: float = 1.0
    quant_bits: int | tuple[int, int] = 16
    tiers: tuple[Tier, ...] = ()
    warmup_tokens: int = 16
    recent_tokens: int = 64
    tail_tokens: int = 1024
    chunk_size: int = 256
    delay: int = 1
    scorer: str = "attention_max"
    probe: bool = True
    budget: str = "calibrated"
    floor_ratio: float = 0.1
    layer_budget: tuple[float, ...] | None = None
    streaming: bool = True
    dtype: Literal["auto", "bfloat16"] = "auto"
    compensate: bool = True
    overlap: bool | None = None
    page_tokens: int = 64

    def __post_init__(self) -> None:
        for holds, message in self._checks():
            if not holds:
                raise ValueError(message)

    @property
    def compresses(self) -> bool:
        return self.compress_method != "none"

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of keys and of values."""
        return (self.quant_bits, self.quant_bits) if isinstance(self.quant_bits, int) else self.quant_bits

    @property
    def resolved_tiers(self) -> tuple[Tier, ...]:
        """The tiers, or the single tier of keep_ratio and quant_bits."""
        return self.tiers or (Tier(self.keep_ratio, *self.bits),)

    @property
    def drops(self) -> bool:
        """Whether some tokens are not kept at all."""
        return self.compresses and sum(tier.ratio for tier in self.resolved_tiers) < 1 - 1e-9

    @property
    def needs_calibration(self) -> bool:
        """Whether the model's lanes must be calibrated (`kvcache.compress.lane_shares`)."""
        return self.needs_scores and self.budget == "calibrated"

    @property
    def can_stream(self) -> bool:
        """Whether a prompt of any length can be read in the memory of a short one."""
        return self.compresses and self.needs_scores and self.streaming

    @property
    def quantizes(self) -> bool:
        """Whether any tier has fewer bits than the model."""
        return self.compresses and any(tier.value_bits < 16 for tier in self.resolved_tiers)

    @property
    def compensates(self) -> bool:
        """Whether quantized pages compensate their errors."""
        return self.compensate and self.quantizes

    @property
    def needs_scores(self) -> bool:
        """Whether tokens are kept differently, so that they need scores."""
        return len(self.resolved_tiers) > 1 or self.resolved_tiers[0].ratio < 1

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "KVCacheConfig":
        """Return the policy of a named preset, with keys changed.

        Raises:
            ValueError: No preset has that name, or the changes contradict it.
        """
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is not known; use one of {', '.join(PRESETS)}")
        return replace(PRESETS[name], **changes)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "KVCacheConfig":
        """Return a policy from plain values: a `preset` to start from, and the keys that differ.

        Raises:
            ValueError: An unknown key, or values that contradict each other.
        """
        values = dict(values)
        known = {field.name for field in fields(cls)}
        base = cls.preset(values.pop("preset", "none"))
        for name in values:
            if name not in known:
                raise ValueError(f"cache key {name!r} is not known; use one of {', '.join(sorted(known))}")
        single = {"keep_ratio", "quant_bits"} & values.keys()
        if "tiers" in values:
            if single:
                raise ValueError(
                    f"tiers and {' and '.join(sorted(single))} say the same thing twice; give one"
                )
            if any(len(tier) != 3 for tier in values["tiers"]):
                raise ValueError("a tier is [share, key bits, value bits]")
            values["tiers"] = tuple(Tier(*tier) for tier in values["tiers"])
        elif single:
            values["tiers"] = ()  # those of the preset
        for name in ("quant_bits", "layer_budget"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return replace(base, **values)

    def _checks(self) -> Iterator[tuple[bool, str]]:
        """Yield for each rule whether it holds, and the error message if it does not."""
        method, ratio = self.compress_method, self.keep_ratio
        yield method in METHODS, f"compress_method {method!r} is not known; use one of {', '.join(METHODS)}"
        yield 0 < ratio <= 1, f"keep_ratio must be in (0, 1], not {ratio}"
        if not self.tiers:
            sparse, quant = "sparse" in method, "quant" in method
            yield (
                sparse or ratio == 1,
                f"keep_ratio {ratio} drops tokens, but compress_method {method} keeps all",
            )
            yield (
                quant or self.bits == (16, 16),
                f"quant_bits {self.quant_bits} needs a method with quant, not {method}",
            )
        total = sum(tier.ratio for tier in self.tiers)
        if self.tiers:
            yield self.compresses, "tiers need a compress_method other than none"
            yield (
                "sparse" in method or total > 1 - 1e-9,
                f"tiers of {total:g} of the tokens drop the rest, but compress_method {method} keeps all",
            )
            yield (
                "quant" in method or all(tier.value_bits == 16 for tier in self.tiers),
                f"tiers of fewer than 16 bits need a method with quant, not {method}",
            )
        yield total <= 1 + 1e-9, f"the tiers' ratios add up to {total}, more than 1"
        for tier in self.resolved_tiers:
            k, v = tier.key_bits, tier.value_bits
            yield k in BITS and v in BITS, f"bits must be among {BITS}, not {k} and {v}"
            yield k > 2, "keys at 2 bits ruin the model; use 3 or more"
            yield k >= v, f"keys are the delicate part: {k} bits for keys is fewer than {v} for values"
            yield (
                (k == 16) == (v == 16),
                f"whole keys with {v}-bit values are not supported; use 8 bits for keys",
            )
            yield 0 < tier.ratio <= 1, f"a tier's ratio must be in (0, 1], not {tier.ratio}"
        for name in ("warmup_tokens", "recent_tokens", "tail_tokens", "delay"):
            yield getattr(self, name) >= 0, f"{name} must not be negative"
        yield (
            self.recent_tokens % 16 == 0,
            f"recent_tokens must be a multiple of 16, not {self.recent_tokens}",
        )
        for name, known in (("scorer", SCORERS), ("budget", BUDGETS)):
            value = getattr(self, name)
            yield value in known, f"{name} {value!r} is not known; use one of {', '.join(known)}"
        yield self.chunk_size >= 16, f"chunk_size must be at least 16, not {self.chunk_size}"
        yield self.page_tokens >= 1, f"page_tokens must be at least 1, not {self.page_tokens}"
        yield 0 <= self.floor_ratio <= 1, f"floor_ratio must be in [0, 1], not {self.floor_ratio}"
        weights = self.layer_budget or ()
        yield (
            all(weight >= 0 for weight in weights) and (not weights or sum(weights) > 0),
            f"layer_budget needs weights of 0 and more, not all of them 0, not {list(weights)}",
        )
        yield (
            (self.budget == "layered") == bool(self.layer_budget),
            "budget layered and layer_budget go together",
        )


def _preset(**values: Any) -> KVCacheConfig:
    return KVCacheConfig(compress_method="sparse+quant", dtype="bfloat16", **values)


# Queries of a larger chunk tell more about those that follow, and there are fewer chunks to judge: on
# Qwen2.5-Coder-0.5B `aggressive` loses 0.0091 with chunks of 512 and 0.0104 with chunks of 256, delays alike.
_LARGE_CHUNKS: dict[str, Any] = {"chunk_size": 512, "delay": 2, "scorer": "expected_attention"}
# Tiers are those that most models need; each model has its own (`kvcache.promises`). Beside them stand the share and
# the bits, for whoever sets one of the two.
PRESETS = {
    "none": KVCacheConfig(),
    "dialogue": _preset(keep_ratio=0.5, quant_bits=8, delay=4),
    "logs": _preset(
        keep_ratio=0.3,
        quant_bits=4,
        recent_tokens=96,
        tiers=(Tier(0.08, 4, 4), Tier(0.3, 3, 2)),
        **_LARGE_CHUNKS,
    ),
    # so few tokens are kept that the question's tokens must be able to win places in any lane
    "extract": _preset(keep_ratio=0.1, quant_bits=4, delay=4, budget="global"),
    # nothing is dropped: at a quarter of the bytes, fewer bits cost less quality than fewer tokens. A prefill buffer of
    # two chunks is small, so chunks can be larger, which takes less time
    "default": _preset(
        quant_bits=4, recent_tokens=48, chunk_size=512, tiers=(Tier(0.3, 4, 4), Tier(0.7, 3, 2))
    ),
    "aggressive": _preset(
        keep_ratio=0.44, quant_bits=4, tiers=(Tier(0.15, 4, 4), Tier(0.42, 3, 2)), **_LARGE_CHUNKS
    ),
}
