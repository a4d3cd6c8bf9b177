"""`report.html`: a run drawn on one page that fetches nothing.

Every text of input, job file or machine goes through `escape` on its way.
"""

import json
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvbatch.atomic_file import write_text
from kvbatch.corpus.skipped import named
from kvbatch.report.headline import commands, headline
from kvbatch.report.html import plots
from kvbatch.report.html.elements import caption, escape, figure, section, short, table
from kvbatch.report.html.figures import Columns, Figures, QualityFigures, compute
from kvbatch.report.html.tiles import render_tiles
from kvbatch.report.summary import Summary, load_summary
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.manifest import Manifest
from kvbatch.text import format_bytes

_MAX_QUALITY_ROWS = 20
# No script, and nothing that could be fetched: even a page with a hole in its escaping would send nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_page(run: RunDirectory, summary: Summary | None = None) -> Path:
    """Write the page of a run, ended or not, and return its path.

    Args:
        summary: of a run that is about to end; else what `load_summary` says.

    Raises:
        InputError: It is no run directory.
        OutputError: The page cannot be written.
    """
    page = render_page(
        summary or load_summary(run.path),
        compute(run),
        run.read_manifest(),
        run.job_file.read_text(encoding="utf-8", errors="replace") if run.job_file.is_file() else "",
    )
    write_text(run.page, page)
    return run.page


def render_page(summary: Summary, figures: Figures, manifest: Manifest, job: str) -> str:
    """Return the whole page.

    Args:
        summary: of `load_summary`.
        figures: of `figures.compute`; they also stand in the page as JSON, under the id `figures`.
        manifest: of the run.
        job: its resolved job file.
    """
    title = f"{summary['job']} · {summary['run_id']}"
    style = files("kvbatch.report.html").joinpath("style.css").read_text(encoding="utf-8")
    parts = [
        f"<h1>{escape(summary['job'])}</h1>",
        f'<p class="muted">run {escape(summary["run_id"])}, {escape(summary["status"])}, '
        f"started {escape(_seconds(manifest.created))}</p>",
        f'<p class="lead">{escape(headline(summary))}</p>',
        *(f'<p class="warning">{escape(line)}</p>' for line in commands(summary)),
        render_tiles(summary),
        _plots(summary, figures),
        _quality(figures["quality"]),
        _errors(figures["errors"]),
        _skipped(summary["skipped"]),
        _slowest(figures["slowest"]),
        section("Configuration", caption("The job with all its defaults."), f"<pre>{escape(job)}</pre>")
        if job
        else "",
        _environment(summary, manifest),
    ]
    body = "\n".join(part for part in parts if part)
    # "<" would let a string end the element; as an escape it is the same JSON
    data = json.dumps({"summary": summary, **figures}, default=str).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n'
        f"<body>\n{body}\n"
        f'<script type="application/json" id="figures">{data}</script>\n</body>\n</html>\n'
    )


def _plots(summary: Summary, figures: Figures) -> str:
    drawn = _timeline_plots(summary, figures["timeline"]) if figures["timeline"] else []
    if lengths := figures["lengths"]:
        text = "Rows by the length of their prompt"
        if lengths["packed"]["bin"]:
            text += "; below, the rows of each bin, which are in memory together"
        text += (
            ". Few long rows beside many short ones pack well; rows that are truncated or refused lose text."
        )
        drawn.append(figure("Prompt lengths and bins", plots.draw_lengths(lengths), text))
    if bins := figures["bins"]:
        text = (
            f"Part of the pool that each bin fills, {bins['mean_efficiency']:.1%} on average; the fuller the bins, "
            "the fewer of them, and the shorter the run."
        )
        drawn.append(figure("Packing efficiency", plots.draw_packing(bins), text))
    if kept := figures["kept"]:
        text = (
            "Bytes that each row kept of those it would take in a full cache, against the length of its prompt; less "
            "saves memory, and the longer the row, the less it should keep."
        )
        drawn.append(figure("Kept ratio against length", plots.draw_kept(kept), text))
    missing = (
        "" if figures["timeline"] else caption("No steps were recorded: the run did not come to its end.")
    )
    return section("Memory and speed", missing, f'<div class="plots">{"".join(drawn)}</div>')


def _timeline_plots(summary: Summary, timeline: Columns) -> list[str]:
    text = (
        "Tokens computed a second, read and written; a level line is good, a dip is a step that only writes."
    )
    if wrong := summary.get("drafted_tokens", 0) - summary.get("accepted_tokens", 0):
        text += f" {wrong:,} of the tokens were drafts of prompt lookup that turned out wrong."
    throughput = figure("Throughput over time", plots.draw_throughput(timeline), text)
    pool = summary.get("kv_pool_bytes")
    text = (
        "Bytes of keys and values: used, and reserved for the longest answers of the running rows; the closer to the "
        "pool, the better the memory is used."
    )
    if pool and (buffer_bytes := summary["kv_allocated_bytes"] - pool):
        text += f" Beside the pool there are {format_bytes(buffer_bytes)} of prefill buffers."
    return [throughput, figure("KV bytes over time", plots.draw_kv_bytes(timeline, pool), text)]


def _quality(quality: QualityFigures | None) -> str:
    if quality is None:
        return ""
    rows, failed = quality["rows"], quality["num_failed"]
    text = f"{len(rows):,} sampled rows, answered from the compressed cache and compared with the full one"
    text += f"; {failed:,} could not be compared." if failed else "."
    if not rows:
        return section("Quality drift", f"<p>{escape(text)}</p>")
    measures = [[name, f"{m['mean']:.4f}", f"{m['worst']:.4f}"] for name, m in quality["measures"].items()]
    heads = ["row id", "prompt tokens", *quality["measures"], "first divergence"]
    cells = [
        [short(row["row_id"]), f"{row['prompt_tokens']:,}"]
        + [f"{row[name]:.4f}" for name in quality["measures"]]
        + [row["first_divergence"]]
        for row in rows[:_MAX_QUALITY_ROWS]
    ]
    drift = (
        "By how many nats a token the full cache holds each answer for less likely, against the length of the prompt; "
        "near zero is good, a rise with the length means that long documents suffer."
    )
    return section(
        "Quality drift",
        f"<p>{escape(text)}</p>",
        table(["measure", "mean", "worst"], measures, numbers={1, 2}),
        caption(
            "nll_delta and kl are nats a token, and zero is best; top1_agreement is the part of the tokens for which "
            "both caches have the same first choice, and one is best."
        ),
        f'<div class="plots">{figure("Drift against length", plots.draw_quality(rows), drift)}</div>',
        table(heads, cells, numbers=range(1, len(heads))),
        caption("The rows that lost most; first divergence is the first token of the answer that differs."),
    )


def _errors(errors: list[dict[str, Any]]) -> str:
    if not errors:
        return section("Errors", "<p>None: every row was answered.</p>")
    rows = []
    for kind in errors:
        ids = ", ".join(map(short, kind["row_ids"]))
        more = kind["num_rows"] - len(kind["row_ids"])
        ids += f" and {more:,} more" if more else ""
        rows.append([kind["error_code"], kind["status"], f"{kind['num_rows']:,}", ids])
    text = "Rows without an answer, by the kind of error; the reasons and inputs are in deadletter/ beside this page."
    return section("Errors", table(["kind", "status", "rows", "row ids"], rows, numbers={2}), caption(text))


def _skipped(groups: list[dict[str, Any]]) -> str:
    if not groups:
        return ""
    rows = [[group["reason"], f"{group['files']:,}", named(group)] for group in groups]
    text = "Files in the input's directories that were not read; none of them should be a document."
    return section(
        "Skipped files", table(["reason", "files", "first names"], rows, numbers={1}), caption(text)
    )


def _slowest(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    has_wait = "wait_s" in rows[0]
    heads = ["row id", "prompt tokens", "generated", "prefill s", "decode s"]
    heads += ["wait s"] * has_wait + ["finished by"]
    cells = [
        [
            short(row["row_id"]),
            f"{row['prompt_tokens']:,}",
            f"{row['completion_tokens']:,}",
            *(_digits(row[name]) for name in ("prefill_s", "decode_s", *["wait_s"] * has_wait)),
            row["finish_reason"],
        ]
        for row in rows
    ]
    text = "The rows that took most seconds of computing; they should be those of the longest prompts and answers."
    if has_wait:
        text += " Waiting for other rows is not counted."
    return section("Slowest rows", table(heads, cells, numbers=range(1, len(heads) - 1)), caption(text))


def _digits(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.2f}"


def _environment(summary: Summary, manifest: Manifest) -> str:
    model = manifest.model
    known = {
        "model": model and model.path,
        "revision": model and model.revision,
        "architecture": model and model.architecture,
        "context": model and model.max_context,
        "device": f"{manifest.device}, {model.dtype if model else 'unknown'}",
        "memory budget": format_bytes(manifest.memory_budget_bytes),
        "platform": manifest.platform,
        "kvbatch": manifest.kvbatch,
        "configuration hash": manifest.config_hash,
        "output": summary["output"],
    }
    versions = {name: found for name, found in manifest.versions.items() if found}
    inputs = {f"input {i + 1}": each["path"] for i, each in enumerate(manifest.input_files[:20])}
    text = "What the run was made with: the same configuration, model and input give the same prompts."
    cells = list((known | versions | inputs).items())
    return section("Environment", caption(text), table(["", ""], cells, has_head=False))


def _seconds(time: str) -> str:
    """Return a time without the digits that only order runs."""
    return datetime.fromisoformat(time).isoformat(sep=" ", timespec="seconds")
