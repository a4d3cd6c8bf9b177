"""The numbers at the head of the page, each with a sentence that says what it is and what is good."""

from kvbatch.report.headline import duration
from kvbatch.report.html.elements import escape
from kvbatch.report.summary import Summary
from kvbatch.report.summary_text import answer_counts, loss_text, memory_text, promise_text, status_counts
from kvbatch.text import counted, format_bytes

_Tile = tuple[str, str, str, str]  # name, value, what belongs to it, explanation


def render_tiles(s: Summary) -> str:
    """Return the numbers of a summary as a list of tiles."""
    cells = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd>"
        f'<dd class="why">{escape(explanation)}</dd></div>'
        for name, value, note, explanation in [*_row_tiles(s), *_speed_tiles(s), *_memory_tiles(s)]
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _row_tiles(s: Summary) -> list[_Tile]:
    statuses = status_counts(s["ok"], s["errors"], s["rejected"])
    cached = f"{s['cached_prompt_tokens']:,} from the shared prefix"
    tiles = [
        ("answers", f"{s['answers']:,}", answer_counts(s), "A cut answer lacks its end; none should be cut."),
        ("rows", f"{s['rows']:,}", statuses, "Every row should be ok."),
        (
            "prompt tokens",
            f"{s['prompt_tokens']:,}",
            cached,
            "Read by the model; those of a shared prefix are computed once.",
        ),
        (
            "generated tokens",
            f"{s['completion_tokens']:,}",
            "",
            "Written by the model; each takes longer than one that is read.",
        ),
    ]
    if s["truncated"]:
        dropped = f"{s['dropped_tokens']:,} tokens dropped"
        tiles.append(
            ("truncated", f"{s['truncated']:,}", dropped, "Rows of which the model saw a part only.")
        )
    if s["split"]:
        parts = f"into {s['parts']:,} parts"
        tiles.append(("split", f"{s['split']:,}", parts, "Rows that were answered part by part."))
    if s["streamed"]:
        note = "lossy beyond a full context"
        tiles.append(("streamed", f"{s['streamed']:,}", note, "Rows longer than the model's context."))
    return tiles


def _speed_tiles(s: Summary) -> list[_Tile]:
    tiles = []
    if s["tokens_per_s"]:
        generated = f"{s['generated_tokens_per_s']:,.1f} generated"
        tiles.append(
            (
                "tokens/s",
                f"{s['tokens_per_s']:,.1f}",
                generated,
                "Tokens read and written a second; more is better.",
            )
        )
    if s.get("wall_s"):
        running = f"{duration(s['running_s'])} running"
        tiles.append(
            ("time", duration(s["wall_s"]), running, "From the start to the end of the last session.")
        )
    return tiles


def _memory_tiles(s: Summary) -> list[_Tile]:
    tiles = []
    if text := memory_text(s):
        total = s.get("process_peak_bytes") or s["process_predicted_bytes"]
        explanation = "Most memory that the whole process held; the machine needs this much."
        tiles.append(("process memory", format_bytes(total), text, explanation))
    if s.get("kv_peak_bytes_measured"):
        predicted = f"{format_bytes(s['kv_peak_bytes_predicted'])} predicted"
        tiles.append(
            (
                "KV peak",
                format_bytes(s["kv_peak_bytes_measured"]),
                predicted,
                "Most bytes of keys and values held at once; the plan foresees it within a few percent.",
            )
        )
    if s["kv_kept_ratio"] is not None:
        of = f"of {format_bytes(s['kv_full_bytes'])}"
        of += f"; {loss_text(s)}" if s["kv_layers"] else ""
        explanation = "Bytes of keys and values, of those of a full cache; less lets more rows run at once."
        tiles.append(("KV bytes kept", f"{s['kv_kept_ratio']:.1%}", of, explanation))
    if (policy := s.get("cache_policy")) and (text := promise_text(s)):
        explanation = (
            "What the cache costs on texts of kvbatch's own, against the full cache; less is better."
        )
        name = "cache KL" if policy["measure"] == "kl" else "cache ΔNLL"
        tiles.append((name, f"{policy['loss']:.4f}", text, explanation))
    if efficiency := s.get("packing_efficiency"):
        bins = counted(s["num_bins"], "bin")
        tiles.append(
            ("packing", f"{efficiency:.1%}", bins, "Part of the pool that the bins fill; more is better.")
        )
    return tiles
