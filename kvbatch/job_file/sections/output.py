"""The output section: where a run's files go and how many rows one of them holds."""

from typing import Annotated

from pydantic import Field

from kvbatch.job_file.sections.base import Count, Section


class OutputSection(Section):
    """Where the run directory goes."""

    dir: str | None = None
    """Directory of the job's runs; by default `runs/<name>`."""
    shard_rows: Count = 512
    """Input rows of one output file, fewer where they come to 64 MiB; also the rows packed together."""
    metrics: Annotated[str, Field(pattern=r"\.prom$")] | None = None
    """File for the figures of the last run, in the Prometheus text format; by default none."""
