"""The output section: where a run's files go and how many rows one of them holds."""

from typing import Annotated

from pydantic import Field

from kvbatch.job_file.sections.base import Count, Section


class OutputSection(Section):
    """Where the run directory goes."""

    dir: str | None = None
    """Directory of the job's runs. By default `runs/<name>`."""
    shard_rows: Count = 512
    """Maximum input rows of one output file. A file ends earlier when its rows reach 64 MiB. The rows of one file are
    packed together."""
    metrics: Annotated[str, Field(pattern=r"\.prom$")] | None = None
    """File that the metrics of the last run are written to, in the Prometheus text format. By default none."""
