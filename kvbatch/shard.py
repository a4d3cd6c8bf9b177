"""One open window of the run: its rows, their results, and the Parquet files they become."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kvbatch.errors import InputError
from kvbatch.writer import write_table

if TYPE_CHECKING:
    from engine import Result
    from kvbatch.answers import AnswerForm
    from kvbatch.corpus import Document

OUTPUT_FIELDS = [
    pa.field("output", pa.string()),
    pa.field("output_json", pa.string()),  # the same, proved to be of generation.json_schema
    pa.field("kvb_status", pa.string()),  # ok | rejected | error
    pa.field("kvb_finish_reason", pa.string()),  # stop | length | repetition | error
    pa.field("kvb_error_code", pa.string()),
    pa.field("kvb_error_message", pa.string()),
    pa.field("kvb_attempts", pa.int32()),
    pa.field("kvb_prompt_tokens", pa.int64()),
    pa.field("kvb_completion_tokens", pa.int64()),
    pa.field("kvb_cached_prompt_tokens", pa.int64()),
    pa.field("kvb_dropped_tokens", pa.int64()),
    pa.field("kvb_truncation_side", pa.string()),
    pa.field("kvb_n_chunks", pa.int32()),
    pa.field("kvb_kv_full_bytes", pa.int64()),
    pa.field("kvb_kv_kept_bytes", pa.int64()),
    pa.field("kvb_kv_peak_bytes", pa.int64()),
    pa.field("kvb_kv_kept_ratio", pa.float64()),
    pa.field("kvb_prefill_s", pa.float64()),
    pa.field("kvb_decode_s", pa.float64()),
    pa.field("kvb_shard", pa.int32()),
    pa.field("kvb_bin", pa.int32()),
    pa.field("kvb_seed", pa.int64()),
    pa.field("kvb_run_id", pa.string()),
    pa.field("kvb_config_hash", pa.string()),
]
INPUT_FIELDS = [
    pa.field("kvb_input_file", pa.string()),
    pa.field("kvb_input_row", pa.int64()),
    pa.field("kvb_input_text", pa.string()),
]


def row_seed(job_seed: int, row_id: str) -> int:
    """Return the seed of one row: the same whatever other rows the job has and in which order they run."""
    digest = hashlib.sha256(f"{job_seed}:{row_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits: Parquet's int64 has a sign


@dataclass
class OpenShard:
    """Hold a window until all its rows are done.

    Args:
        number: of the shard.
        documents: the window's rows, read again.
        rows: the same rows in the plan.

    Raises:
        InputError: The two are not the same rows: the input changed since it was planned.
    """

    number: int
    documents: Sequence["Document"]
    rows: Sequence[dict[str, Any]]
    answers: "AnswerForm | None" = None  # the form that they must have
    results: dict[int, "Result"] = field(default_factory=dict)  # by place in the window

    def __post_init__(self) -> None:
        if len(self.documents) != len(self.rows):
            raise InputError(
                f"the input changed while the job ran: shard {self.number} was planned with "
                f"{len(self.rows):,} rows and has {len(self.documents):,} now; run the job again"
            )
        for document, row in zip(self.documents, self.rows, strict=True):
            if (document.sha1, str(document.row_id)) != (row["sha1"], row["row_id"]):
                raise InputError(
                    f"the input changed while the job ran: {document.file}, row {document.row} is not the "
                    "one that was planned; run the job again"
                )
        self.running = sorted(
            (i for i, row in enumerate(self.rows) if row["status"] == "ok"), key=self._order
        )

    def _order(self, place: int) -> int:
        return self.rows[place]["order"]

    @property
    def is_done(self) -> bool:
        """Whether every row that runs has its result."""
        return len(self.results) == len(self.running)

    def output_rows(self, job_seed: int, run_id: str, config_hash: str) -> list[dict[str, Any]]:
        """Return the output columns of all rows, in input order."""
        common = {"kvb_run_id": run_id, "kvb_config_hash": config_hash, "kvb_shard": self.number}
        rows = []
        for place, planned in enumerate(self.rows):
            result = self.results.get(place)
            row = common | _planned_columns(planned) | (self._result_columns(result) if result else {})
            rows.append(row | {"kvb_seed": row_seed(job_seed, planned["row_id"])})
        return rows

    def _result_columns(self, result: "Result") -> dict[str, Any]:
        columns = _result_columns(result)
        if self.answers and result.finish_reason != "error":
            columns |= self.answers.judge(result.text)
        return columns

    def write(self, keys: pa.Table, rows: list[dict[str, Any]], run_dir: Path) -> None:
        """Write the shard, and before it a copy of its failed rows with their input to the dead letters.

        Args:
            keys: id and passthrough columns of the window.

        Raises:
            OutputError: The run directory cannot be written.
        """
        name = f"part-{self.number:05d}.parquet"
        table = _join(keys, pa.Table.from_pylist(rows, pa.schema(OUTPUT_FIELDS)))
        failed = [i for i, row in enumerate(rows) if row["kvb_status"] != "ok"]
        if failed:
            inputs = [
                {
                    "kvb_input_file": self.documents[i].file,
                    "kvb_input_row": self.documents[i].row,
                    "kvb_input_text": _storable(self.documents[i].text),
                }
                for i in failed
            ]
            letters = _join(table.take(failed), pa.Table.from_pylist(inputs, pa.schema(INPUT_FIELDS)))
            write_table(letters, run_dir / "deadletter" / name)
        write_table(table, run_dir / "shards" / name)


def _planned_columns(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "kvb_status": row["status"],
        "kvb_finish_reason": None if row["status"] == "ok" else "error",
        "kvb_error_code": row["error_code"],
        "kvb_error_message": row["error_message"],
        "kvb_attempts": 0,
        "kvb_prompt_tokens": row["prompt_tokens"],
        "kvb_dropped_tokens": row["dropped_tokens"],
        "kvb_truncation_side": row["truncation_side"],
        "kvb_bin": row["bin"],
    }


def _result_columns(result: "Result") -> dict[str, Any]:
    failed = result.finish_reason == "error"
    columns = {
        "output": None if failed else result.text,
        "kvb_finish_reason": result.finish_reason,
        "kvb_attempts": 1,
        "kvb_prompt_tokens": result.prompt_tokens,
        "kvb_completion_tokens": result.completion_tokens,
        "kvb_cached_prompt_tokens": result.cached_prompt_tokens,
        "kvb_n_chunks": result.num_chunks,
        "kvb_kv_full_bytes": result.kv_full_bytes,
        "kvb_kv_kept_bytes": result.kv_kept_bytes,
        "kvb_kv_peak_bytes": result.kv_peak_bytes,
        "kvb_kv_kept_ratio": result.kv_kept_bytes / result.kv_full_bytes if result.kv_full_bytes else None,
        "kvb_prefill_s": result.prefill_s,
        "kvb_decode_s": result.decode_s,
    }
    if failed:
        columns |= {
            "kvb_status": "error",
            "kvb_error_code": "engine",
            "kvb_error_message": result.error_message,
        }
    return columns


def _join(left: pa.Table, right: pa.Table) -> pa.Table:
    for field_, column in zip(right.schema, right.columns, strict=True):
        left = left.append_column(field_, column)
    return left


def _storable(text: str | None) -> str | None:
    """Return a text that Arrow takes: a lone surrogate is written as its escape."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()
