"""What was measured beside the rows, as Parquet: the pool step by step, and what every lane kept."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kvbatch.atomic_file import write_table
from kvbatch.errors import Damaged
from kvbatch.run_dir.checked_file import describe_file, file_problem, opened_table
from kvbatch.run_dir.directory import RunDirectory

if TYPE_CHECKING:
    import polars as pl

    from engine.monitoring import Monitor
    from kvcache.sequence.lane_usage import LaneUsage

# The fields of `engine.monitoring.StepSample`, which says what they mean.
STEP_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("elapsed_s", pa.float64()),
        ("step_s", pa.float64()),
        ("num_tokens", pa.int64()),
        ("num_prefills", pa.int32()),
        ("num_decodes", pa.int32()),
        ("num_prefill_buffers", pa.int32()),
        ("kv_used_bytes", pa.int64()),
        ("kv_reserved_bytes", pa.int64()),
    ]
)
# All counts are sums over the rows that ran; a shared prefix counts with each of its rows.
LANE_SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("head", pa.int32()),
        ("tokens_seen", pa.int64()),
        ("tokens_kept", pa.int64()),
        ("kept_ratio", pa.float64()),
        (
            "whole_tokens",
            pa.int64(),
        ),  # kept unquantized, in no tier: warm-up tokens, recent window, open page
        (
            "tiers",
            pa.list_(pa.struct([("key_bits", pa.int8()), ("value_bits", pa.int8()), ("tokens", pa.int64())])),
        ),
        ("bits_per_element", pa.float64()),  # of the kept tokens, scales included
        ("kv_bytes", pa.int64()),  # of pages; a row's kept bytes also count the free places of its blocks
    ]
)


def write_stats(monitor: "Monitor", run: RunDirectory) -> dict[str, dict[str, Any]]:
    """Write `stats/steps.parquet` and, where lanes differ, `stats/kv_lanes.parquet`; raises as `write_table`.

    Return what describes each of them, by its name in the run directory.
    """
    samples = [asdict(sample) for sample in monitor.samples]
    tables = {run.steps: pa.Table.from_pylist(samples, STEP_SCHEMA)}
    if monitor.lanes:
        tables[run.kv_lanes] = pa.Table.from_pylist(lane_rows(monitor.lanes), LANE_SCHEMA)
    return {str(path.relative_to(run.path)): write_table(table, path) for path, table in tables.items()}


def kept_stats(
    run: RunDirectory, facts: Mapping[str, Mapping[str, Any]], note: Callable[[str], None]
) -> dict[str, Mapping[str, Any]]:
    """Return what describes the statistics of an earlier session; remove what is damaged, as it cannot be made again.

    Args:
        facts: how the summary describes them; empty if the summary was lost.
        note: called with a warning for each file that was removed.
    """
    kept: dict[str, Mapping[str, Any]] = {}
    for path in (run.steps, run.kv_lanes):
        name = str(path.relative_to(run.path))
        found = facts.get(name)
        try:
            if found is None and path.exists():
                with opened_table(path, run.repair) as file:
                    found = {"rows": len(file.read())} | describe_file(path)
            if found and (problem := file_problem(path, found, deep=True)):
                raise Damaged(path, problem, "its measurements are lost, the report leaves them out")
            if found:
                kept[name] = found
        except Damaged as error:
            note(f"warning: {error}")
            path.unlink(missing_ok=True)
    return kept


def read_stats(run: RunDirectory, path: Path, columns: list[str] | None = None) -> "pl.DataFrame | None":
    """Return a table of a run that reports show; None if it is missing or not as it was written.

    Raises:
        InputError: The manifest cannot be read.
    """
    import polars as pl

    run.read_manifest()
    try:
        run.check_file(path)
        with opened_table(path, run.repair) as file:
            frame = pl.from_arrow(file.read(columns))
        assert isinstance(frame, pl.DataFrame)
        return frame
    except Damaged:
        return None


def lane_rows(usage: "LaneUsage") -> list[dict[str, Any]]:
    """Return one row per layer and head."""
    kept, bits, num_bytes = (x.tolist() for x in (usage.tokens_kept, usage.bits_per_element, usage.num_bytes))
    tokens = usage.tokens.permute(1, 2, 0).tolist()  # [L, KVH, lists]
    tiers = usage.formats[1:]
    return [
        {
            "layer": layer,
            "head": head,
            "tokens_seen": usage.tokens_seen,
            "tokens_kept": kept[layer][head],
            "kept_ratio": kept[layer][head] / usage.tokens_seen,
            "whole_tokens": whole,
            "tiers": [
                {"key_bits": tier.key_bits, "value_bits": tier.value_bits, "tokens": count}
                for tier, count in zip(tiers, in_tiers, strict=True)
            ],
            "bits_per_element": bits[layer][head],
            "kv_bytes": num_bytes[layer][head],
        }
        for layer, heads in enumerate(tokens)
        for head, (whole, *in_tiers) in enumerate(heads)
    ]
