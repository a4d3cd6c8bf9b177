"""A summary as the lines that a terminal shows."""

from kvbatch.corpus.skipped import described
from kvbatch.report.summary import LayerFigures, Summary
from kvbatch.text import counted, format_bytes

_LAYERS_A_LINE = 4
_Line = tuple[str, str]  # name and text


def render(s: Summary) -> str:
    """Return a summary as the lines that a terminal shows."""
    later = f" by run {s['superseded_by']}" if s.get("superseded_by") else ""
    lines = [
        ("job", f"{s['job']}, run {s['run_id']}, {s['status']}{later}"),
        *_answer_lines(s),
        ("rows", _row_text(s)),
        *_cache_lines(s),
        *(("skipped", described(group)) for group in s["skipped"]),
        (
            "tokens",
            f"{s['prompt_tokens']:,} prompt ({s['cached_prompt_tokens']:,} of them from the shared prefix), "
            f"{s['completion_tokens']:,} generated",
        ),
        *_document_lines(s),
    ]
    if s.get("over_limits"):
        lines.append(("over limits", s["over_limits"]))
    if "wall_s" in s:
        lines += [*_time_lines(s), *_memory_lines(s), *_lane_lines(s)]
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


def status_counts(ok: int, errors: int, rejected: int) -> str:
    """Say how many rows have which status."""
    return f"{ok:,} ok, {counted(errors, 'error')}, {rejected:,} rejected"


def answer_counts(s: Summary) -> str:
    """Say how many answers the model ended itself."""
    return f"{s['ended']:,} ended by {'itself' if s['ended'] == 1 else 'themselves'}, {s['cut']:,} cut"


def kept_text(s: Summary) -> str:
    """Say which part of the full cache's bytes a compressed cache kept; empty for a full cache."""
    if not s["kv_layers"] or s["kv_kept_ratio"] is None:
        return ""
    kept, full = format_bytes(s["kv_kept_bytes"]), format_bytes(s["kv_full_bytes"])
    return f"kept {s['kv_kept_ratio']:.1%} of the full cache's bytes ({kept} of {full})"


def promise_text(s: Summary) -> str:
    """Say what the cache policy loses on the check texts, beside the longest row; empty where that was not measured."""
    loss = s.get("cache_loss")
    return f"preset {s['cache_preset']}: {loss}, longest row {s['longest_prompt_tokens']:,}" if loss else ""


def loss_text(s: Summary) -> str:
    """Say what a compressed cache cost on the sampled rows of the quality guard."""
    quality = s["quality"]
    if quality is None:
        return "loss not measured: quality_guard compares sampled rows with the full cache"
    if quality["nll_delta"] is None or quality["top1_agreement"] is None:
        return "loss not measured: no sampled row could be compared with the full cache"
    rows = counted(quality["num_rows"], "sampled row")
    return f"costs {quality['nll_delta']:+.4f} nats a token on {rows} (top-1 {quality['top1_agreement']:.1%})"


def memory_text(s: Summary) -> str:
    """Say what the whole process took in memory and what of it is what; empty where that was not measured."""
    peak, predicted = s.get("process_peak_bytes"), s.get("process_predicted_bytes")
    if not peak:
        return f"{format_bytes(predicted)} of process predicted" if predicted else ""
    text = f"{format_bytes(peak)} of process"
    text += f" (predicted {format_bytes(predicted)})" if predicted else ""
    pool, allocated = s.get("kv_pool_bytes", 0), s.get("kv_allocated_bytes", 0)
    parts = {"weights": s.get("weight_bytes", 0), "pool": pool, "buffers": max(0, allocated - pool)}
    if s.get("device", "cpu") == "cpu":
        parts["rest"] = max(0, peak - sum(parts.values()))
    else:
        text += f", on {s['device']}"
    shown = [f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts.items() if num_bytes]
    return f"{text}: {', '.join(shown)}"


def _answer_lines(s: Summary) -> list[_Line]:
    """Say how many answers the model ended itself, and what to do about the others."""
    if not s["answers"]:
        return []
    lines = [("answers", answer_counts(s))]
    return [*lines, ("cut", s["advice"])] if s["advice"] else lines


def _row_text(s: Summary) -> str:
    if not s["rows"] and s["planned_rows"]:
        return f"none of {s['planned_rows']:,} is in a shard yet"
    text = f"{s['rows']:,}: {status_counts(s['ok'], s['errors'], s['rejected'])}"
    text += f"; {s['carried']:,} carried over" if s["carried"] else ""
    return text + (f"; where left out {s['left_out']:,} more" if s["left_out"] else "")


def _cache_lines(s: Summary) -> list[_Line]:
    """Say of a compressed cache what it saved, what it cost, and how fast it was."""
    kept = kept_text(s)
    if not kept:
        refused = "; ".join((s["quality"] or {}).get("problems", ()))
        return [("cache", f"full: quality_guard refused the compressed one, {refused}")] if refused else []
    speed = f"; {s['tokens_per_s']:,.0f} tokens/s" if s["tokens_per_s"] else ""
    promise = promise_text(s)
    return [("cache", kept), *([("", promise)] if promise else []), ("", loss_text(s) + speed)]


def _document_lines(s: Summary) -> list[_Line]:
    """Say what became of documents that were too long or were cleaned."""
    lines = []
    if s["truncated"]:
        lines.append(
            ("truncated", f"{counted(s['truncated'], 'row')}, {s['dropped_tokens']:,} tokens dropped")
        )
    if s["split"]:
        lines.append(
            ("split", f"{counted(s['split'], 'row')} into {counted(s['parts'], 'part')}, none of them lost")
        )
    if s["streamed"]:
        text = f"{counted(s['streamed'], 'row')}, read whole and kept as far as a full context holds"
        lines.append(("streamed", text))
    if s["removed_chars"]:
        lines.append(("cleaned", f"{s['removed_chars']:,} characters taken out of the documents"))
    return lines


def _time_lines(s: Summary) -> list[_Line]:
    lines = []
    if s.get("continued_rows"):
        text = f"{s['continued_rows']:,} rows were finished before; speed, times and KV are of the rest"
        lines.append(("continued", text))
    if s["tokens_per_s"]:
        generated = f"{s['generated_tokens_per_s']:,.1f} of them generated"
        text = f"{s['tokens_per_s']:,.1f} tokens/s, {generated}, on {s['device']} in {s['dtype']}"
        lines.append(("speed", text))
    if s.get("drafted_tokens"):
        text = f"{s['accepted_tokens']:,} of {s['drafted_tokens']:,} draft tokens of prompt lookup were right"
        lines.append(("drafted", text))
    phases = {
        "opening": s["opening_s"],
        "planning": s["planning_s"],
        **({"calibrating": s["calibrating_s"]} if s.get("calibrating_s") else {}),
        **({"comparing": s["comparing_s"]} if s.get("comparing_s") else {}),
        "loading": s["loading_s"],
        "running": s["running_s"],
    }
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
    return [*lines, ("wall", f"{s['wall_s']:.1f} s: {parts}")]


def _memory_lines(s: Summary) -> list[_Line]:
    text = memory_text(s)
    lines = [("memory", text)] if text else []
    peak = s["kv_peak_bytes_measured"]
    text = f"{format_bytes(peak)} measured, {format_bytes(s['kv_peak_bytes_predicted'])} predicted, "
    lines.append(("KV peak", f"{text}budget {format_bytes(s['memory_budget_bytes'])}"))
    if pool := s.get("kv_pool_bytes"):
        text = f"peak {peak / pool:.1%}, mean {s['kv_mean_bytes'] / pool:.1%} of {format_bytes(pool)}"
        if prefill_buffer_bytes := s["kv_allocated_bytes"] - pool:
            text += f"; beside it {format_bytes(prefill_buffer_bytes)} of prefill buffers"
        lines.append(("KV pool", text))
    return lines


def _lane_lines(s: Summary) -> list[_Line]:
    """Say what a compressed cache kept, and by layer what tells the layers apart: tokens, or bits if all were kept."""
    tokens, bits = s["kv_kept_tokens_ratio"], s["kv_bits_per_element"]
    if not s["kv_layers"] or tokens is None or bits is None or s["kv_kept_ratio"] is None:
        return []
    unit = "% of the tokens" if tokens < 1 else "bits an element"
    cells = [_layer_text(layer, by_tokens=tokens < 1) for layer in s["kv_layers"]]
    return [
        (
            "KV kept",
            f"{tokens:.1%} of the tokens at {bits:.2f} bits an element, {s['kv_kept_ratio']:.1%} of the bytes",
        ),
        ("by layer", f"least, median and most of its heads, {unit}"),
        *(("", "  ".join(cells[i : i + _LAYERS_A_LINE])) for i in range(0, len(cells), _LAYERS_A_LINE)),
    ]


def _layer_text(layer: LayerFigures, *, by_tokens: bool) -> str:
    if by_tokens:
        ratios = (layer["kept_ratio_min"], layer["kept_ratio_median"], layer["kept_ratio_max"])
        cells = [f"{100 * ratio:5.0f}" for ratio in ratios]
    else:
        bits = (
            layer["bits_per_element_min"],
            layer["bits_per_element_median"],
            layer["bits_per_element_max"],
        )
        cells = [f"{number:5.1f}" for number in bits]
    return f"{layer['layer']:>3}:{''.join(cells)}"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
