"""Compare a finished run with the ratios of `limits`; a run beyond one of them is no success."""

from kvbatch.job_file.sections import LimitsSection
from kvbatch.report.summary import Summary


def over_limits(limits: LimitsSection, summary: Summary) -> str | None:
    """Return the reason why a run is no success, or None. Rows with reused answers count too."""
    rows = summary["rows"]
    if rows and not summary["ok"]:
        return f"none of {rows:,} rows got an answer"
    failed, answers = summary["errors"] + summary["rejected"], summary["answers"]
    over = [
        f"{count:,} of {total:,} {things} ({count / total:.1%}) {what}, limits.{key} allows {ratio:.1%}"
        for key, things, what, count, total, ratio in (
            ("max_error_ratio", "rows", "got no answer", failed, rows, limits.max_error_ratio),
            (
                "max_truncated_ratio",
                "rows",
                "were cut to fit",
                summary["truncated"],
                rows,
                limits.max_truncated_ratio,
            ),
            ("max_cut_ratio", "answers", "were cut", summary["cut"], answers, limits.max_cut_ratio),
        )
        if ratio is not None and count > ratio * total
    ]
    return "; ".join(over) or None
