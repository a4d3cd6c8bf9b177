"""The engine section: device, memory, batch sizes."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from engine.errors import BudgetError
from engine.memory import parse_budget
from kvbatch.job_file.sections.base import Count, Section


class EngineSection(Section):
    """Where and in how much memory the job runs. Of the output, it decides only which rows are too big to run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; `auto` is the GPU where there is one."""
    memory_budget: str | float | int = "60%"
    """Memory for keys, values and workspace: `60%` or `0.6` of what is free, `4GiB`, or bytes."""
    step_tokens: Annotated[int, Field(ge=16)] = 1024
    """The most tokens of one step of the model, prompts and answers together."""
    max_sequences: Count = 64
    """The most sequences that run at once."""
    threads: Count | None = None
    """CPU threads; by default as many as torch takes, within the CPUs and the CPU quota of the process."""
    prompt_lookup: bool = True
    """Draft tokens by prompt lookup when few rows are left, as long as that is faster; never with `deterministic`."""
    deterministic: bool = False
    """The same output bytes whichever rows run together, and however often the run was interrupted."""

    @field_validator("memory_budget")
    @classmethod
    def _is_a_size(cls, value: str | float | int) -> str | float | int:
        try:
            parse_budget(value)
        except BudgetError as error:
            raise ValueError(str(error)) from error
        return value
