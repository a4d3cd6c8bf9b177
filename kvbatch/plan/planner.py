"""The first pass over the corpus: what every row will cost, before any weight is loaded.

It writes `plan.parquet` and `stats/bins.parquet`. A window of input rows becomes one output shard and one row group
of the plan: `shard_rows` of them, or fewer whose texts take WINDOW_BYTES. Within it rows are packed into bins. The
plan is the schedule: the run takes the plan's shards, and submits rows in its order.
"""

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.forecast import NUM_PARTS, Forecast, PlannedRow, forecast
from engine.packing import PackItem, pack
from engine.request_pages import held_pages, prefix_pages
from kvbatch.atomic_file import described_file, write_table
from kvbatch.job_file.sections import Job
from kvbatch.plan.row_memory import RowNeed, row_need
from kvbatch.plan.unique_ids import UniqueIds
from kvbatch.prompts.long_document import LongDocuments
from kvbatch.prompts.prompt import Outcome, Prompt
from kvbatch.run_dir.plan_file import (
    BIN_SCHEMA,
    PLAN_SCHEMA,
    PlanRow,
    PlanSummary,
    bounded_windows,
    plan_table,
)
from kvbatch.run_dir.row_hash import prompt_content, row_line

if TYPE_CHECKING:
    from engine.memory_division import Budget
    from kvbatch.corpus import Document
    from kvbatch.run_dir.previous_rows import PreviousRows

MAX_FORECAST_ROWS = 2000  # more are forecast from these
BATCH_CHARS = 4_000_000  # text tokenized at once: enough to keep all cores busy, small against a window


class Planner:
    """Plan window by window.

    Args:
        job: the job.
        documents: makes the prompts of its rows.
        budget: pages and rows that may be held at once.
        previous: rows that need not be generated again.
        known_tokens: prompt tokens by content, of rows that fitted in an earlier plan: they are not tokenized again.
    """

    def __init__(
        self,
        job: Job,
        documents: LongDocuments,
        budget: "Budget",
        previous: "PreviousRows | None" = None,
        known_tokens: Mapping[str, int] | None = None,
    ):
        self._job = job
        self._known_tokens = known_tokens or {}
        self._previous = previous
        self._prompt_columns = sorted({name for names in job.prompt_columns.values() for name in names})
        self._budget = budget
        self._prompts = documents
        self._needs: dict[
            int, tuple[Any, RowNeed]
        ] = {}  # prefix and need of the window's rows, by their index
        self.summary = PlanSummary()
        self.files: dict[str, dict[str, Any]] = {}  # what describes the files that were written
        self._fullest_rows: list[PlanRow] = []  # from the fullest bin on, in order
        self._hashes: dict[str, Any] = {}
        self._ids = UniqueIds()
        # columns of integers, as there may be a bin a row
        self._bins = {name: array("q") for name in BIN_SCHEMA.names if name != "packing_efficiency"}

    def write(
        self,
        documents: Iterable["Document"],
        run_dir: Path,
        on_rows: Callable[[int, int], None] = lambda r, t: None,
    ) -> PlanSummary:
        """Plan all documents into `plan.parquet` and `stats/bins.parquet`.

        Args:
            on_rows: called with the rows and prompt tokens of each batch.

        Raises:
            OutputError: The run directory cannot be written.
        """
        with (
            described_file(run_dir / "plan.parquet") as (stream, facts),
            pq.ParquetWriter(stream, PLAN_SCHEMA, compression="zstd", write_page_checksum=True) as writer,
        ):
            for window in bounded_windows(documents, self._job.output.shard_rows):
                rows = self.plan_window(window, on_rows)
                window.clear()  # before the next one is read
                writer.write_table(plan_table(rows), row_group_size=len(rows))
        if self._previous:
            self._previous.check_met()
        summary = self.summary
        summary.text_hashes = {file: digest.hexdigest() for file, digest in self._hashes.items()}
        efficiency = [num_bytes / summary.pool_bytes for num_bytes in self._bins["predicted_kv_bytes"]]
        bins = pa.table({**self._bins, "packing_efficiency": efficiency}, BIN_SCHEMA)
        self.files["stats/bins.parquet"] = write_table(bins, run_dir / "stats" / "bins.parquet")
        self.files["plan.parquet"] = {"rows": summary.num_rows} | facts
        self._forecast_peak()
        return summary

    def plan_window(
        self, documents: Sequence["Document"], on_rows: Callable[[int, int], None] = lambda r, t: None
    ) -> list[PlanRow]:
        """Plan the rows of the next shard, in input order."""
        summary = self.summary
        shard, first = summary.num_shards, summary.num_rows
        rows = [self._row(first + i, shard, document) for i, document in enumerate(documents)]
        self._refuse_repeated(rows)
        if self._previous:
            self._reuse(rows, self._previous)
        running = [(row, d) for row, d in zip(rows, documents, strict=True) if row.status == "ok"]
        unknown = []
        for row, document in running:
            count = self._known_tokens.get(row.content or "")
            if count is None or count > self._prompts.max_prompt_tokens:
                unknown.append((row, document))
            else:
                self._predict(row, Prompt([], count, self._prompts.prefix_tokens), (count,))
                on_rows(1, count)
        for batch in _text_batches(unknown):
            prompts = self._prompts.build_batch([document for _, document in batch])
            for (row, _), prompt in zip(batch, prompts, strict=True):
                self._predict(row, prompt, prompt.part_tokens)
            on_rows(len(batch), sum(row.prompt_tokens or 0 for row, _ in batch))
        on_rows(len(rows) - len(running), 0)
        self._pack(rows)
        self._count(rows)
        return rows

    def _count(self, rows: Sequence[PlanRow]) -> None:
        """Count the rows of a shard that is planned."""
        summary = self.summary
        summary.num_shards += 1
        summary.num_rows += len(rows)
        summary.num_reused += sum(row.status == "reused" for row in rows)
        for row in rows:
            name = row.outcome or row.status
            summary.outcomes[name] = summary.outcomes.get(name, 0) + 1

    def replan(self, shards: Iterable[list[PlanRow]]) -> PlanSummary:
        """Return what another plan's rows would come to under this job: their prompts are the same, their bytes not."""
        summary = self.summary
        for rows in shards:
            for row in rows:
                if row.status == "ok" or row.error_code == "over_budget":
                    row.status = "ok"
                    part_tokens, reduce_tokens = row.part_tokens, row.reduce_tokens
                    outcome: Outcome = (
                        "truncated" if row.dropped_tokens else "split" if reduce_tokens else "fits"
                    )
                    if max(part_tokens) > self._prompts.max_prompt_tokens:
                        outcome = "streamed"
                    prefix = self._prompts.prefix_tokens
                    self._predict(
                        row,
                        Prompt(
                            [],
                            row.prompt_tokens,
                            prefix,
                            row.dropped_tokens,
                            row.truncation_side,
                            outcome,
                            sampling={"max_new_tokens": row.max_new_tokens},
                            reduce_tokens=reduce_tokens,
                        ),
                        part_tokens,
                    )
            self._pack(rows)
            self._count(rows)
        self._forecast_peak()
        return summary

    def forecast(
        self,
        rows: Iterable[PlanRow],
        pool_pages: int,
        answer_tokens: int | None = None,
        coefficients: Sequence[float] = (0.0,) * NUM_PARTS,
    ) -> Forecast:
        """Forecast the run of planned rows, in the order of their submission.

        Args:
            answer_tokens: how long answers will be; if left out, as long as they may be.
            coefficients: see `engine.forecast.forecast`.
        """
        layout, prefix = self._budget.layout, None
        shapes = [
            self._prompts.shape(row.outcome, row.part_tokens, row.reduce_tokens, row.max_new_tokens)
            for row in rows
        ]
        if shared := max((shape.prefix_tokens for shape in shapes), default=0):
            prefix = PlannedRow(shared, 0, prefix_pages(layout, shared), 0, held_pages(layout, None))
        most_tokens = sys.maxsize if answer_tokens is None else answer_tokens
        requests = (
            request
            for shape in shapes
            for request in shape.planned(layout, min(shape.new_tokens, most_tokens))
        )
        return forecast(
            requests,
            replace(self._budget, capacity_pages=pool_pages),
            coefficients,
            prefix=prefix,
            alone=self._job.engine.deterministic,
        )

    def _forecast_peak(self) -> None:
        """Say how much of the pool will be held at once: all, unless the cache takes its pages as it needs them."""
        summary, layout = self.summary, self._budget.layout
        summary.predicted_kv_peak_bytes = summary.pool_bytes
        if layout is not layout.uncompressed:
            # from the fullest bin on, before which the engine drains
            found = self.forecast(self._fullest_rows, summary.peak_pages)
            summary.predicted_kv_peak_bytes = found.peak_pages * layout.page_bytes

    def _row(self, index: int, shard: int, document: "Document") -> PlanRow:
        message = document.error_message and self._job.environment.hide(document.error_message)
        digest = self._hashes.setdefault(document.file, hashlib.sha256())
        digest.update(row_line(document))
        return PlanRow(
            index=index,
            file=document.file,
            row=document.row,
            row_id=str(document.row_id),
            sha1=document.sha1,
            content=prompt_content(document, self._prompt_columns),
            status=document.status,
            error_code=document.error_code,
            error_message=message,
            shard=shard,
        )

    def _refuse_repeated(self, rows: Sequence[PlanRow]) -> None:
        """Reject rows whose id an earlier one has: the first keeps it, whatever becomes of that row."""
        for row, is_repeated in zip(rows, self._ids.repeated([row.row_id for row in rows]), strict=True):
            if is_repeated and row.status == "ok":
                row.status, row.error_code = "rejected", "duplicate_id"
                row.error_message = (
                    f"{row.file}:{row.row}: an earlier row has the id {row.row_id!r}; "
                    "give every row its own, or name another input.id_column"
                )

    def _reuse(self, rows: Sequence[PlanRow], previous: "PreviousRows") -> None:
        """Say of the rows that an earlier run did where it wrote them."""
        for row in rows:
            if row.status == "ok" and (place := previous.find(row.row_id, row.content)):
                row.status = "reused"
                row.reused_run, row.reused_index = place

    def _predict(self, row: PlanRow, prompt: Prompt, part_tokens: Sequence[int]) -> None:
        """Write down what will become of a row.

        Args:
            prompt: its prompt; token ids are not looked at.
            part_tokens: see `Prompt.part_tokens`.
        """
        new_tokens = prompt.sampling.get("max_new_tokens", self._job.generation.max_new_tokens)
        row.max_new_tokens = new_tokens
        row.outcome, row.prompt_tokens = prompt.outcome, prompt.num_tokens
        row.dropped_tokens, row.truncation_side = prompt.dropped_tokens, prompt.truncation_side
        row.removed_chars = prompt.removed_chars
        message = prompt.message
        if prompt.runs:
            page_bytes = self._budget.layout.page_bytes
            shape = self._prompts.shape(prompt.outcome, part_tokens, prompt.reduce_tokens, new_tokens)
            need = row_need(shape, self._budget)
            row.parts, row.part_tokens = len(part_tokens), list(part_tokens)
            row.reduce_tokens = prompt.reduce_tokens
            row.predicted_kv_bytes = need.num_pages * page_bytes
            row.predicted_kv_full_bytes = need.full_bytes
            self._needs[row.index] = (shape.prefix_tokens, shape.prefix_kind), need
            if need.least_pages > self._budget.capacity_pages:
                row.outcome = "over_budget"
                message = (
                    f"{need.largest_tokens:,} prompt tokens and up to {new_tokens:,} new ones "
                    f"need {need.least_pages * page_bytes:,} bytes of KV cache, "
                    f"engine.memory_budget leaves {self._budget.capacity_pages * page_bytes:,}"
                )
        if not prompt.runs or row.outcome == "over_budget":
            row.status, row.error_code, row.error_message = "error", row.outcome, message

    def _pack(self, rows: list[PlanRow]) -> None:
        """Give the rows that run their bin and their order."""
        summary, layout = self.summary, self._budget.layout
        items = []
        for i, row in enumerate(rows):
            if row.status == "ok":
                prefix, need = self._needs[row.index]
                items.append(PackItem(i, need.num_pages, prefix, need.prefix_pages, need.num_sequences))
        self._needs.clear()
        order, fullest = 0, summary.peak_pages
        for found in pack(items, self._budget.capacity_pages, self._budget.max_sequences):
            for i in found.indices:
                rows[i].bin, rows[i].order = summary.num_bins, order
                order += 1
            tokens = sum(rows[i].prompt_tokens for i in found.indices)
            num_bytes = found.num_pages * layout.page_bytes
            facts = (summary.num_bins, summary.num_shards, len(found.indices), tokens, num_bytes)
            for column, fact in zip(self._bins.values(), facts, strict=True):
                column.append(fact)
            summary.num_bins += 1
            summary.bins_kv_bytes += num_bytes
            summary.prompt_tokens += tokens
            summary.dropped_tokens += sum(rows[i].dropped_tokens for i in found.indices)
            summary.kv_bytes += sum(rows[i].predicted_kv_bytes for i in found.indices)
            summary.kv_full_bytes += sum(rows[i].predicted_kv_full_bytes for i in found.indices)
            summary.num_running += len(found.indices)
            if found.num_pages > summary.peak_pages:
                summary.peak_pages, summary.peak_row = found.num_pages, rows[found.indices[0]].index
                summary.pool_bytes = num_bytes
        if summary.peak_pages > fullest:
            running = (
                row for row in rows if row.status == "ok"
            )  # others may have the order of another budget
            self._fullest_rows = sorted(running, key=attrgetter("order"))[:MAX_FORECAST_ROWS]


def _text_batches(
    rows: list[tuple[PlanRow, "Document"]],
) -> Iterator[list[tuple[PlanRow, "Document"]]]:
    batch: list[tuple[PlanRow, Document]] = []
    chars = 0
    for row in rows:
        batch.append(row)
        chars += len(row[1].text or "")
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
