"""One open window of the run: its rows, what became of them, and the Parquet files they become."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kvbatch.atomic_file import write_table
from kvbatch.errors import InputError
from kvbatch.prompts.sampling import row_seed
from kvbatch.run.oom_retry import DEAD_LETTER
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.output_schema import INPUT_FIELDS, OUTPUT_FIELDS
from kvbatch.run_dir.plan_file import PlanRow

if TYPE_CHECKING:
    from engine import Result
    from kvbatch.corpus import Document
    from kvbatch.prompts.structured_output import AnswerForm
    from kvbatch.run.row_requests import RowRequests


@dataclass
class OpenShard:
    """Hold a window until all its rows are done.

    Args:
        number: of the shard.
        documents: the window's rows, read again; a text that is not needed any more is let go.
        rows: the same rows in the plan.
        job_seed: what each row's seed is made from.
        common: output columns that all rows of the run share.
        answers: the form that answers must have.
        finished: output columns by place in the window, of the rows that have run.

    Raises:
        InputError: The two are not the same rows: the input changed since it was planned.
    """

    number: int
    documents: list["Document"]
    rows: Sequence[PlanRow]
    job_seed: int
    common: dict[str, Any]
    answers: "AnswerForm | None" = None
    finished: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.documents) != len(self.rows):
            raise InputError(
                f"the input changed while the job ran: shard {self.number} was planned with "
                f"{len(self.rows):,} rows and has {len(self.documents):,} now; run the job again"
            )
        for document, row in zip(self.documents, self.rows, strict=True):
            if (document.sha1, str(document.row_id)) != (row.sha1, row.row_id):
                raise InputError(
                    f"the input changed while the job ran: {document.file}, row {document.row} is not the "
                    "one that was planned; run the job again"
                )
        for place, row in enumerate(self.rows):
            done = self.finished.get(place, {"kvb_status": "ok"} if row.status == "reused" else {})
            if done.get("kvb_status") == "ok":
                self._forget_text(place)
        left = (i for i, row in enumerate(self.rows) if row.status == "ok" and i not in self.finished)
        self.running = sorted(left, key=self._order)
        self._num_left = len(self.running)

    def _order(self, place: int) -> int:
        return self.rows[place].order

    @property
    def is_done(self) -> bool:
        """Whether every row that runs has ended."""
        return not self._num_left

    def finish(self, place: int, work: "RowRequests", num_retries: int = 0) -> dict[str, Any]:
        """Take a row whose requests have ended; return its output columns.

        Args:
            num_retries: how often it failed before, for another reason than memory.
        """
        assert place not in self.finished, "a row ends once"
        result, oom_steps = work.result(), work.oom_steps
        gave_up = DEAD_LETTER in oom_steps
        columns = _result_columns(result)
        if result.finish_reason == "error":
            columns |= _failed(work.error_code, result.error_message)
        columns |= work.columns()
        if work.questions:
            answers = [_validated(answer, self.answers) for answer in work.answers()]
            columns |= {"output": None, "kvb_answers": answers}
            failed = next((answer for answer in answers if answer["status"] == "error"), None)
            if failed:
                columns |= _failed(failed["error_code"], failed["error_message"])
        elif self.answers and result.finish_reason != "error":
            columns |= self.answers.validate(result.text)
        columns["kvb_attempts"] = 1 + num_retries + len(oom_steps) - gave_up
        columns["kvb_oom_steps"] = ",".join(oom_steps) or None
        self.finished[place] = self._planned(place) | columns
        if self.finished[place]["kvb_status"] == "ok":
            self._forget_text(place)
        self._num_left -= 1
        return self.finished[place]

    def _forget_text(self, place: int) -> None:
        """Let the text of a row go that has its answer; others are copied to the dead letters."""
        self.documents[place] = replace(self.documents[place], text=None)

    def reuse(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the output columns of rows that earlier runs did, by place; they stay marked by those runs' ids."""
        for place, row in rows.items():
            own = {"kvb_input_file": self.rows[place].file, "kvb_shard": self.number, "kvb_bin": None}
            self.finished[place] = {**row, **own}

    def output_rows(self) -> list[dict[str, Any]]:
        """Return the output columns of all rows, in input order."""
        return [self.finished.get(place) or self._planned(place) for place in range(len(self.rows))]

    def _planned(self, place: int) -> dict[str, Any]:
        planned = self.rows[place]
        seed = row_seed(self.job_seed, planned.row_id)
        return self.common | _planned_columns(planned) | {"kvb_shard": self.number, "kvb_seed": seed}

    def write(self, keys: pa.Table, rows: list[dict[str, Any]], run: RunDirectory) -> dict[str, Any]:
        """Write the shard, and before it a copy of its failed rows with their input to the dead letters.

        Return what describes the shard's file and, as `deadletter`, that of the letters, if there is one.

        Args:
            keys: id and passthrough columns of the window.

        Raises:
            OutputError: The run directory cannot be written.
        """
        table = _join(keys, pa.Table.from_pylist(rows, pa.schema(OUTPUT_FIELDS)))
        failed = [i for i, row in enumerate(rows) if row["kvb_status"] != "ok"]
        letters_facts = None
        if failed:
            inputs = [
                {
                    "kvb_input_row": self.documents[i].row,
                    "kvb_input_text": _storable(self.documents[i].text),
                    "kvb_input_raw": self.documents[i].raw,
                }
                for i in failed
            ]
            letters = _join(table.take(failed), pa.Table.from_pylist(inputs, pa.schema(INPUT_FIELDS)))
            letters_facts = write_table(letters, run.deadletter_file(self.number))
        return write_table(table, run.shard_file(self.number)) | {"deadletter": letters_facts}


def _planned_columns(row: PlanRow) -> dict[str, Any]:
    return {
        "kvb_status": row.status,
        "kvb_finish_reason": None if row.status == "ok" else "error",
        "kvb_error_code": row.error_code,
        "kvb_error_message": row.error_message,
        "kvb_attempts": 0,
        "kvb_prompt_tokens": row.prompt_tokens,
        "kvb_outcome": row.outcome,
        "kvb_n_parts": row.parts,
        "kvb_dropped_tokens": row.dropped_tokens,
        "kvb_truncation_side": row.truncation_side,
        "kvb_removed_chars": row.removed_chars,
        "kvb_input_file": row.file,
        "kvb_bin": row.bin,
    }


def _validated(answer: dict[str, Any], form: "AnswerForm | None") -> dict[str, Any]:
    """Return an answer to one of several questions, held against the form that the job asks for."""
    if answer["status"] == "error" or form is None:
        return answer
    columns = form.validate(answer["output"])
    return answer | {name.removeprefix("kvb_"): value for name, value in columns.items()}


def _failed(code: str, message: str | None) -> dict[str, Any]:
    return {"kvb_status": "error", "kvb_error_code": code, "kvb_error_message": message}


def _result_columns(result: "Result") -> dict[str, Any]:
    return {
        "output": None if result.finish_reason == "error" else result.text,
        "kvb_finish_reason": result.finish_reason,
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
        "kvb_wait_s": result.wait_s,
    }


def _join(left: pa.Table, right: pa.Table) -> pa.Table:
    for field_, column in zip(right.schema, right.columns, strict=True):
        left = left.append_column(field_, column)
    return left


def _storable(text: str | None) -> str | None:
    """Return a text that Arrow takes: a lone surrogate is written as its escape."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()
