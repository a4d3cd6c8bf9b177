"""Rows that an earlier run did: found by their id and content, copied into the output of a new run.

Both the incremental mode and `kvbatch retry` are this, over another choice of rows. The plan of the new run says of
each carried row where the earlier run wrote it, so that a run that is resumed copies the same.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvbatch.errors import InputError, JobFileError
from kvbatch.manifest import RunDirectory

if TYPE_CHECKING:
    from kvbatch.corpus import Document

Place = tuple[int, int]  # shard, and the row's place in it

_REDO = -1  # a row that is known, but to be done again


def content_of(document: "Document", columns: Sequence[str]) -> str | None:
    """Return the hash of all that a row puts into its prompt; None for a row without a usable text.

    Args:
        columns: those that the prompt uses beside the text.
    """
    if not columns or document.sha1 is None:
        return document.sha1
    values = document.columns
    text = json.dumps([document.sha1, *(values.get(name) for name in columns)])
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[: len(document.sha1)]


def row_line(document: "Document") -> bytes:
    """Return what a file's text hash is made of for one row: all of it that the output shows or hangs on."""
    values = json.dumps(list(document.columns.items()), ensure_ascii=True)
    return f"{document.row_id}\0{document.sha1}\0{values}\n".encode()


class EarlierRun:
    """Know the rows of a run that came to its end: 24 bytes a row.

    Args:
        run: the run.
        redo: finish reasons of the rows that are done again, "error" for those without an answer. None: whatever ran is carried, the rest
            is judged again, which takes no forward pass unless it fits now.

    Raises:
        InputError: The run is not whole.
    """

    def __init__(self, run: RunDirectory, redo: frozenset[str] | None = None):
        self.run = run
        self._is_whole = redo is not None  # its input has to be the same
        keys: list[tuple[int, int]] = []
        places: list[int] = []
        for planned, made in _shards(run):
            for place, (plan, row) in enumerate(zip(planned, made, strict=True)):
                if plan["status"] != "rejected":  # a rejected row is read and rejected again
                    keys.append(_key(plan["row_id"], plan["content"]))
                    carried = (
                        row["kvb_attempts"] > 0 if redo is None else not row["kvb_finish_reason"] in redo
                    )
                    places.append(plan["shard"] << 32 | place if carried else _REDO)
        halves = np.array(keys, np.uint64).reshape(-1, 2)
        order = np.argsort(halves[:, 0])
        self._high, self._low = halves[order, 0], halves[order, 1]
        self._places = np.array(places, np.int64)[order]
        self._num_met = 0

    @property
    def num_redone(self) -> int:
        """Rows that are not carried, rejected ones aside."""
        return int((self._places == _REDO).sum())

    def suits(self, revision: str) -> bool:
        """Tell whether the run's rows may stand beside those of a model's revision.

        Raises:
            JobFileError: They may not, and only rows of the run were to be done again.
        """
        before = self.run.read_manifest()["model"]["revision"]
        if self._is_whole and before != revision:
            raise JobFileError(
                f"the model changed since {self.run.path}, from revision {before} to {revision}; run the job anew"
            )
        return before == revision

    def find(self, row_id: str, content: str | None) -> Place | None:
        """Return where the row's output lies; None if it has to be made.

        Raises:
            JobFileError: The run has no such row, and only rows of it were to be done again.
        """
        high, low = _key(row_id, content)
        at = int(np.searchsorted(self._high, np.uint64(high)))
        if at == len(self._high) or (int(self._high[at]), int(self._low[at])) != (high, low):
            if self._is_whole:
                raise self._changed(f"row {row_id!r} is not in it as it is now")
            return None
        self._num_met += 1
        place = int(self._places[at])
        return None if place == _REDO else (place >> 32, place & 0xFFFFFFFF)

    def check_met(self) -> None:
        """Say after planning whether every row was there.

        Raises:
            JobFileError: A row is missing, and only rows of the run were to be done again.
        """
        missing = len(self._places) - self._num_met
        if self._is_whole and missing:
            raise self._changed(f"{missing:,} of its rows are gone")

    def _changed(self, what: str) -> JobFileError:
        return JobFileError(
            f"the input changed since {self.run.path}: {what}; run the job with input.incremental: true instead"
        )


def copy_rows(run_dir: Path, places: Sequence[Place], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the columns `names` of some rows of an earlier run's output, in the order of `places`.

    Raises:
        InputError: A shard of that run is gone or damaged.
    """
    wanted: dict[int, list[int]] = defaultdict(list)  # shard -> positions in `places`
    for position, (shard, _) in enumerate(places):
        wanted[shard].append(position)
    rows: list[dict[str, Any]] = [{}] * len(places)
    for shard, positions in wanted.items():
        table = _read(_shard_file(RunDirectory(run_dir), shard), names)
        found = table.take([places[position][1] for position in positions]).to_pylist()
        for position, row in zip(positions, found, strict=True):
            rows[position] = row
    return rows


def _shards(run: RunDirectory) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Yield what the plan and the output say of the rows of each shard."""
    try:
        with pq.ParquetFile(run.path / "plan.parquet") as plan:
            for shard in range(plan.num_row_groups):
                planned = plan.read_row_group(shard, ["row_id", "content", "status", "shard"])
                names = ("kvb_status", "kvb_finish_reason", "kvb_attempts")
                made = _read(_shard_file(run, shard), names)
                if len(made) != len(planned):
                    raise InputError(
                        f"{run.path}: shard {shard} has {len(made):,} rows, not {len(planned):,}"
                    )
                yield planned.to_pylist(), made.to_pylist()
    except (OSError, pa.ArrowException, KeyError) as error:
        raise InputError(f"{run.path / 'plan.parquet'} cannot be read: {error}") from error


def _read(file: Path, names: Sequence[str]) -> pa.Table:
    try:
        with pq.ParquetFile(file) as parquet:
            return parquet.read(list(names))
    except (OSError, pa.ArrowException, KeyError) as error:
        raise InputError(
            f"{file}, whose rows are carried over, cannot be read ({error}); run the job with --new-run"
        ) from error


def _shard_file(run: RunDirectory, shard: int) -> Path:
    return run.shards / f"part-{shard:05d}.parquet"


def _key(row_id: str, content: str | None) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{row_id}\0{content}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
