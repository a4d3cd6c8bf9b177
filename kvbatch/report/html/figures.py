"""The figures of the page, computed from a run's Parquet by polars. Ids appear here, texts of documents never do."""

import math
from pathlib import Path
from typing import Any, TypedDict

import polars as pl

from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.read_output import read_rows
from kvbatch.run_dir.stats_files import read_stats

NUM_INTERVALS = 160  # of the time line: as many as a plot has room for
NUM_CLASSES = 24  # of lengths
MAX_POINTS = 1500  # a plot with more points is slow to open and shows no more
MAX_IDS = 20
NUM_SLOWEST = 10
WORST_QUALITY = {"nll_delta": "max", "kl": "max", "top1_agreement": "min"}
_NICE = (1, 2, 2.5, 5, 10)

Columns = dict[str, list[Any]]  # by name, all of the same length


class Lengths(TypedDict):
    """Rows by prompt length and outcome, and the bin of each row."""

    class_tokens: int  # width of a class
    counts: dict[str, list[int]]  # by outcome, rows of each class
    packed: Columns


class Bins(TypedDict):
    """How full the bins are, thinned to as many as a plot shows."""

    bin: list[int]
    rows: list[int]
    prompt_tokens: list[int]
    predicted_kv_bytes: list[int]
    packing_efficiency: list[float]
    num_bins: int
    mean_efficiency: float


class QualityFigures(TypedDict):
    """The sample that was compared with the full cache."""

    num_failed: int
    measures: dict[str, dict[str, Any]]  # by name, the mean and the worst
    rows: list[dict[str, Any]]  # the worst first


class Figures(TypedDict):
    """The figures of every part of the page; a part is None if the run has no data for it."""

    timeline: Columns | None
    lengths: Lengths | None
    bins: Bins | None
    kept: Columns | None
    quality: QualityFigures | None
    errors: list[dict[str, Any]]  # by kind, the most frequent first
    slowest: list[dict[str, Any]]  # rows, the slowest first


def compute(run: RunDirectory) -> Figures:
    """Return the figures of every part of the page.

    Raises:
        InputError: The manifest cannot be read, or a shard is missing or damaged.
    """
    names = ("status", "finish_reason", "error_code", "attempts", "prompt_tokens", "completion_tokens")
    rows = read_rows(run, (*names, "kv_kept_ratio", "prefill_s", "decode_s", "wait_s"))
    plan = _read(run, run.plan, ["outcome", "prompt_tokens", "bin"])
    return {
        "timeline": _timeline(_read(run, run.steps)),
        "lengths": _lengths(plan),
        "bins": _bins(_read(run, run.path / "stats" / "bins.parquet")),
        "kept": _kept(rows),
        "quality": _quality(_read(run, run.quality)),
        "errors": _errors(rows),
        "slowest": _slowest(rows),
    }


def _read(run: RunDirectory, path: Path, columns: list[str] | None = None) -> pl.DataFrame | None:
    frame = read_stats(run, path, columns)
    return frame if frame is not None and len(frame) else None


def _timeline(steps: pl.DataFrame | None) -> Columns | None:
    """Cut the run into equal intervals: tokens per second of its steps, and the most bytes held in it."""
    if steps is None:
        return None
    start, end = steps["elapsed_s"][0] - steps["step_s"][0], steps["elapsed_s"][-1]
    width_s = max(end - start, 1e-9) / NUM_INTERVALS
    place = ((pl.col("elapsed_s") - start) / width_s).floor().clip(0, NUM_INTERVALS - 1).alias("place")
    intervals = (
        steps.group_by(place)
        .agg(
            (pl.col("num_tokens").sum() / pl.col("step_s").sum()).alias("tokens_per_s"),
            pl.col("kv_used_bytes").max(),
            pl.col("kv_reserved_bytes").max(),
        )
        .sort("place")
    )
    seconds = ((intervals["place"] + 1) * width_s).alias("elapsed_s")
    return intervals.with_columns(seconds).drop("place").to_dict(as_series=False)


OUTCOMES = ("fits", "truncated", "split", "streamed", "refused")


def _lengths(plan: pl.DataFrame | None) -> Lengths | None:
    """Count rows by prompt length and outcome, and say which lengths share a bin."""
    plan = plan.filter(pl.col("prompt_tokens").is_not_null()) if plan is not None else None
    if plan is None or not len(plan):
        return None
    width = _nice_width(max(plan["prompt_tokens"].to_list()))
    plan = plan.with_columns(
        (pl.col("prompt_tokens") // width).alias("class"),
        pl.when(pl.col("outcome").is_in(OUTCOMES[:-1]))
        .then("outcome")
        .otherwise(pl.lit(OUTCOMES[-1]))
        .alias("outcome"),
    )
    num_classes = max(plan["class"].to_list()) + 1
    counts = {}
    for (outcome, *_), group in plan.group_by("outcome"):
        found = dict(group["class"].value_counts().iter_rows())
        counts[outcome] = [found.get(i, 0) for i in range(num_classes)]
    packed = _thinned(plan.filter(pl.col("bin").is_not_null()).sort("prompt_tokens"))
    return {
        "class_tokens": width,
        "counts": {name: counts[name] for name in OUTCOMES if name in counts},
        "packed": packed.select("prompt_tokens", "bin").to_dict(as_series=False),
    }


def _nice_width(longest: int) -> int:
    rough = max(1.0, (longest + 1) / NUM_CLASSES)
    power = 10 ** math.floor(math.log10(rough))
    return math.ceil(next(nice * power for nice in _NICE if nice * power >= rough))


def _bins(bins: pl.DataFrame | None) -> Bins | None:
    if bins is None:
        return None
    num_bytes = bins["predicted_kv_bytes"].to_list()
    shown = _thinned(bins)
    return {
        "bin": shown["bin"].to_list(),
        "rows": shown["rows"].to_list(),
        "prompt_tokens": shown["prompt_tokens"].to_list(),
        "predicted_kv_bytes": shown["predicted_kv_bytes"].to_list(),
        "packing_efficiency": shown["packing_efficiency"].to_list(),
        "num_bins": len(bins),
        "mean_efficiency": sum(num_bytes) / (len(num_bytes) * max(num_bytes)),
    }


def _kept(rows: pl.DataFrame) -> Columns | None:
    ran = rows.filter(pl.col("kv_kept_ratio").is_not_null()).sort("prompt_tokens")
    points = _thinned(ran).select("prompt_tokens", "kv_kept_ratio")
    return points.to_dict(as_series=False) if len(points) else None


def _quality(quality: pl.DataFrame | None) -> QualityFigures | None:
    if quality is None:
        return None
    compared = quality.filter(pl.col("error").is_null()).sort("nll_delta", descending=True)
    shown = ("row_id", "prompt_tokens", *WORST_QUALITY, "first_divergence")
    measures = {
        name: {"mean": compared[name].mean(), "worst": getattr(compared[name], which)()}
        for name, which in WORST_QUALITY.items()
    }
    failed = len(quality) - len(compared)
    return {"num_failed": failed, "measures": measures, "rows": compared.select(shown).to_dicts()}


def _errors(rows: pl.DataFrame) -> list[dict[str, Any]]:
    failed = rows.filter(pl.col("error_code").is_not_null())
    kinds = failed.group_by("error_code", "status", maintain_order=True).agg(
        pl.len().alias("num_rows"), pl.col("row_id").head(MAX_IDS).alias("row_ids")
    )
    return kinds.sort("num_rows", descending=True, maintain_order=True).to_dicts()


def _slowest(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the rows that took most compute of their own; what they waited for others is shown and not counted."""
    ran = rows.filter(pl.col("attempts") > 0).with_columns(
        (pl.col("prefill_s") + pl.col("decode_s")).alias("total_s")
    )
    shown = (
        "row_id",
        "prompt_tokens",
        "completion_tokens",
        "prefill_s",
        "decode_s",
        "total_s",
        "wait_s",
        "finish_reason",
    )
    return ran.sort("total_s", descending=True, nulls_last=True).head(NUM_SLOWEST).select(shown).to_dicts()


def _thinned(frame: pl.DataFrame) -> pl.DataFrame:
    """Take every n-th row, so that at most `MAX_POINTS` are left."""
    return frame.gather_every(math.ceil(len(frame) / MAX_POINTS) or 1)
