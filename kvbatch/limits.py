"""When a finished run is no success; owns what the ratios of `limits` count."""

from typing import Any

from kvbatch.job import LimitsSection


def over_limits(limits: LimitsSection, summary: dict[str, Any]) -> str | None:
    """Return why a run is no success, in words: its rows, those carried over included, against the job's limits."""
    rows = summary["rows"]
    if rows and not summary["ok"]:
        return f"none of {rows:,} rows got an answer"
    failed = summary["errors"] + summary["rejected"]
    over = [
        f"{count:,} of {rows:,} rows ({count / rows:.1%}) {what}, limits.{key} allows {ratio:.1%}"
        for key, what, count, ratio in (
            ("max_error_ratio", "got no answer", failed, limits.max_error_ratio),
            ("max_truncated_ratio", "were cut to fit", summary["truncated"], limits.max_truncated_ratio),
        )
        if ratio is not None and count > ratio * rows
    ]
    return "; ".join(over) or None
