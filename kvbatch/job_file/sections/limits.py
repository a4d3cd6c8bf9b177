"""The limits section: when a finished run is no success."""

from typing import Annotated

from pydantic import Field

from kvbatch.job_file.sections.base import Ratio, Section


class LimitsSection(Section):
    """What is too much: the outputs stay, but the run does not count as a success (exit 65)."""

    max_error_ratio: Ratio | None = None
    """Rows without an answer, rejected ones too; by default not all of them."""
    max_truncated_ratio: Ratio | None = None
    """Rows whose document was cut to fit."""
    max_cut_ratio: Ratio | None = None
    """Answers that `generation.max_new_tokens` cut, or `generation.repetition_stop`."""
    row_retries: Annotated[int, Field(ge=0)] = 1
    """Times a row that failed in the engine is tried again."""
