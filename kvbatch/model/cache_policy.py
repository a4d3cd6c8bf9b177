"""The cache policy that keeps a preset's promise on a job's model: looked up, or fitted with the weights."""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvbatch.errors import JobFileError

if TYPE_CHECKING:
    from engine import EngineConfig
    from engine.kept_policies import PolicyKey
    from engine.promise import FittedPolicy
    from kvbatch.job_file.sections import CacheSection, Job
    from kvbatch.model.handle import ModelHandle

# Tokens of the check texts, each read by the full cache and by two policies, as most models need.
_READ_TOKENS = 6 * 2000 * 3
# Parameters times tokens a second, of one core: a guess for a model whose weights were not loaded yet.
_WORK_PER_S = 6e10


def policy_key(model: "ModelHandle", cache: "CacheSection") -> "PolicyKey":
    """Return what the policy of a cache section depends on."""
    from engine.kept_policies import PolicyKey

    content = hashlib.sha256(f"{model.files.revision} {model.tokenizer_hash}".encode()).hexdigest()[:20]
    return PolicyKey(
        content,
        model.precision.dtype,
        model.section.weight_quant,
        model.device,
        cache.preset,
        cache.changes,
        model.section.name,
    )


def known_policy(job: "Job", model: "ModelHandle") -> "FittedPolicy | None":
    """Return the policy that was fitted before; None where nothing is compressed or nothing was fitted."""
    from engine.kept_policies import find_policy

    return find_policy(policy_key(model, job.cache)) if job.cache.policy.compresses else None


def fit_policy(
    key: "PolicyKey", model: "ModelHandle", config: "EngineConfig", advance: Callable[[str, int], None]
) -> "FittedPolicy":
    """Fit a policy on the check texts, for which the weights are loaded, and keep it.

    Args:
        config: of the engines that read; whatever its cache policy.
        advance: told of each text that was read, by the number of its tokens.

    Raises:
        ModelUnavailable: The weights cannot be loaded.
        JobFileError: The memory is too small, or a policy does not suit the model.
    """
    from engine.kept_policies import fit_kept_policy

    def encode(text: str) -> list[int]:
        return model.tokenizer.encode(text, add_special_tokens=False)

    decoder = model.decoder
    try:
        return fit_kept_policy(key, decoder, config, encode, advance)
    except ValueError as error:  # a policy that does not suit the model, a budget that is too small
        raise JobFileError(f"cache: {error}") from error


def policy_text(preset: str, model: "ModelHandle", fitted: "FittedPolicy | None") -> str:
    """Say in one line what a cache preset keeps and loses on a model, or that it is not known yet."""
    if fitted is None:
        return (
            f"{preset}, not calibrated for this model: about {_fitting_s(model):,.0f} s at the start of the run; "
            "bytes are the preset's own"
        )
    broken = "" if fitted.holds else "; the promise cannot be kept: set cache.preset: none"
    return f"{preset}, {fitted}{broken}"


def _fitting_s(model: "ModelHandle") -> float:
    """Return about how many seconds a policy takes to be fitted."""
    return _READ_TOKENS * model.files.num_weights / (_WORK_PER_S * model.threads.count)
