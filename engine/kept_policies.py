"""Policies fitted to models, kept in the user's cache folder: each is measured once."""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.cache_loss import Encode, LossMeter, check_texts_of
from engine.calibration import keep_file
from engine.check_texts import check_texts
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.models.decoder import Decoder
from engine.promise import FittedPolicy, fit_policy
from kvcache.config import KVCacheConfig
from kvcache.kernels.cpu.build import cpu_name
from kvcache.promises import KEPT_KEYS, PROMISES, Promise
from kvcache.user_cache import user_cache

_FORMAT = 2  # of pages and of what is measured; another one asks for another measurement


@dataclass(frozen=True)
class PolicyKey:
    """What a fitted policy depends on.

    Args:
        model: identity of the content of weights and tokenizer.
        dtype: of weights and arithmetic.
        weight_quant: as `load_model`.
        device: its kind, `cpu` or `cuda`.
        preset: of the cache.
        changes: keys of `KVCacheConfig` that differ from the preset, as (name, value) pairs.
        name: of the model, for people; the policy does not depend on it.
    """

    model: str
    dtype: str
    weight_quant: str | None
    device: str
    preset: str
    changes: tuple[tuple[str, Any], ...] = ()
    name: str = field(default="", compare=False)

    @property
    def promise(self) -> Promise | None:
        """What the preset promises; None where keys that say how much is kept are given."""
        is_literal = any(name in KEPT_KEYS for name, _ in self.changes)
        return None if is_literal else PROMISES.get(self.preset)

    @property
    def policy(self) -> KVCacheConfig:
        """The preset's policy, with the changes; fitting changes its tiers."""
        return KVCacheConfig.from_dict({"preset": self.preset, **dict(self.changes)})

    @property
    def place(self) -> Path:
        """Where the policy is kept, in the user's cache folder."""
        depends = (
            _FORMAT,
            asdict(replace(self, name="")),
            self.promise,
            self.policy,
            sorted(check_texts().items()),
        )
        digest = hashlib.sha256(repr(depends).encode()).hexdigest()[:20]
        return Path("policies", f"{digest}.json")


def find_policy(key: PolicyKey) -> FittedPolicy | None:
    """Return the policy that was fitted before, if there is one and its file is whole."""
    try:
        values = json.loads((user_cache() / key.place).read_text(encoding="utf-8"))
        return FittedPolicy.from_dict(values["fitted"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def policy_of_preset(preset: str, model: Decoder, config: EngineConfig, encode: Encode) -> KVCacheConfig:
    """Return the policy with which a preset keeps its promise on a model; arguments as `fit_kept_policy`.

    Raises:
        EngineError: The promise cannot be kept; the message says what is lost.
    """
    policy = KVCacheConfig.preset(preset)
    if preset not in PROMISES:
        return policy
    content = hashlib.sha256(repr(model.checksums()).encode()).hexdigest()[:20]
    quant = "int8" if model.has_int8_weights else None
    key = PolicyKey(content, str(model.dtype).removeprefix("torch."), quant, model.device.type, preset)
    log = logging.getLogger(__name__)
    if find_policy(key) is None:
        log.info("cache %s: fitting it to the model, once; the model reads some ten thousand tokens", preset)
    fitted = fit_kept_policy(key, model, config, encode)
    if not fitted.holds:
        raise EngineError(
            f"cache {preset!r} cannot keep its promise on this model: the mildest policy has {fitted}"
        )
    log.info("cache %s: %s", preset, fitted)
    return replace(policy, tiers=fitted.tiers)


def fit_kept_policy(
    key: PolicyKey,
    model: Decoder,
    config: EngineConfig,
    encode: Encode,
    advance: Callable[[str, int], None] = lambda what, tokens: None,
) -> FittedPolicy:
    """Return the cheapest policy that keeps a preset's promise on a model, and keep it.

    Where the key gives literally how much is kept, that is measured, and nothing is fitted.

    Args:
        model: loaded for policies that quantize.
        config: as `LossMeter`.
        encode: as `check_texts_of`.
        advance: as `LossMeter`.

    Raises:
        ValueError: The policy does not suit the model.
    """
    if found := find_policy(key):
        return found
    began_s = time.monotonic()
    texts = check_texts_of(check_texts(), encode, model.config.max_context)
    meter = LossMeter(model, config, texts, advance)
    promise = key.promise
    if promise is None:
        measure = PROMISES[key.preset].measure if key.preset in PROMISES else "kl"
        loss = meter.measure(key.policy, measure)
        tiers = key.policy.resolved_tiers
        fitted = FittedPolicy(tiers, measure, None, loss.value, loss.worst, loss.kv_ratio, loss.num_tokens)
    else:
        policies = list(promise.policies(key.preset, **dict(key.changes)))
        fitted = fit_policy(
            promise, policies, lambda policy, limit: meter.measure(policy, promise.measure, limit)
        )
    record = {
        "model": key.name or key.model,
        "preset": key.preset,
        "dtype": key.dtype,
        "device": key.device,
        "kl" if fitted.measure == "kl" else "nll": fitted.loss,
        "kv_ratio": fitted.kv_ratio,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began_s, 1),
        "cpu": cpu_name(),
        "fitted": fitted.to_dict(),
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)
    keep_file(key.place, lambda path: Path(path).write_text(text, encoding="utf-8"))
    return fitted
