"""`plan.parquet` and `stats/bins.parquet`: their columns, their rows, and what they come to.

A window of input rows becomes one output shard and one row group of the plan.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from kvbatch.corpus import Document


def _column(type_: pa.DataType) -> Any:
    return field(default=None, metadata={"type": type_})


@dataclass(slots=True)
class PlanRow:
    """One row of `plan.parquet`, filled column by column while it is planned.

    Types without None hold for rows that run: in others, what the plan cannot say is None. A reader that asks for some
    columns finds None in the others.
    """

    index: int = _column(pa.int64())  # of all input rows, from 0
    file: str = _column(pa.string())
    row: int = _column(pa.int64())
    row_id: str = _column(pa.string())
    sha1: str | None = _column(pa.string())
    content: str | None = _column(pa.string())  # hash of all that the row puts into its prompt
    status: str = _column(pa.string())  # ok | reused | rejected | error
    error_code: str | None = _column(pa.string())
    error_message: str | None = _column(pa.string())
    outcome: str = _column(pa.string())  # fits | truncated | too_long | over_budget | …, null if rejected
    prompt_tokens: int = _column(pa.int64())  # of all parts and questions
    max_new_tokens: int = _column(pa.int64())
    dropped_tokens: int = _column(pa.int64())
    truncation_side: Literal["left", "middle", "right"] | None = _column(pa.string())
    removed_chars: int | None = _column(pa.int64())
    parts: int = _column(pa.int32())  # that the document is split into, each with a prompt of its own
    # of the parts' prompts, without the questions if there are several
    part_tokens: Sequence[int] = _column(pa.list_(pa.int64()))
    reduce_tokens: int = _column(pa.int64())  # the most of a prompt over the parts' answers
    shard: int = _column(pa.int32())
    bin: int | None = _column(pa.int32())
    order: int = _column(pa.int32())  # of submission within the shard; null for rows that do not run
    predicted_kv_bytes: int = _column(pa.int64())  # of all its requests that run at once
    predicted_kv_full_bytes: int = _column(pa.int64())  # of the same requests in the full cache
    reused_run: int | None = _column(pa.int32())  # which of the manifest's `reuse.runs` generated the row
    reused_index: int | None = _column(pa.int64())  # and its index there


PLAN_SCHEMA = pa.schema([(column.name, column.metadata["type"]) for column in fields(PlanRow)])
BIN_SCHEMA = pa.schema(
    [
        ("bin", pa.int32()),
        ("shard", pa.int32()),
        ("rows", pa.int32()),
        ("prompt_tokens", pa.int64()),
        ("predicted_kv_bytes", pa.int64()),  # pages held at once, shared prefix included
        ("packing_efficiency", pa.float64()),  # of the pool, which is as large as the largest bin
    ]
)
# The most input bytes of a window, the row that exceeds them included: its rows are in memory together.
WINDOW_BYTES = 64 << 20


@dataclass
class PlanSummary:
    """What the plan foresees for the whole job."""

    num_rows: int = 0
    num_running: int = 0
    num_reused: int = 0
    num_shards: int = 0
    prompt_tokens: int = 0
    dropped_tokens: int = 0
    kv_bytes: int = 0  # of all rows that run, were they all held at once
    kv_full_bytes: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    peak_pages: int = 0
    peak_row: int = 0  # the first row of the bin that needs them
    pool_bytes: int = 0  # of these pages
    predicted_kv_peak_bytes: int = 0  # of them, held at once
    num_bins: int = 0
    bins_kv_bytes: int = 0  # of all bins, were they all held at once
    text_hashes: dict[str, str] = field(default_factory=dict)  # file -> sha256 over its rows' ids and texts

    @property
    def packing_efficiency(self) -> float | None:
        """Bytes that the bins fill, of the bytes that the pool offers to each."""
        offered = self.num_bins * self.pool_bytes
        return self.bins_kv_bytes / offered if offered else None


def plan_table(rows: Sequence[PlanRow]) -> pa.Table:
    """Return the rows of a shard as one row group of the plan."""
    columns = {name: [getattr(row, name) for row in rows] for name in PLAN_SCHEMA.names}
    return pa.table(columns, PLAN_SCHEMA)


def read_plan(run_dir: Path, columns: list[str] | None = None) -> Iterator[list[PlanRow]]:
    """Yield the plan's rows, one list per shard; `commit.planned_shards` proves first that it is whole."""
    with pq.ParquetFile(run_dir / "plan.parquet", page_checksum_verification=True) as file:
        for shard in range(file.num_row_groups):
            yield [PlanRow(**row) for row in file.read_row_group(shard, columns).to_pylist()]


def shard_starts(run_dir: Path) -> list[int]:
    """Return the index of every shard's first row."""
    found = pq.read_metadata(run_dir / "plan.parquet")
    sizes = (found.row_group(shard).num_rows for shard in range(found.num_row_groups))
    return list(accumulate(sizes, initial=0))[:-1]


def bounded_windows(documents: Iterable["Document"], max_rows: int) -> Iterator[list["Document"]]:
    """Cut a stream into lists of so many rows, or of fewer that take WINDOW_BYTES: it depends on the rows alone."""
    window: list[Document] = []
    num_bytes = 0
    for document in documents:
        window.append(document)
        num_bytes += document.num_bytes
        del document
        if len(window) == max_rows or num_bytes >= WINDOW_BYTES:
            yield window
            window, num_bytes = [], 0
    if window:
        yield window
