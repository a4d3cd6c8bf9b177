"""Rows that earlier runs did: found by their id and content, copied into the output of a new run."""

import hashlib
import logging
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from kvbatch.errors import Damaged, InputError, JobChanged
from kvbatch.run_dir.advice import continuation
from kvbatch.run_dir.commit import finished_rows, is_committed, planned_shards, planned_starts, shard_table
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.output_schema import OUTPUT_FIELDS
from kvbatch.run_dir.plan_file import PlanRow
from kvbatch.run_dir.reuse import Reuse
from kvbatch.run_dir.wal import read_rows

Place = tuple[int, int]  # which of the runs, and the row's index in it

_REDO = -1  # a row that is known, but to be done again
_INDEX_BITS = 48


class PreviousRows:
    """Know where the rows of earlier runs are: 24 bytes a row.

    Raises:
        InputError: A run cannot be read, or has to be whole and is not.
    """

    def __init__(self, reuse: Reuse):
        self._reuse = reuse
        columns = ["kvb_status", "kvb_finish_reason"]
        high, low, places = array("Q"), array("Q"), array("q")
        for number, run in enumerate(reuse.directories):
            num_rows = 0
            for planned, made in finished_rows(run, columns, self._note_damage):
                num_rows += 1
                is_redone = made["kvb_finish_reason"] in reuse.redo or (
                    made["kvb_status"] == "error"
                    and "error" in reuse.redo  # invalid_output ends by length or stop
                )
                # a rejected row is read and rejected again
                if planned.status != "rejected" and (reuse.same_input or not is_redone):
                    key = _key(planned.row_id, planned.content)
                    high.append(key[0])
                    low.append(key[1])
                    places.append(_REDO if is_redone else number << _INDEX_BITS | planned.index)
            if reuse.same_input and num_rows != run.read_manifest().num_rows:
                command = continuation(run, run.read_manifest())
                raise InputError(f"{run.path} did not come to its end; continue it first: {command}")
        # stable: of equal keys, that of the newest run comes first
        order = np.argsort(np.asarray(high), kind="stable")
        self._high, self._low, self._places = (np.asarray(each)[order] for each in (high, low, places))
        self._num_met = 0

    @property
    def num_redone(self) -> int:
        """Known rows that are not reused."""
        return int((self._places == _REDO).sum())

    def find(self, row_id: str, content: str | None) -> Place | None:
        """Return where the row's output lies; None if it has to be made.

        Raises:
            JobChanged: The input is not that of the run, and has to be.
        """
        high, low = _key(row_id, content)
        at = int(np.searchsorted(self._high, np.uint64(high)))
        if at == len(self._high) or (int(self._high[at]), int(self._low[at])) != (high, low):
            if self._reuse.same_input:
                raise self._changed(f"row {row_id!r} is not in it as it is now")
            return None
        self._num_met += 1
        place = int(self._places[at])
        return None if place == _REDO else (place >> _INDEX_BITS, place & ((1 << _INDEX_BITS) - 1))

    def check_met(self) -> None:
        """Say after planning whether every row was there.

        Raises:
            JobChanged: The input is not that of the run, and has to be.
        """
        missing = len(self._places) - self._num_met
        if self._reuse.same_input and missing:
            raise self._changed(f"{missing:,} of its rows are gone")

    def _note_damage(self, error: Damaged) -> None:
        """Say that the rows of a shard are not reused; where they have to be, refuse."""
        if self._reuse.same_input:
            raise error
        logging.getLogger(__name__).warning("warning: its rows are done again: %s", error)

    def _changed(self, what: str) -> JobChanged:
        return JobChanged(
            f"the input changed since {self._reuse.runs[0]}: {what}; run the job with input.incremental=true instead"
        )


class ReusedRows:
    """Copy rows of earlier runs; a shard is proved to be whole when it is first read."""

    def __init__(self, reuse: Reuse):
        self._reuse = reuse
        self._starts: dict[int, list[int]] = {}  # of each run's shards, the index of the first row
        self._whole: set[tuple[int, int]] = set()

    def copy(self, places: Sequence[Place]) -> list[dict[str, Any]]:
        """Return the output columns of rows, in the order of `places`.

        Raises:
            InputError: A shard of theirs is gone or damaged.
        """
        wanted: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for position, (number, index) in enumerate(places):
            starts = self._shard_starts(number)
            shard = bisect_right(starts, index) - 1
            wanted[number, shard].append((position, index - starts[shard]))
        rows: list[dict[str, Any]] = [{}] * len(places)
        for (number, shard), pairs in wanted.items():
            found = self._read(number, shard, [place for _, place in pairs])
            for (position, _), row in zip(pairs, found, strict=True):
                rows[position] = row
        return rows

    def _shard_starts(self, number: int) -> list[int]:
        if number not in self._starts:
            self._starts[number] = planned_starts(self._reuse.directories[number])
        return self._starts[number]

    def _read(self, number: int, shard: int, places: list[int]) -> list[dict[str, Any]]:
        run = self._reuse.directories[number]
        try:
            if is_committed(run, shard, deep=(number, shard) not in self._whole):
                self._whole.add((number, shard))
                return shard_table(run, shard, pa.schema(OUTPUT_FIELDS).names).take(places).to_pylist()
            finished = read_rows(run.wal_file(shard), OUTPUT_FIELDS)
            return [finished[place] for place in places]
        except (OSError, pa.ArrowException, KeyError) as error:
            raise Damaged(
                run.shard_file(shard),
                "is missing or damaged, and rows of it are to be reused",
                f"make it again: kvbatch resume {run.path}, or start afresh: kvbatch run --new-run",
            ) from error


def can_be_reused(run: RunDirectory) -> bool:
    """Tell whether the rows that a planned run still has to reuse are where its plan says.

    Raises:
        InputError: Its manifest or plan cannot be read.
    """
    reuse = Reuse.of(run)
    if not reuse.runs or run.read_manifest().plan is None:
        return True
    reused = ReusedRows(reuse)
    try:
        for number, rows in enumerate(planned_shards(run, ["reused_run", "reused_index"])):
            if not is_committed(run, number):
                reused.copy(list(_places(rows)))
    except Damaged as error:
        if error.path == run.plan:
            raise
        return False
    return True


def _places(rows: Iterable[PlanRow]) -> Iterable[Place]:
    return (
        (row.reused_run, row.reused_index)
        for row in rows
        if row.reused_run is not None and row.reused_index is not None
    )


def _key(row_id: str, content: str | None) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{row_id}\0{content}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
