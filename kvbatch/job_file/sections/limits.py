"""The limits section: when a finished run is no success."""

from typing import Annotated

from pydantic import Field

from kvbatch.job_file.sections.base import Ratio, Section


class LimitsSection(Section):
    """Limits beyond which a finished run is no success (exit 65). Its outputs are kept."""

    max_error_ratio: Ratio | None = None
    """Maximum share of rows without an answer, rejected rows included. By default a run fails only if no row has an
    answer."""
    max_truncated_ratio: Ratio | None = None
    """Maximum share of rows whose document was truncated. By default no limit."""
    max_cut_ratio: Ratio | None = None
    """Maximum share of answers cut by `generation.max_new_tokens` or `generation.repetition_stop`. By default no
    limit."""
    row_retries: Annotated[int, Field(ge=0)] = 1
    """How many times a row that failed in the engine is retried."""
