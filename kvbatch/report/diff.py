"""Two runs side by side, joined on row id: memory, speed, answers and quality."""

import json
from typing import TYPE_CHECKING, Any

from kvbatch.report.summary import load_summary
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.read_output import read_rows
from kvbatch.run_dir.stats_files import read_stats
from kvbatch.text import format_bytes

if TYPE_CHECKING:
    import polars as pl

MAX_IDS = 20
_COLUMNS = ("output", "status", "kv_full_bytes", "kv_kept_bytes", "prompt_tokens", "completion_tokens")
_SUMMARY = (
    "tokens_per_s",
    "running_s",
    "kv_peak_bytes_measured",
    "kv_pool_bytes",
    "config_hash",
    "model",
    "run_id",
)
_MEASURES = ("nll_delta", "kl", "top1_agreement")


def compare(a: RunDirectory, b: RunDirectory) -> dict[str, Any]:
    """Return what two runs have in common and where they differ.

    Rows with the same id are joined in their order. Bytes are of the rows that both answered, so that a run is not
    better for having failed at a long document.

    Raises:
        InputError: One of them is no run directory.
    """
    import polars as pl

    left, right = _rows(a).with_row_index("place"), _rows(b)
    key = ["row_id", "repeat"]
    both = left.join(right, on=key, suffix="_b").sort("place")
    answered = both.filter((pl.col("status") == "ok") & (pl.col("status_b") == "ok"))
    changed = answered.filter(pl.col("output") != pl.col("output_b"))
    status = both.filter(pl.col("status") != pl.col("status_b"))
    return {
        "a": _side(a, answered, ""),
        "b": _side(b, answered, "_b"),
        "rows_both": len(both),
        "rows_answered_by_both": len(answered),
        "rows_only_a": len(left.join(right, on=key, how="anti")),
        "rows_only_b": len(right.join(left, on=key, how="anti")),
        "rows_changed": len(changed),
        "changed_row_ids": changed["row_id"].head(MAX_IDS).to_list(),
        "common_prefix_ratio": _common_prefix(changed),
        "rows_of_other_status": len(status),
        "other_status_row_ids": status["row_id"].head(MAX_IDS).to_list(),
    }


def _rows(run: RunDirectory) -> "pl.DataFrame":
    import polars as pl

    run.read_manifest()
    rows = read_rows(run, (*_COLUMNS, "answers"))
    answers = [
        output if answers is None else json.dumps([answer["output"] for answer in answers])
        for output, answers in zip(rows["output"], rows["answers"].to_list(), strict=True)
    ]
    rows = rows.drop("answers").with_columns(pl.Series("output", answers, pl.String))
    return rows.with_columns(pl.int_range(pl.len()).over("row_id").alias("repeat"))


def _side(run: RunDirectory, answered: "pl.DataFrame", suffix: str) -> dict[str, Any]:
    summary = load_summary(run.path)
    full, kept, prompt, completion = (answered[name + suffix].sum() for name in _COLUMNS[2:])
    means = read_stats(run, run.quality)
    return {name: summary.get(name) for name in _SUMMARY} | {
        "path": str(run.path),
        "kv_full_bytes": full,
        "kv_kept_bytes": kept,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "quality": {
            name: means[name].mean() for name in _MEASURES if means is not None and name in means.columns
        },
    }


def _common_prefix(changed: "pl.DataFrame") -> float | None:
    """Return how much of the longer of two answers is the same from its beginning, on average."""
    ratios = []
    for one, other in changed.select("output", "output_b").iter_rows():
        pairs = enumerate(zip(one, other, strict=False))
        same = next((i for i, (x, y) in pairs if x != y), min(len(one), len(other)))
        ratios.append(same / max(len(one), len(other)))
    return sum(ratios) / len(ratios) if ratios else None


def render_diff(found: dict[str, Any]) -> str:
    """Return a comparison as the lines a terminal shows."""
    a, b = found["a"], found["b"]
    lines = [["", "A", "B", "B / A"], ["run", a["run_id"], b["run_id"], ""]]
    for name, text, show in (
        ("kv_kept_bytes", "KV kept", format_bytes),
        ("kv_full_bytes", "KV full", format_bytes),
        ("kv_peak_bytes_measured", "KV peak", format_bytes),
        ("kv_pool_bytes", "KV pool", format_bytes),
        ("tokens_per_s", "tokens/s", "{:,.1f}".format),
        ("running_s", "running s", "{:,.1f}".format),
        ("completion_tokens", "generated", "{:,}".format),
    ):
        values = [a[name], b[name]]
        cells = ["–" if value is None else show(value) for value in values]
        ratio = f"{values[1] / values[0]:.2f}" if all(values) else ""
        lines.append([text, *cells, ratio])
    for name in _MEASURES:
        if name in a["quality"] or name in b["quality"]:
            cells = [f"{side['quality'][name]:.4f}" if name in side["quality"] else "–" for side in (a, b)]
            lines.append([name, *cells, ""])
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    table = "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    )
    return f"{table}\n\n{_rows_text(found)}"


def _rows_text(found: dict[str, Any]) -> str:
    answered, changed = found["rows_answered_by_both"], found["rows_changed"]
    text = f"rows     {found['rows_both']:,} in both, {answered:,} answered by both"
    text += f", {found['rows_only_a']:,} only in A, {found['rows_only_b']:,} only in B\n"
    text += f"answers  {answered - changed:,} the same, {changed:,} changed"
    if changed:
        text += f", alike in their first {found['common_prefix_ratio']:.0%}: {_ids(found['changed_row_ids'], changed)}"
    if other := found["rows_of_other_status"]:
        text += f"\nstatus   {other:,} not the same: {_ids(found['other_status_row_ids'], other)}"
    return text


def _ids(row_ids: list[str], total: int) -> str:
    more = total - len(row_ids)
    return ", ".join(row_ids) + (f" and {more:,} more" if more else "")
