"""What a run did, recomputed from its Parquet by polars; the measured part is read from summary.json."""

import json
from pathlib import Path
from typing import Any

from kvbatch.manifest import RunDirectory, open_run
from kvbatch.progress import format_bytes

_COUNTED = ("prompt", "completion", "cached_prompt", "dropped")


def summarise(run: RunDirectory, measures: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a run: figures of its Parquet, and what was measured beside it.

    Args:
        measures: empty for a run that did not end.
    """
    figures = _figures(run.shards)
    manifest = run.read_manifest()
    seconds = measures.get("running_s")
    done = figures["prompt_tokens"] + figures["completion_tokens"]
    speed = {
        "tokens_per_s": done / seconds if seconds else None,
        "generated_tokens_per_s": figures["completion_tokens"] / seconds if seconds else None,
    }
    head = {
        "job": manifest["job"],
        "run_id": run.run_id,
        "status": "complete" if measures else "incomplete",
        "config_hash": manifest["config_hash"],
        "kvbatch": manifest["kvbatch"],
        "model": manifest["model"]["path"],
        "planned_rows": manifest.get("num_rows"),
    }
    return head | figures | speed | measures | {"output": str(run.shards)}


def load_summary(path: Path) -> dict[str, Any]:
    """Return the summary of the run that a path names.

    Raises:
        InputError: There is no run.
    """
    run = open_run(path)
    saved = json.loads(run.summary.read_text()) if run.summary.exists() else {}
    computed = summarise(run, {})
    derived = set(computed) - {"status", "tokens_per_s", "generated_tokens_per_s"}
    return computed | {key: value for key, value in saved.items() if key not in derived}


def _figures(shards: Path) -> dict[str, Any]:
    """Count rows and tokens over the shards."""
    import polars as pl

    files = sorted(shards.glob("part-*.parquet"))
    counts = dict.fromkeys((f"{name}_tokens" for name in _COUNTED), 0)
    empty = {"rows": 0, "ok": 0, "errors": 0, "rejected": 0, "truncated": 0}
    if not files:
        return empty | counts | {"finish_reasons": {}, "error_codes": {}}
    ran = pl.col("kvb_attempts") > 0
    rows = pl.scan_parquet(files).select(pl.col("^kvb_.*$"))
    totals = rows.select(
        pl.len().alias("rows"),
        (pl.col("kvb_status") == "ok").sum().alias("ok"),
        (pl.col("kvb_status") == "error").sum().alias("errors"),
        (pl.col("kvb_status") == "rejected").sum().alias("rejected"),
        (pl.col("kvb_truncation_side").is_not_null() & ran).sum().alias("truncated"),
        *(pl.col(f"kvb_{name}_tokens").filter(ran).sum().alias(f"{name}_tokens") for name in _COUNTED),
    )
    reasons = _counts(rows.filter(ran), "kvb_finish_reason")
    codes = _counts(rows, "kvb_error_code")
    return totals.collect().to_dicts()[0] | {"finish_reasons": reasons, "error_codes": codes}


def _counts(rows: Any, column: str) -> dict[str, int]:
    import polars as pl

    found = (
        rows.filter(pl.col(column).is_not_null()).group_by(column).len().sort("len", column, descending=True)
    )
    return dict(found.collect().iter_rows())


def render(summary: dict[str, Any]) -> str:
    """Return a summary as the lines a terminal shows."""
    s = summary
    lines = [
        ("job", f"{s['job']}, run {s['run_id']}, {s['status']}"),
        ("rows", f"{s['rows']:,}: {s['ok']:,} ok, {s['errors']:,} errors, {s['rejected']:,} rejected"),
        (
            "tokens",
            f"{s['prompt_tokens']:,} prompt ({s['cached_prompt_tokens']:,} of them from the shared prefix), "
            f"{s['completion_tokens']:,} generated",
        ),
    ]
    if s["truncated"]:
        lines.append(("truncated", f"{s['truncated']:,} rows, {s['dropped_tokens']:,} tokens dropped"))
    if s["status"] == "complete":
        if s["tokens_per_s"]:
            generated = f"{s['generated_tokens_per_s']:,.1f} of them generated"
            lines.append(
                ("speed", f"{s['tokens_per_s']:,.1f} tokens/s, {generated}, on {s['device']} in {s['dtype']}")
            )
        parts = ", ".join(
            f"{name} {s[name + '_s']:.1f}" for name in ("opening", "planning", "loading", "running")
        )
        lines.append(("wall", f"{s['wall_s']:.1f} s: {parts}"))
        lines.append(
            (
                "KV peak",
                f"{format_bytes(s['kv_peak_bytes_measured'])} measured, "
                f"{format_bytes(s['kv_peak_bytes_predicted'])} predicted, "
                f"budget {format_bytes(s['memory_budget_bytes'])}",
            )
        )
        if s["packing_efficiency"] is not None:
            bins = f"{s['num_bins']:,} bin{'s' if s['num_bins'] != 1 else ''}"
            lines.append(("packing", f"{s['packing_efficiency']:.1%} of the pool over {bins}"))
    elif s["planned_rows"] is not None:
        lines.append(("planned", f"{s['planned_rows']:,} rows"))
    lines.append(("finished by", _listed(s["finish_reasons"]) or "nothing ran"))
    if s["error_codes"]:
        lines.append(("failed by", _listed(s["error_codes"])))
    lines.append(("output", f"{s['output']}/part-*.parquet"))
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
