"""Whether a job, its prompt, its model and its memory go together: said before any weight is loaded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbatch.errors import JobFileError
from kvbatch.job_file.sections import Job

if TYPE_CHECKING:
    from engine import EngineConfig
    from engine.budget import Budget
    from kvbatch.model.handle import ModelHandle
    from kvbatch.prompts.chat import AnyPromptBuilder


def check_room(job: Job, builder: "AnyPromptBuilder", context: int) -> None:
    """Prove that the model's context holds more than what all prompts share and the answer, of long documents too.

    Raises:
        JobFileError: It does not.
    """
    from kvbatch.prompts.long_document import LongDocuments

    if builder.num_static_tokens + job.generation.max_new_tokens >= context:
        raise JobFileError(
            f"the prompt takes {builder.num_static_tokens:,} tokens before any document and "
            f"generation.max_new_tokens {job.generation.max_new_tokens:,}; the model's context of "
            f"{context:,} leaves no room for a document: shorten one of them"
        )
    LongDocuments(builder, job, context - job.generation.max_new_tokens)


def check_prompt_columns(job: Job, names: Sequence[str]) -> None:
    """Prove that the input has the columns that the prompt uses.

    Raises:
        JobFileError: It does not.
    """
    for key, columns in job.prompt_columns.items():
        for name in columns:
            if name not in names:
                raise JobFileError(
                    f"{key} uses {{{name}}}, which the input does not have: {', '.join(names)}"
                )


def plan_memory(
    job: Job, model: "ModelHandle", builder: "AnyPromptBuilder", known_bytes: int | None = None
) -> tuple["EngineConfig", "Budget"]:
    """Return the engine's configuration and what it makes of the memory: so many bytes, or as the job says.

    Raises:
        JobFileError: The budget holds no step and no row, or the cache policy does not suit the model.
    """
    from engine import EngineConfig
    from engine.budget import divide_budget
    from engine.errors import BudgetError
    from engine.head_calibration import calibration_text
    from engine.memory import resolve_budget
    from kvbatch.prompts.builder import REPEAT

    try:
        config = EngineConfig(
            memory_budget_bytes=known_bytes
            or resolve_budget(job.engine.memory_budget, model.device, reserved_bytes=model.weight_bytes),
            step_tokens=job.engine.step_tokens,
            max_sequences=job.engine.max_sequences,
            cache=job.cache.policy,
            repeat_token_ids=tuple(builder.markup(REPEAT)),
            calibration_token_ids=tuple(builder.markup(calibration_text())),
            prompt_lookup=job.engine.prompt_lookup,
            deterministic=job.engine.deterministic,
        )
        return config, divide_budget(model.config, config, model.dtype.itemsize, model.device)
    except BudgetError as error:
        raise JobFileError(f"engine.memory_budget: {error}") from error
    except ValueError as error:  # a policy that does not suit the model
        raise JobFileError(f"cache: {error}") from error
