"""What a run did, recomputed from its Parquet by polars; the measured part is read from summary.json."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbatch.corpus.skipped import described
from kvbatch.run_dir.advice import cut_advice, superseded_by
from kvbatch.run_dir.commit import committed_files
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.find_runs import open_run
from kvbatch.run_dir.stats_files import read_stats
from kvbatch.run_dir.verify import find_problems
from kvbatch.text import counted, format_bytes

if TYPE_CHECKING:
    import polars as pl

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
_LONG = ("truncated", "split", "streamed")  # what became of documents that were too long
_LAYERS_A_LINE = 4


def summarise(run: RunDirectory, measures: dict[str, Any], damaged: Collection[Path] = ()) -> dict[str, Any]:
    """Return the summary of a run: figures of its Parquet, and what was measured beside it.

    Args:
        measures: empty for a run that did not end.
        damaged: files that are not read, beside those that do not count.
    """
    figures = _figures(run, damaged) | _lane_figures(run)
    manifest = run.read_manifest()
    seconds = measures.get("running_s")
    full_bytes = figures["kv_full_bytes"]
    figures["kv_kept_ratio"] = figures["kv_kept_bytes"] / full_bytes if full_bytes else None
    # a continued run is as fast as its last session was
    generated = measures.get("session_completion_tokens", 0)
    done = measures.get("session_computed_prompt_tokens", 0) + generated
    speed = {
        "tokens_per_s": done / seconds if seconds else None,
        "generated_tokens_per_s": generated / seconds if seconds else None,
    }
    head = {
        "job": manifest.job,
        "run_id": manifest.run_id,
        "status": "complete" if measures else "incomplete",
        "config_hash": manifest.config_hash,
        "kvbatch": manifest.kvbatch,
        "model": manifest.model.path,
        "planned_rows": manifest.num_rows,
        "left_out": manifest.left_out,  # by `where`
        "skipped_files": sum(group["files"] for group in manifest.skipped),
        "skipped": manifest.skipped,
    }
    advice = {"advice": cut_advice(run, manifest, figures)}
    return head | figures | advice | speed | measures | _places(run)


def _places(run: RunDirectory) -> dict[str, Any]:
    return {"output": str(run.shards), "page": str(run.page) if run.page.exists() else None}


def load_summary(path: Path, *, deep: bool = False) -> dict[str, Any]:
    """Return the summary of the run that a path names; its `problems` are what is wrong with its files.

    Args:
        deep: see `find_problems`.

    Raises:
        InputError: There is no run.
    """
    run = open_run(path)
    problems = find_problems(run, deep=deep)
    computed = summarise(run, {}, [problem.path for problem in problems])
    computed["problems"] = [str(problem) for problem in problems]
    saved = run.read_summary()
    for key in ("format", "files"):
        saved.pop(key, None)
    derived = set(computed) - {"tokens_per_s", "generated_tokens_per_s"}
    found = computed | {key: value for key, value in saved.items() if key not in derived}
    later = superseded_by(run, run.read_manifest())
    status = run.end or ("superseded" if later else "incomplete")
    return found | {"status": status, "superseded_by": later}


def _figures(run: RunDirectory, damaged: Collection[Path]) -> dict[str, Any]:
    """Count rows and tokens over the shards, one at a time; tokens only of the rows that were not reused."""
    names = (
        "rows",
        "ok",
        "errors",
        "rejected",
        "reused",
        *_LONG,
        "parts",
        "answers",
        "ended",
        "cut",
        "own_answers",
        "dropped_tokens",
        *_SUMS,
    )
    counts = Counter(dict.fromkeys(names, 0))
    reasons: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    longest = 0  # prompt of a row whose only answer was cut, as it stands
    for file in committed_files(run):
        if file in damaged:
            continue
        rows = _read(file, run.repair)
        ran = rows.filter(rows["attempts"] > 0)
        own = ran.filter(ran["run_id"] == run.run_id)
        statuses = _counts(rows, "status")
        counts["rows"] += len(rows)
        counts["reused"] += (rows["run_id"] != run.run_id).sum()
        outcomes = _counts(ran, "outcome")
        counts.update({name: outcomes[name] for name in _LONG})
        counts["parts"] += ran.filter(ran["outcome"] == "split")["n_parts"].sum()
        answers, cut = ran["n_answers"].sum(), ran["n_cut"].sum()
        counts.update(answers=answers, cut=cut, ended=answers - cut, own_answers=own["n_answers"].sum())
        alone = ran.filter((ran["finish_reason"] == "length") & (ran["n_answers"] == 1))
        longest = max(longest, alone.filter(alone["outcome"] == "fits")["prompt_tokens"].max() or 0)
        counts["dropped_tokens"] += ran["dropped_tokens"].sum()
        counts.update(ok=statuses["ok"], errors=statuses["error"], rejected=statuses["rejected"])
        counts.update({name: own[name].sum() for name in _SUMS})
        reasons += _counts(ran, "finish_reason")
        codes += _counts(rows, "error_code")
    return dict(counts) | {
        "cut_prompt_tokens": longest,
        "finish_reasons": _ranked(reasons),
        "error_codes": _ranked(codes),
    }


def _lane_figures(run: RunDirectory) -> dict[str, Any]:
    """Return what the lanes kept: of all tokens, at how many bits, and by layer; nothing where none counted."""
    import polars as pl

    lanes = read_stats(run, run.kv_lanes)
    if lanes is None:
        return {"kv_kept_tokens_ratio": None, "kv_bits_per_element": None, "kv_layers": []}
    kept = lanes["tokens_kept"].sum()
    parts = [
        getattr(pl.col(name), part)().alias(f"{name}_{part}")
        for name in ("kept_ratio", "bits_per_element")
        for part in ("min", "median", "max")
    ]
    return {
        "kv_kept_tokens_ratio": kept / lanes["tokens_seen"].sum(),
        "kv_bits_per_element": (lanes["bits_per_element"] * lanes["tokens_kept"]).sum() / kept,
        "kv_layers": lanes.group_by("layer", maintain_order=True).agg(parts).to_dicts(),
    }


def _read(file: Path, remedy: str) -> "pl.DataFrame":
    """Read a shard's columns by pyarrow: polars does not know every type that a passthrough column may have."""
    import polars as pl

    from kvbatch.run_dir.checked_file import opened_table

    with opened_table(file, remedy) as parquet:
        table = parquet.read([f"kvb_{name}" for name in _READ])
    rows = pl.from_arrow(table).rename(lambda name: name.removeprefix("kvb_"))
    if "n_answers" not in rows.columns:  # of an older release: one a row
        reason = pl.col("finish_reason")
        is_cut = reason.is_in(["length", "repetition"])
        rows = rows.with_columns((is_cut | (reason == "stop")).cast(pl.Int32).alias("n_answers"))
        rows = rows.with_columns(is_cut.cast(pl.Int32).alias("n_cut"))
    return rows


def _counts(rows: "pl.DataFrame", column: str) -> Counter[str]:
    return Counter(dict(rows[column].drop_nulls().value_counts().iter_rows()))


def _ranked(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def render(summary: dict[str, Any]) -> str:
    """Return a summary as the lines a terminal shows."""
    s = summary
    later = f" by run {s['superseded_by']}" if s.get("superseded_by") else ""
    lines = [
        ("job", f"{s['job']}, run {s['run_id']}, {s['status']}{later}"),
        *_answer_lines(s),
        ("rows", _row_counts(s)),
        *(("skipped", described(group)) for group in s["skipped"]),
        (
            "tokens",
            f"{s['prompt_tokens']:,} prompt ({s['cached_prompt_tokens']:,} of them from the shared prefix), "
            f"{s['completion_tokens']:,} generated",
        ),
    ]
    if s["truncated"]:
        lines.append(("truncated", f"{s['truncated']:,} rows, {s['dropped_tokens']:,} tokens dropped"))
    if s["split"]:
        lines.append(("split", f"{s['split']:,} rows into {s['parts']:,} parts, none of them lost"))
    if s["streamed"]:
        lines.append(
            ("streamed", f"{s['streamed']:,} rows, read whole and kept as far as a full context holds")
        )
    if s["removed_chars"]:
        lines.append(("cleaned", f"{s['removed_chars']:,} characters taken out of the documents"))
    if s.get("over_limits"):
        lines.append(("over limits", s["over_limits"]))
    if "wall_s" in s:
        if s.get("continued_rows"):
            text = f"{s['continued_rows']:,} rows were finished before; speed, times and KV are of the rest"
            lines.append(("continued", text))
        if s["tokens_per_s"]:
            generated = f"{s['generated_tokens_per_s']:,.1f} of them generated"
            lines.append(
                ("speed", f"{s['tokens_per_s']:,.1f} tokens/s, {generated}, on {s['device']} in {s['dtype']}")
            )
        if s.get("drafted_tokens"):
            text = f"{s['accepted_tokens']:,} of {s['drafted_tokens']:,} tokens that the last rows might copy"
            lines.append(("guessed", text))
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
        if s.get("kv_pool_bytes"):
            peak, mean = (
                s[name] / s["kv_pool_bytes"] for name in ("kv_peak_bytes_measured", "kv_mean_bytes")
            )
            text = f"peak {peak:.1%}, mean {mean:.1%} of {format_bytes(s['kv_pool_bytes'])}"
            if prefill_buffer_bytes := s["kv_allocated_bytes"] - s["kv_pool_bytes"]:
                text += f"; beside it {format_bytes(prefill_buffer_bytes)} of prefill buffers"
            lines.append(("KV pool", text))
        lines += _kept_lines(s)
        if s["packing_efficiency"] is not None:
            bins = counted(s["num_bins"], "bin")
            lines.append(("packing", f"{s['packing_efficiency']:.1%} of the pool over {bins}"))
    elif s["planned_rows"] is not None:
        lines.append(("planned", f"{s['planned_rows']:,} rows"))
    lines.append(("finished by", _listed(s["finish_reasons"]) or "nothing ran"))
    if s["error_codes"]:
        lines.append(("failed by", _listed(s["error_codes"])))
    lines.append(("output", f"{s['output']}/part-*.parquet"))
    if s["page"]:
        lines.append(("page", s["page"]))
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _kept_lines(s: dict[str, Any]) -> list[tuple[str, str]]:
    """Say what a compressed cache kept, and by layer what tells the layers apart: tokens, or bits if none went."""
    if not s["kv_layers"]:
        return []
    if s["kv_kept_tokens_ratio"] < 1:
        name, scale, digits, unit = "kept_ratio", 100, 0, "% of the tokens"
    else:
        name, scale, digits, unit = "bits_per_element", 1, 1, "bits an element"
    cells = [
        f"{layer['layer']:>3}:"
        + "".join(f"{layer[f'{name}_{part}'] * scale:5.{digits}f}" for part in ("min", "median", "max"))
        for layer in s["kv_layers"]
    ]
    return [
        (
            "KV kept",
            f"{s['kv_kept_tokens_ratio']:.1%} of the tokens at {s['kv_bits_per_element']:.2f} bits an element, "
            f"{s['kv_kept_ratio']:.1%} of the bytes",
        ),
        ("by layer", f"least, median and most of its heads, {unit}"),
        *(("", "  ".join(cells[i : i + _LAYERS_A_LINE])) for i in range(0, len(cells), _LAYERS_A_LINE)),
    ]


def answer_counts(s: dict[str, Any]) -> str:
    """Say how many answers of a summary came to their own end."""
    return f"{s['ended']:,} ended by {'itself' if s['ended'] == 1 else 'themselves'}, {s['cut']:,} cut"


def _answer_lines(s: dict[str, Any]) -> list[tuple[str, str]]:
    """Say how many answers came to their own end, before all other figures, and what to do about the others."""
    if not s["answers"]:
        return []
    lines = [("answers", answer_counts(s))]
    return [*lines, ("cut", s["advice"])] if s["advice"] else lines


def _row_counts(s: dict[str, Any]) -> str:
    if not s["rows"] and s["planned_rows"]:
        return f"none of {s['planned_rows']:,} is in a shard yet"
    text = f"{s['rows']:,}: {s['ok']:,} ok, {counted(s['errors'], 'error')}, {s['rejected']:,} rejected"
    text += f"; {s['reused']:,} reused" if s["reused"] else ""
    return text + (f"; where left out {s['left_out']:,} more" if s["left_out"] else "")


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
