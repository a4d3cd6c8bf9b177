"""Two runs side by side, joined on row id: memory, speed, answers and quality."""

import json
from os.path import commonprefix
from typing import TYPE_CHECKING, TypedDict, cast

from kvbatch.report.summary import load_summary
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.read_output import read_rows
from kvbatch.run_dir.stats_files import read_stats
from kvbatch.text import format_bytes

if TYPE_CHECKING:
    import polars as pl

MAX_IDS = 20
_MAX_CHARS = 240  # of an answer that is shown shortened
_CONTEXT_CHARS = 40  # of what two answers have in common, shown before they part
_COLUMNS = ("output", "status", "kv_full_bytes", "kv_kept_bytes", "prompt_tokens", "completion_tokens")
_MEASURES = ("nll_delta", "kl", "top1_agreement")


class Side(TypedDict):
    """One of two compared runs; bytes and tokens are of the rows that both runs answered."""

    tokens_per_s: float | None
    running_s: float | None
    kv_peak_bytes_measured: int | None
    kv_pool_bytes: int | None
    config_hash: str
    model: str
    run_id: str
    path: str
    kv_full_bytes: int
    kv_kept_bytes: int
    prompt_tokens: int
    completion_tokens: int
    quality: dict[str, float]


class ChangedAnswer(TypedDict):
    """A row that both runs answered, and not alike."""

    row_id: str
    a: str
    b: str


class Comparison(TypedDict):
    """What two runs have in common and where they differ."""

    a: Side
    b: Side
    rows_both: int
    rows_answered_by_both: int
    rows_only_a: int
    rows_only_b: int
    rows_changed: int
    changed_row_ids: list[str]  # the first ones
    changed: list[ChangedAnswer]  # the first ones, or all
    common_prefix_ratio: float | None  # of the longer of two changed answers, on average
    rows_of_other_status: int
    other_status_row_ids: list[str]


def compare(a: RunDirectory, b: RunDirectory, *, full: bool = False) -> Comparison:
    """Compare two runs row by row.

    Rows with the same id are joined in their order. Bytes are of the rows that both answered, so that a run is not
    better for having failed at a long document.

    Args:
        full: return every changed answer whole; else the first ones, shortened around the place where they part.

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
    shown = changed if full else changed.head(MAX_IDS)
    return {
        "a": _side(a, answered, ""),
        "b": _side(b, answered, "_b"),
        "rows_both": len(both),
        "rows_answered_by_both": len(answered),
        "rows_only_a": len(left.join(right, on=key, how="anti")),
        "rows_only_b": len(right.join(left, on=key, how="anti")),
        "rows_changed": len(changed),
        "changed_row_ids": changed["row_id"].head(MAX_IDS).to_list(),
        "changed": [
            _changed(row_id, one, other, full=full)
            for row_id, one, other in shown.select("row_id", "output", "output_b").iter_rows()
        ],
        "common_prefix_ratio": _common_prefix_ratio(changed),
        "rows_of_other_status": len(status),
        "other_status_row_ids": status["row_id"].head(MAX_IDS).to_list(),
    }


def _rows(run: RunDirectory) -> "pl.DataFrame":
    import polars as pl

    run.read_manifest()
    rows = read_rows(run, (*_COLUMNS, "answers"))
    answers = [
        output if answers is None else json.dumps([a["output"] for a in answers], ensure_ascii=False)
        for output, answers in zip(rows["output"], rows["answers"].to_list(), strict=True)
    ]
    rows = rows.drop("answers").with_columns(pl.Series("output", answers, pl.String))
    return rows.with_columns(pl.int_range(pl.len()).over("row_id").alias("repeat"))


def _side(run: RunDirectory, answered: "pl.DataFrame", suffix: str) -> Side:
    summary = load_summary(run.path)
    full, kept, prompt, completion = (int(answered[name + suffix].sum()) for name in _COLUMNS[2:])
    return {
        "tokens_per_s": summary["tokens_per_s"],
        "running_s": summary.get("running_s"),
        "kv_peak_bytes_measured": summary.get("kv_peak_bytes_measured"),
        "kv_pool_bytes": summary.get("kv_pool_bytes"),
        "config_hash": summary["config_hash"],
        "model": summary["model"],
        "run_id": summary["run_id"],
        "path": str(run.path),
        "kv_full_bytes": full,
        "kv_kept_bytes": kept,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "quality": _quality(run),
    }


def _quality(run: RunDirectory) -> dict[str, float]:
    """Return the means of what the quality guard of a run measured."""
    sample = read_stats(run, run.quality)
    if sample is None:
        return {}
    means = {name: sample[name].mean() for name in _MEASURES if name in sample.columns}
    return {name: cast(float, mean) for name, mean in means.items() if mean is not None}


def _common_prefix_ratio(changed: "pl.DataFrame") -> float | None:
    ratios = [
        len(commonprefix(answers)) / max(map(len, answers))
        for answers in changed.select("output", "output_b").iter_rows()
    ]
    return sum(ratios) / len(ratios) if ratios else None


def _changed(row_id: str, one: str, other: str, *, full: bool) -> ChangedAnswer:
    if full:
        return {"row_id": row_id, "a": one, "b": other}
    start = max(0, len(commonprefix([one, other])) - _CONTEXT_CHARS)
    return {"row_id": row_id, "a": _shortened(one, start), "b": _shortened(other, start)}


def _shortened(text: str, start: int) -> str:
    """Return a part of a text that contains its character `start`, with an ellipsis where something is left out."""
    if len(text) <= _MAX_CHARS:
        return text
    part = text[start : start + _MAX_CHARS]
    return "…" * (start > 0) + part + "…" * (start + _MAX_CHARS < len(text))


def render_diff(found: Comparison) -> str:
    """Return a comparison as the lines that a terminal shows."""
    a, b = found["a"], found["b"]
    sizes = ("KV kept", "KV full", "KV peak", "KV pool")
    sizes_a = (a["kv_kept_bytes"], a["kv_full_bytes"], a["kv_peak_bytes_measured"], a["kv_pool_bytes"])
    sizes_b = (b["kv_kept_bytes"], b["kv_full_bytes"], b["kv_peak_bytes_measured"], b["kv_pool_bytes"])
    lines = [["", "A", "B", "B / A"], ["run", a["run_id"], b["run_id"], ""]]
    for name, one, other in zip(sizes, sizes_a, sizes_b, strict=True):
        cells = ["–" if value is None else format_bytes(value) for value in (one, other)]
        lines.append([name, *cells, _ratio(one, other)])
    speeds = (
        ("tokens/s", a["tokens_per_s"], b["tokens_per_s"]),
        ("running s", a["running_s"], b["running_s"]),
    )
    for name, first, second in speeds:
        cells = ["–" if value is None else f"{value:,.1f}" for value in (first, second)]
        lines.append([name, *cells, _ratio(first, second)])
    tokens = (a["completion_tokens"], b["completion_tokens"])
    lines.append(["generated", *(f"{number:,}" for number in tokens), _ratio(*tokens)])
    for name in _MEASURES:
        if name in a["quality"] or name in b["quality"]:
            cells = [f"{side['quality'][name]:.4f}" if name in side["quality"] else "–" for side in (a, b)]
            lines.append([name, *cells, ""])
    parts = [_table(lines), _rows_text(found)]
    return "\n\n".join(parts + [_answers_text(answer) for answer in found["changed"]])


def _ratio(one: float | None, other: float | None) -> str:
    return f"{other / one:.2f}" if one and other else ""


def _table(lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    )


def _rows_text(found: Comparison) -> str:
    answered, changed = found["rows_answered_by_both"], found["rows_changed"]
    text = f"rows     {found['rows_both']:,} in both, {answered:,} answered by both"
    text += f", {found['rows_only_a']:,} only in A, {found['rows_only_b']:,} only in B\n"
    text += f"answers  {answered - changed:,} the same, {changed:,} changed"
    if changed:
        text += f", alike in their first {found['common_prefix_ratio']:.0%}: {_ids(found['changed_row_ids'], changed)}"
    if other := found["rows_of_other_status"]:
        text += f"\nstatus   {other:,} not the same: {_ids(found['other_status_row_ids'], other)}"
    return text


def _answers_text(answer: ChangedAnswer) -> str:
    return f"{answer['row_id']}\n  A  {answer['a']}\n  B  {answer['b']}"


def _ids(row_ids: list[str], total: int) -> str:
    more = total - len(row_ids)
    return ", ".join(row_ids) + (f" and {more:,} more" if more else "")
