"""The quality_guard section: what a compressed cache may cost, judged before the job runs."""

from typing import Literal

from kvbatch.job_file.sections.base import Count, Ratio, Section


class QualityGuardSection(Section):
    """A check, before the job runs, of what its compressed cache costs on its own rows (`kvbatch.estimate.quality`)."""

    sample: Count = 20
    """Rows to compare, chosen by the job's seed."""
    max_nll_delta: float | None = 0.03
    """By how much less likely the full cache may hold an answer's tokens, in nats a token."""
    min_top1_agreement: Ratio | None = None
    """Of the first choices, token by token."""
    action: Literal["warn", "fail", "fallback_full"] = "warn"
    """Beyond a limit: `warn` and go on, `fail` with exit 65, or run with the full cache (`fallback_full`)."""
