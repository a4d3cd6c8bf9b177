"""How a job divides its memory: the engine's configuration, and the budget that follows from it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvbatch.errors import JobFileError
from kvbatch.job_file.sections import Job

if TYPE_CHECKING:
    from engine import EngineConfig
    from engine.memory_division import Budget
    from kvbatch.model.handle import ModelHandle
    from kvbatch.prompts.chat import AnyPromptBuilder
    from kvcache.config import KVCacheConfig

# The job keys that set fields of `EngineConfig` of another name.
_JOB_KEYS = {"memory_budget_bytes": "engine.memory_budget", "step_tokens": "engine.step_tokens"}


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one job under one cache policy.

    Args:
        engine_config: what the engine is made from; its pool takes all that the budget leaves.
        budget: pages, prefill buffers and workspace.
        weight_bytes: the most that the weights take.
        other_bytes: what the process holds beside model and cache: interpreter, libraries, tokenizer.
    """

    engine_config: "EngineConfig"
    budget: "Budget"
    weight_bytes: int
    other_bytes: int

    @property
    def budget_bytes(self) -> int:
        """Bytes for pool, prefill buffers and workspace."""
        return self.engine_config.memory_budget_bytes

    def with_pool(self, num_pages: int) -> "EngineConfig":
        """Return the engine's configuration with a pool of so many pages."""
        return replace(self.engine_config, pool_pages=num_pages)

    def process_bytes(self, pool_bytes: int) -> dict[str, int]:
        """Return what the whole process will hold with such a pool, part by part."""
        return {
            "weights": self.weight_bytes,
            "pool": pool_bytes,
            "buffers": self.budget.prefill_buffer_bytes,
            "workspace": self.budget.workspace_bytes,
            "other": self.other_bytes,
        }


def plan_memory(
    job: Job,
    model: "ModelHandle",
    prompts: "AnyPromptBuilder",
    *,
    other_bytes: int | None = None,
    cache: "KVCacheConfig | None" = None,
    known_bytes: int | None = None,
) -> MemoryPlan:
    """Divide the memory of a job.

    Args:
        other_bytes: see `MemoryPlan`; by default what the process holds now.
        cache: the policy; the job's own by default.
        known_bytes: the budget in bytes, where an earlier session has resolved it.

    Raises:
        JobFileError: The budget holds no step and no row, or the cache policy does not suit the model.
    """
    from engine import EngineConfig
    from engine.calibration import calibration_text
    from engine.errors import BudgetError
    from engine.memory import resident_bytes, resolve_budget
    from engine.memory_division import divide_budget
    from kvbatch.prompts.rendering import REPEAT

    try:
        config = EngineConfig(
            memory_budget_bytes=known_bytes
            or resolve_budget(job.engine.memory_budget, model.device, reserved_bytes=model.weight_bytes),
            step_tokens=job.engine.step_tokens,
            max_sequences=job.engine.max_sequences,
            cache=cache or job.cache.policy,
            repeat_token_ids=tuple(prompts.markup(REPEAT)),
            calibration_token_ids=tuple(prompts.markup(calibration_text())),
            prompt_lookup=job.engine.prompt_lookup,
            deterministic=job.engine.deterministic,
        )
        budget = divide_budget(model.config, config, model.dtype.itemsize, model.device)
    except BudgetError as error:
        raise JobFileError(f"engine.memory_budget: {error.message(_JOB_KEYS)}") from error
    except ValueError as error:  # a policy that does not suit the model
        raise JobFileError(f"cache: {error}") from error
    return MemoryPlan(
        config, budget, model.weight_bytes, resident_bytes() if other_bytes is None else other_bytes
    )
