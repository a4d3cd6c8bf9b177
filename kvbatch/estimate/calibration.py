"""The cache policy of an opened job, fitted to its model where that was not done before."""

from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING

from kvbatch.errors import LimitExceeded, ModelUnavailable
from kvbatch.opened_job import OpenedJob
from kvbatch.progress.display import Progress

if TYPE_CHECKING:
    from engine.promise import FittedPolicy


def calibrated(opened: OpenedJob, progress: Progress) -> OpenedJob:
    """Return the job with a policy that keeps the cache preset's promise on its model.

    The weights are loaded where the policy was not fitted before.

    Raises:
        LimitExceeded: No policy of the preset keeps its promise; the message says what does.
        ModelUnavailable: The weights cannot be loaded.
        JobFileError: The memory is too small, or the policy does not suit the model.
    """
    if not opened.policy.compresses:
        return opened
    if opened.fitted is None:
        from kvbatch.model.cache_policy import fit_policy, policy_key

        memory = opened.plan_memory()  # of what is free before the weights are loaded
        progress.start("calibrating")
        progress.step("loading weights")

        def advance(text: str, num_tokens: int) -> None:
            progress.step(f"read the text {text}")
            progress.advance(0, num_tokens)

        key = policy_key(opened.model, opened.job.cache)
        fitted = fit_policy(key, opened.model, memory.engine_config, advance)
        opened = replace(opened, fitted=fitted, budget_bytes=memory.budget_bytes)
        progress.end()
        progress.note(f"cache: {opened.job.cache.preset}, {fitted} on texts of kvbatch's own")
    assert opened.fitted is not None
    check_promise(opened.job.cache.preset, opened.job.model.name, opened.fitted)
    return opened


def check_promise(preset: str, model: str, fitted: "FittedPolicy") -> None:
    """Prove that a fitted policy keeps its promise.

    Raises:
        LimitExceeded: It does not.
        ModelUnavailable: The model's logits are not finite numbers.
    """
    name, value = fitted.worst
    if not isfinite(fitted.loss):
        raise ModelUnavailable(
            f"model {model}: its logits are not finite numbers on a text of kvbatch's own ({name}); "
            "set model.dtype: float32, or use another model"
        )
    if not fitted.holds:
        raise LimitExceeded(
            f"cache.preset {preset} cannot keep its promise on model {model}: the mildest of its policies has {fitted} "
            f"({name}: {value:.4f}); set cache.preset: none, or take a policy as it is with cache.tiers"
        )
