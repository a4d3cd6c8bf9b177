"""`plan.parquet` and `stats/bins.parquet`: their columns, their rows, and what they come to.

A window of input rows becomes one output shard and one row group of the plan.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from kvbatch.corpus import Document


PLAN_SCHEMA = pa.schema(
    [
        ("index", pa.int64()),  # of all input rows, from 0
        ("file", pa.string()),
        ("row", pa.int64()),
        ("row_id", pa.string()),
        ("sha1", pa.string()),
        ("content", pa.string()),  # hash of all that the row puts into its prompt
        ("status", pa.string()),  # ok | reused | rejected | error
        ("error_code", pa.string()),
        ("error_message", pa.string()),
        ("outcome", pa.string()),  # fits | truncated | too_long | over_budget | …, null for a rejected row
        ("prompt_tokens", pa.int64()),  # of all parts and questions
        ("max_new_tokens", pa.int64()),
        ("dropped_tokens", pa.int64()),
        ("truncation_side", pa.string()),
        ("removed_chars", pa.int64()),
        ("parts", pa.int32()),  # that the document is split into, each with a prompt of its own
        ("part_tokens", pa.list_(pa.int64())),  # of these prompts, without the questions if there are several
        ("reduce_tokens", pa.int64()),  # the most of a prompt over the parts' answers
        ("shard", pa.int32()),
        ("bin", pa.int32()),
        ("order", pa.int32()),  # of submission within the shard, null for rows that do not run
        ("predicted_kv_bytes", pa.int64()),  # of all its requests that run at once
        ("predicted_kv_full_bytes", pa.int64()),  # what the same row would take in the full cache
        ("reused_run", pa.int32()),  # which of the manifest's `reuse.runs` did the row
        ("reused_index", pa.int64()),  # and its index there
    ]
)


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


WINDOW_BYTES = (
    64 << 20
)  # of a window's rows in the input, the last one over it included: they are held together


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


def read_plan(run_dir: Path, columns: list[str] | None = None) -> Iterator[list[dict[str, Any]]]:
    """Yield the plan's rows, one list per shard; `commit.planned_shards` proves first that it is whole."""
    with pq.ParquetFile(run_dir / "plan.parquet", page_checksum_verification=True) as file:
        for shard in range(file.num_row_groups):
            yield file.read_row_group(shard, columns).to_pylist()


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
