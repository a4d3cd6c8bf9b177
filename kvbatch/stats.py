"""What was measured beside the rows, as Parquet: the pool step by step, and what every lane kept."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kvbatch.manifest import RunDirectory
from kvbatch.writer import write_table

if TYPE_CHECKING:
    from engine.monitoring import Monitor
    from kvcache.monitoring import LaneUsage

# The fields of `engine.monitoring.StepSample`, which says what they mean.
STEP_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("elapsed_s", pa.float64()),
        ("step_s", pa.float64()),
        ("num_tokens", pa.int64()),
        ("num_prefills", pa.int32()),
        ("num_decodes", pa.int32()),
        ("num_arenas", pa.int32()),
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
        ("whole_tokens", pa.int64()),  # kept whole outside of the tiers: sinks, recent window, pending
        (
            "tiers",
            pa.list_(pa.struct([("key_bits", pa.int8()), ("value_bits", pa.int8()), ("tokens", pa.int64())])),
        ),
        ("bits_per_element", pa.float64()),  # of those kept, scales included
        ("kv_bytes", pa.int64()),  # of pages; a row's kept bytes also count what its frames have free
    ]
)


def write_stats(monitor: "Monitor", run: RunDirectory) -> None:
    """Write `stats/steps.parquet` and, where lanes differ, `stats/kv_lanes.parquet`; raises as `write_table`."""
    samples = [asdict(sample) for sample in monitor.samples]
    write_table(pa.Table.from_pylist(samples, STEP_SCHEMA), run.steps)
    if monitor.lanes:
        write_table(pa.Table.from_pylist(lane_rows(monitor.lanes), LANE_SCHEMA), run.kv_lanes)


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
