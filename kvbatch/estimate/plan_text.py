"""What `kvbatch plan` prints of a plan: text for people, JSON for machines."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from kvbatch.estimate.preview import PlanView
from kvbatch.text import counted, escaped, format_bytes

_BAR_WIDTH = 40


def render(view: PlanView, price_per_hour: float | None = None) -> str:
    """Return the plan for a terminal, beside it what it would be under other keys."""
    columns = [("", view), view.what_if] if view.what_if else [("", view)]
    place = escaped(str(view.run.path / "plan.parquet"))
    lines = [f"plan         {place}{'' if view.is_new else ', made earlier'}"]
    summary = view.summary
    outcomes = ", ".join(f"{count:,} {name}" for name, count in summary.outcomes.items())
    lines.append(f"rows         {summary.num_rows:,}: {outcomes or 'none'}")
    lines.append(
        f"tokens       {summary.prompt_tokens:,} prompt"
        + (f", {summary.dropped_tokens:,} dropped" if summary.dropped_tokens else "")
    )
    most = max((count for _, _, count in view.lengths), default=0)
    for number, (start, end, count) in enumerate(view.lengths):
        bar = "█" * round(_BAR_WIDTH * count / most) or ("▏" if count else "")
        lines.append(f"{'lengths' if not number else '':<12} {start:>7,}–{end - 1:<7,} {bar} {count:,}")
    facts = [dict(_facts(column, price_per_hour)) for _, column in columns]
    width = max(len(fact) for fact in facts[0].values()) + 3
    if len(columns) > 1:
        lines.append(f"{'':<12} {'as planned':<{width}} {columns[1][0]}")
    for name in facts[0]:
        lines.append(f"{name:<12} " + " ".join(f"{fact[name]:<{width}}" for fact in facts).rstrip())
    if view.advice:
        lines.append(f"note         {view.advice}")
    return "\n".join(lines)


def _facts(view: PlanView, price_per_hour: float | None) -> Iterator[tuple[str, str]]:
    summary = view.summary
    yield "running", f"{counted(summary.num_running, 'row')} in {counted(summary.num_bins, 'bin')}"
    efficiency = summary.packing_efficiency
    yield "packing", "–" if efficiency is None else f"{efficiency:.1%} of the pool"
    yield "KV full", format_bytes(summary.kv_full_bytes)
    ratio = f", {summary.kv_bytes / summary.kv_full_bytes:.1%}" if summary.kv_full_bytes else ""
    yield "KV kept", f"at most {format_bytes(summary.kv_bytes)}{ratio}"
    yield "cache", view.cache
    yield "KV peak", format_bytes(summary.predicted_kv_peak_bytes)
    buffers = view.memory.budget.prefill_buffer_bytes
    more = f" and {format_bytes(buffers)} of prefill buffers" if buffers else ""
    yield (
        "budget",
        f"{format_bytes(summary.pool_bytes)} of pool{more}, of {format_bytes(view.memory.budget_bytes)}",
    )
    parts = view.memory.process_bytes(summary.pool_bytes)
    named = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    yield "process", f"{format_bytes(sum(parts.values()))} in all: {named}"
    estimate = view.estimate
    if estimate:
        answers = f"{estimate.answer_tokens:.0f} tokens an answer, {estimate.basis}"
        yield "time", f"{_duration(estimate.seconds)}, {answers}"
    else:
        yield "time", "unknown; --measure measures it" if summary.num_running else "none: nothing is to run"
    if price_per_hour is not None:
        cost = f"{estimate.seconds / 3600 * price_per_hour:,.2f}" if estimate else "unknown"
        yield "cost", f"{cost} at {price_per_hour:g} an hour"


def to_json(view: PlanView, price_per_hour: float | None = None) -> dict[str, Any]:
    """Return the plan's figures for machines."""
    summary, estimate = view.summary, view.estimate
    seconds = estimate.seconds if estimate else None
    found = asdict(summary) | {
        "plan": str(view.run.path / "plan.parquet"),
        "packing_efficiency": summary.packing_efficiency,
        "memory_budget_bytes": view.memory.budget_bytes,
        "advice": view.advice,
        "cache": view.cache,
        "process_bytes": view.memory.process_bytes(summary.pool_bytes),
        "prefill_buffer_bytes": view.memory.budget.prefill_buffer_bytes,
        "lengths": [{"from": start, "to": end - 1, "rows": count} for start, end, count in view.lengths],
        "seconds": seconds,
        "answer_tokens": estimate.answer_tokens if estimate else None,
    }
    if price_per_hour is not None:
        found["cost"] = seconds / 3600 * price_per_hour if seconds is not None else None
    if view.what_if:
        keys, other = view.what_if
        found["what_if"] = {"keys": keys} | to_json(replace(other, what_if=None), price_per_hour)
    return found


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
