"""From figures to HTML. Whatever stems from input, job file or machine goes through `escape` on its way."""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape as escape_html
from importlib.resources import files
from typing import Any

from kvbatch.corpus.skipped import named
from kvbatch.report.html import plots
from kvbatch.report.summary import answer_counts
from kvbatch.run_dir.manifest import Manifest
from kvbatch.text import format_bytes

_MAX_ID_CHARS = 80
_MAX_QUALITY_ROWS = 20
# No script, and nothing that could be fetched: a page with a hole in it would still stay silent.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render_page(summary: dict[str, Any], figures: dict[str, Any], manifest: Manifest, job: str) -> str:
    """Return the whole page.

    Args:
        summary: of `report.load_summary`.
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
        _cut(summary),
        _tiles(summary),
        _plots(summary, figures),
        _quality(figures["quality"]),
        _errors(figures["errors"]),
        _skipped(summary["skipped"]),
        _slowest(figures["slowest"]),
        _section("Configuration", f"<pre>{escape(job)}</pre>") if job else "",
        _environment(summary, manifest),
    ]
    body = "\n".join(part for part in parts if part)
    # "<" would let a string end the element; as an escape it is the same JSON
    data = json.dumps({"summary": summary} | figures, default=str).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n'
        f"<body>\n{body}\n"
        f'<script type="application/json" id="figures">{data}</script>\n</body>\n</html>\n'
    )


def escape(value: Any) -> str:
    """Return a value as text that is no markup; a lone surrogate is written as its escape."""
    text = "–" if value is None else str(value)
    return escape_html(text.encode("utf-8", "backslashreplace").decode())


def _section(title: str, *parts: str) -> str:
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(parts)


def _cut(s: dict[str, Any]) -> str:
    """Say of cut answers what to do, before all figures."""
    if not s["advice"]:
        return ""
    text = f"{s['cut']:,} of {s['answers']:,} answers were cut {s['advice']}."
    return f'<p class="warning">{escape(text)}</p>'


def _tiles(s: dict[str, Any]) -> str:
    tiles = [
        ("answers", f"{s['answers']:,}", answer_counts(s)),
        ("rows", f"{s['rows']:,}", f"{s['ok']:,} ok, {s['errors']:,} errors, {s['rejected']:,} rejected"),
        ("prompt tokens", f"{s['prompt_tokens']:,}", f"{s['cached_prompt_tokens']:,} from the shared prefix"),
        ("generated tokens", f"{s['completion_tokens']:,}", ""),
    ]
    if s.get("tokens_per_s"):
        tiles.append(
            ("tokens/s", f"{s['tokens_per_s']:,.1f}", f"{s['generated_tokens_per_s']:,.1f} generated")
        )
    if s.get("wall_s"):
        tiles.append(("wall", f"{s['wall_s']:,.1f} s", f"{s['running_s']:,.1f} s running"))
    if s.get("kv_peak_bytes_measured"):
        predicted = f"{format_bytes(s['kv_peak_bytes_predicted'])} predicted"
        tiles.append(("KV peak", format_bytes(s["kv_peak_bytes_measured"]), predicted))
    if s["kv_kept_ratio"] is not None:
        tiles.append(("KV bytes kept", f"{s['kv_kept_ratio']:.1%}", f"of {format_bytes(s['kv_full_bytes'])}"))
    if s.get("packing_efficiency"):
        bins = f"{s['num_bins']:,} bin{'' if s['num_bins'] == 1 else 's'}"
        tiles.append(("packing", f"{s['packing_efficiency']:.1%}", bins))
    if s["truncated"]:
        tiles.append(("truncated", f"{s['truncated']:,}", f"{s['dropped_tokens']:,} tokens dropped"))
    if s["split"]:
        tiles.append(("split", f"{s['split']:,}", f"into {s['parts']:,} parts"))
    if s["streamed"]:
        tiles.append(("streamed", f"{s['streamed']:,}", "lossy beyond a full context"))
    cells = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in tiles
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _plots(summary: dict[str, Any], figures: dict[str, Any]) -> str:
    drawn = []
    if timeline := figures["timeline"]:
        failed = (summary.get("drafted_tokens") or 0) - (summary.get("accepted_tokens") or 0)
        note = f"tokens computed, {failed:,} of them guesses that did not come true" if failed else ""
        drawn.append(_figure("Throughput over time", plots.draw_throughput(timeline), note))
        note = "reserved: of the rows that were running, up to their longest answer"
        pool = summary.get("kv_pool_bytes")
        if pool and (prefill_buffer_bytes := summary["kv_allocated_bytes"] - pool):
            note += f"; beside the pool {format_bytes(prefill_buffer_bytes)} of prefill buffers"
        drawn.append(_figure("KV bytes over time", plots.draw_kv_bytes(timeline, pool), note))
    if lengths := figures["lengths"]:
        note = "below: the rows of each bin, which are in memory together"
        drawn.append(_figure("Prompt lengths and bins", plots.draw_lengths(lengths), note))
    if bins := figures["bins"]:
        note = f"{bins['mean_efficiency']:.1%} of the pool on average"
        drawn.append(_figure("Packing efficiency", plots.draw_packing(bins), note))
    if kept := figures["kept"]:
        drawn.append(_figure("Kept ratio against length", plots.draw_kept(kept)))
    missing = (
        "" if timeline else '<p class="muted">No steps were recorded: the run did not come to its end.</p>'
    )
    return _section("Memory and speed", missing, f'<div class="plots">{"".join(drawn)}</div>')


def _figure(title: str, svg: str, note: str = "") -> str:
    caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    return f"<figure><h3>{escape(title)}</h3>{svg}{caption}</figure>\n"


def _quality(quality: dict[str, Any] | None) -> str:
    if quality is None:
        return ""
    rows, failed = quality["rows"], quality["num_failed"]
    text = f"{len(rows):,} rows of the sample, against the full cache"
    text += f"; {failed:,} could not be compared." if failed else "."
    if not rows:
        return _section("Quality drift", f"<p>{escape(text)}</p>")
    measures = [[name, f"{m['mean']:.4f}", f"{m['worst']:.4f}"] for name, m in quality["measures"].items()]
    heads = ["row id", "prompt tokens", *quality["measures"], "first divergence"]
    cells = [
        [_short(row["row_id"]), f"{row['prompt_tokens']:,}"]
        + [f"{row[name]:.4f}" for name in quality["measures"]]
        + [row["first_divergence"]]
        for row in rows[:_MAX_QUALITY_ROWS]
    ]
    return _section(
        "Quality drift",
        f"<p>{escape(text)}</p>",
        _table(["measure", "mean", "worst"], measures, numbers={1, 2}),
        f'<div class="plots">{_figure("Drift against length", plots.draw_quality(rows))}</div>',
        _table(heads, cells, numbers=range(1, len(heads))),
    )


def _errors(errors: list[dict[str, Any]]) -> str:
    if not errors:
        return _section("Errors", "<p>None.</p>")
    rows = []
    for kind in errors:
        ids = ", ".join(map(_short, kind["row_ids"]))
        more = kind["num_rows"] - len(kind["row_ids"])
        ids += f" and {more:,} more" if more else ""
        rows.append([kind["error_code"], kind["status"], f"{kind['num_rows']:,}", ids])
    note = '<p class="muted">Reasons and inputs: deadletter/ beside this page.</p>'
    return _section("Errors", _table(["kind", "status", "rows", "row ids"], rows, numbers={2}), note)


def _skipped(groups: list[dict[str, Any]]) -> str:
    if not groups:
        return ""
    rows = [[group["reason"], f"{group['files']:,}", named(group)] for group in groups]
    return _section("Skipped files", _table(["reason", "files", "first names"], rows, numbers={1}))


def _slowest(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    heads = ["row id", "prompt tokens", "generated", "prefill s", "decode s", "finished by"]
    cells = [
        [
            _short(row["row_id"]),
            f"{row['prompt_tokens']:,}",
            f"{row['completion_tokens']:,}",
            f"{row['prefill_s']:.2f}",
            f"{row['decode_s']:.2f}",
            row["finish_reason"],
        ]
        for row in rows
    ]
    return _section("Slowest rows", _table(heads, cells, numbers={1, 2, 3, 4}))


def _environment(summary: dict[str, Any], manifest: Manifest) -> str:
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
    files = {f"input {i + 1}": each["path"] for i, each in enumerate(manifest.input_files[:20])}
    return _section("Environment", _table(["", ""], list((known | versions | files).items()), has_head=False))


def _short(row_id: str) -> str:
    return row_id if len(row_id) <= _MAX_ID_CHARS else row_id[: _MAX_ID_CHARS - 1] + "…"


def _table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Any]],
    numbers: Iterable[int] = (),
    has_head: bool = True,
) -> str:
    kinds = [' class="number"' if i in set(numbers) else ' class="ids"' for i in range(len(heads))]
    head = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(kinds, heads, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>\n"
        for row in rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if has_head else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _seconds(time: str) -> str:
    """Return a time without the digits that only order runs."""
    return datetime.fromisoformat(time).isoformat(sep=" ", timespec="seconds")
