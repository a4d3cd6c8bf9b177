"""The engine section: device, memory, batch sizes."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from engine.errors import BudgetError
from engine.memory import parse_budget
from kvbatch.job_file.sections.base import Count, Section


class EngineSection(Section):
    """The device, memory and batch sizes of a job. They affect the output only in which rows are too large to run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that the model runs on. `auto` is the GPU if there is one, else the CPU."""
    memory_budget: str | float | int = "60%"
    """Memory for keys, values and workspace: `60%` or `0.6` of the free memory, `4GiB`, or a number of bytes."""
    step_tokens: Annotated[int, Field(ge=16)] = 1024
    """Maximum number of tokens in one step of the model, prompts and answers together."""
    max_sequences: Count = 64
    """Maximum number of sequences that run at once."""
    threads: Count | None = None
    """Number of CPU threads. By default torch's choice, limited to the CPUs and the CPU quota of the process."""
    prompt_lookup: bool = True
    """Propose draft tokens copied from the prompt or the answer so far when few rows are running. Draft tokens are
    computed only while that is measured to be faster. Off with `deterministic`."""
    deterministic: bool = False
    """Produce the same output bytes whichever rows run together and however often the run was interrupted."""

    @field_validator("memory_budget")
    @classmethod
    def _is_a_size(cls, value: str | float | int) -> str | float | int:
        try:
            parse_budget(value)
        except BudgetError as error:
            raise ValueError(str(error)) from error
        return value
