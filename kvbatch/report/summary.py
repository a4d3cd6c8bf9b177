"""What a run did: its rows and tokens are counted in its Parquet files, the rest is what the session measured.

The summary of a run that ended lies in `summary.json`. What can be counted in the shards is counted again whenever a
summary is loaded; measurements of the session are read from that file.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from kvbatch.run_dir.advice import continuation, cut_advice, superseded_by
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.find_runs import open_run
from kvbatch.run_dir.read_output import iter_shards
from kvbatch.run_dir.stats_files import read_stats
from kvbatch.run_dir.verify import find_problems

if TYPE_CHECKING:
    import polars as pl


class Counts(TypedDict):
    """What is counted over the output rows.

    Tokens and bytes are of the rows that this run did itself, answers of all rows that ran, in whatever run.
    """

    rows: int
    ok: int
    errors: int
    rejected: int
    carried: int  # reused from earlier runs
    truncated: int
    split: int
    streamed: int
    parts: int  # of the split documents
    answers: int
    ended: int  # answers that the model ended itself
    cut: int  # answers that ended by length or repetition
    own_answers: int  # answers of the rows that this run did itself
    dropped_tokens: int
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    removed_chars: int
    kv_full_bytes: int
    kv_kept_bytes: int
    cut_prompt_tokens: int  # longest prompt of a row whose only answer was cut
    longest_prompt_tokens: int
    finish_reasons: dict[str, int]  # most frequent first, as error_codes
    error_codes: dict[str, int]


class LayerFigures(TypedDict):
    """What the KV heads of one layer kept: the least, the median and the most of them."""

    layer: int
    kept_ratio_min: float
    kept_ratio_median: float
    kept_ratio_max: float
    bits_per_element_min: float
    bits_per_element_median: float
    bits_per_element_max: float


class LaneFigures(TypedDict):
    """What the lanes of a compressed cache kept; None and empty for a full cache."""

    kv_kept_tokens_ratio: float | None
    kv_bits_per_element: float | None  # of the kept tokens, scales included
    kv_layers: list[LayerFigures]


class Measures(TypedDict, total=False):
    """What a session measured; a run that did not come to its end has none of it."""

    wall_s: float
    opening_s: float
    planning_s: float
    calibrating_s: float  # of the cache policy
    comparing_s: float  # by the quality guard
    loading_s: float
    running_s: float
    continued_rows: int  # finished by earlier sessions of the run
    session_computed_prompt_tokens: int
    session_completion_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    kv_peak_bytes_predicted: int
    kv_peak_bytes_measured: int
    kv_mean_bytes: int
    kv_pool_bytes: int
    kv_allocated_bytes: int  # the pool and the prefill buffers
    memory_budget_bytes: int
    process_predicted_bytes: int
    process_peak_bytes: int  # resident, of the whole process
    weight_bytes: int
    packing_efficiency: float | None
    num_bins: int
    num_shards: int
    device: str
    dtype: str


class Summary(Counts, LaneFigures, Measures, total=False):
    """The summary of a run; the keys of `Measures` and those after `page` may be absent."""

    job: str
    run_id: str
    status: str  # complete | incomplete | over_limits | superseded
    config_hash: str
    kvbatch: str
    model: str
    planned_rows: int | None
    left_out: int  # rows that `input.where` did not select
    skipped_files: int
    skipped: list[dict[str, Any]]  # groups of `corpus.skipped.by_reason`
    kv_kept_ratio: float | None
    cache_preset: str
    cache_policy: dict[str, Any] | None  # the fields of `engine.promise.FittedPolicy`
    cache_loss: str | None  # the same in words
    quality: dict[str, Any] | None  # the fields of `estimate.quality.Verdict`
    advice: str | None  # what to do about answers that were cut
    next_command: str | None  # by which a run that did not come to its end goes on
    tokens_per_s: float | None
    generated_tokens_per_s: float | None
    run: str
    output: str
    page: str | None
    over_limits: str  # which limits were exceeded
    superseded_by: str | None  # id of the later run that took this one's place
    problems: list[str]  # what is wrong with the files of the run


_LONG = ("truncated", "split", "streamed")  # what became of documents that were too long
_SUMS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_prompt_tokens",
    "removed_chars",
    "kv_full_bytes",
    "kv_kept_bytes",
)
_READ = (
    "run_id",
    "status",
    "finish_reason",
    "error_code",
    "attempts",
    "outcome",
    "n_parts",
    "n_answers",
    "n_cut",
    "dropped_tokens",
    *_SUMS,
)
_NOT_COUNTED = {
    "tokens_per_s",
    "generated_tokens_per_s",
}  # of what `summarise` returns, measured by the session


def summarise(
    run: RunDirectory, measures: Measures | Mapping[str, Any], damaged: Collection[object] = ()
) -> Summary:
    """Return the summary of a run: what its files hold, and what was measured beside them.

    Args:
        measures: empty for a run that did not end.
        damaged: shard files that are not read, beside those that are not committed.

    Raises:
        InputError: The manifest cannot be read.
    """
    measured = cast(Measures, measures)
    counts, manifest = _counts(run, damaged), run.read_manifest()
    full_bytes, seconds = counts["kv_full_bytes"], measured.get("running_s")
    # a continued run is as fast as its last session was
    generated = measured.get("session_completion_tokens", 0)
    done = measured.get("session_computed_prompt_tokens", 0) + generated
    return {
        "job": manifest.job,
        "run_id": run.run_id,
        "status": "complete" if measured else "incomplete",
        "config_hash": manifest.config_hash,
        "kvbatch": manifest.kvbatch,
        "model": manifest.model.path if manifest.model else "",
        "planned_rows": manifest.num_rows,
        "left_out": manifest.left_out,
        "skipped_files": sum(group["files"] for group in manifest.skipped),
        "skipped": manifest.skipped,
        **counts,
        **_lane_figures(run),
        "kv_kept_ratio": counts["kv_kept_bytes"] / full_bytes if full_bytes else None,
        "cache_preset": manifest.cache_preset,
        "cache_policy": manifest.cache_policy,
        "cache_loss": str(manifest.fitted) if manifest.fitted else None,
        "quality": manifest.quality,
        "advice": cut_advice(run, manifest, counts),
        "next_command": None if measured else continuation(run, manifest),
        "tokens_per_s": done / seconds if seconds else None,
        "generated_tokens_per_s": generated / seconds if seconds else None,
        **measured,
        "run": str(run.path),
        "output": str(run.shards),
        "page": str(run.page) if run.page.exists() else None,
    }


def load_summary(path: Path, *, deep: bool = False) -> Summary:
    """Return the summary of the run that a path names; its `problems` are what is wrong with its files.

    Args:
        deep: see `find_problems`.

    Raises:
        InputError: There is no run.
    """
    run = open_run(path)
    problems = find_problems(run, deep=deep)
    counted = summarise(run, {}, [problem.path for problem in problems])
    measured = {
        key: value
        for key, value in run.read_summary().items()
        if key not in ("format", "files") and key not in counted.keys() - _NOT_COUNTED
    }
    later = superseded_by(run, run.read_manifest())
    summary = cast(Summary, {**counted, **measured})
    summary["problems"] = [str(problem) for problem in problems]
    summary["status"] = run.end or ("superseded" if later else "incomplete")
    summary["superseded_by"] = later
    if run.end:
        summary["next_command"] = None
    return summary


def _counts(run: RunDirectory, damaged: Collection[object]) -> Counts:
    """Count over the committed shards, one at a time."""
    numbers: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    longest = longest_cut = 0
    for rows in iter_shards(run, _READ, damaged):
        ran = rows.filter(rows["attempts"] > 0)
        own = ran.filter(ran["run_id"] == run.run_id)
        statuses, outcomes = _frequencies(rows, "status"), _frequencies(ran, "outcome")
        answers, cut = _total(ran["n_answers"]), _total(ran["n_cut"])
        numbers.update(
            rows=len(rows),
            ok=statuses["ok"],
            errors=statuses["error"],
            rejected=statuses["rejected"],
            carried=_total(rows["run_id"] != run.run_id),
            parts=_total(ran.filter(ran["outcome"] == "split")["n_parts"]),
            answers=answers,
            ended=answers - cut,
            cut=cut,
            own_answers=_total(own["n_answers"]),
            dropped_tokens=_total(ran["dropped_tokens"]),
        )
        numbers.update({name: outcomes[name] for name in _LONG})
        numbers.update({name: _total(own[name]) for name in _SUMS})
        alone = ran.filter((ran["finish_reason"] == "length") & (ran["n_answers"] == 1))
        prompts = alone.filter(alone["outcome"] == "fits")["prompt_tokens"]
        longest_cut = max([longest_cut, *prompts.to_list()])
        longest = max([longest, *own["prompt_tokens"].drop_nulls().to_list()])
        reasons += _frequencies(ran, "finish_reason")
        codes += _frequencies(rows, "error_code")
    names = (name for name, kind in Counts.__annotations__.items() if kind is int)
    found: dict[str, Any] = {name: numbers[name] for name in names}
    found |= {"cut_prompt_tokens": longest_cut, "longest_prompt_tokens": longest}
    found |= {"finish_reasons": _ranked(reasons), "error_codes": _ranked(codes)}
    return cast(Counts, found)


def _lane_figures(run: RunDirectory) -> LaneFigures:
    """Return what the lanes kept: of all tokens, at how many bits, and by layer."""
    import polars as pl

    lanes = read_stats(run, run.kv_lanes)
    if lanes is None:
        return {"kv_kept_tokens_ratio": None, "kv_bits_per_element": None, "kv_layers": []}
    kept = _total(lanes["tokens_kept"])
    parts = [
        getattr(pl.col(name), part)().alias(f"{name}_{part}")
        for name in ("kept_ratio", "bits_per_element")
        for part in ("min", "median", "max")
    ]
    return {
        "kv_kept_tokens_ratio": kept / _total(lanes["tokens_seen"]),
        "kv_bits_per_element": float((lanes["bits_per_element"] * lanes["tokens_kept"]).sum()) / kept,
        "kv_layers": cast(
            list[LayerFigures], lanes.group_by("layer", maintain_order=True).agg(parts).to_dicts()
        ),
    }


def _total(column: "pl.Series") -> int:
    return int(column.sum())


def _frequencies(rows: "pl.DataFrame", column: str) -> Counter[str]:
    return Counter(dict(rows[column].drop_nulls().value_counts().iter_rows()))


def _ranked(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
