"""The quality_guard section: what a compressed cache may cost, measured before the job runs."""

from typing import Literal

from kvbatch.job_file.sections.base import Count, Ratio, Section


class QualityGuardSection(Section):
    """A check, before the job runs, of what its compressed cache costs on its own rows (`kvbatch.estimate.quality`)."""

    sample: Count = 20
    """Rows to compare, chosen by the job's seed."""
    max_nll_delta: float | None = 0.03
    """The most that the answers' negative log-likelihood may rise, measured with the full cache, in nats a token."""
    min_top1_agreement: Ratio | None = None
    """The least share of tokens for which both caches have the same likeliest token; by default no limit."""
    action: Literal["warn", "fail", "fallback_full"] = "warn"
    """Beyond a limit: `warn` goes on, `fail` ends with exit code 65, `fallback_full` runs with the full cache."""
