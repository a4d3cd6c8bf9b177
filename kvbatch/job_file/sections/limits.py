"""The limits section: when a finished run is no success."""

from typing import Annotated

from pydantic import Field

from kvbatch.job_file.sections.base import Ratio, Section


class LimitsSection(Section):
    """What is too much: the outputs stay, but the run does not count as a success (exit 65)."""

    max_error_ratio: Ratio | None = None
    """The most rows without an answer, rejected ones too, as a share; by default a run fails only if all have none."""
    max_truncated_ratio: Ratio | None = None
    """The most rows whose document was truncated, as a share; by default no limit."""
    max_cut_ratio: Ratio | None = None
    """The most answers that `generation.max_new_tokens` or `generation.repetition_stop` cut, as a share; by default no
    limit."""
    row_retries: Annotated[int, Field(ge=0)] = 1
    """How often a row that failed in the engine is tried again."""
