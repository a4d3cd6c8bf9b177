"""The quality_guard section: limits on the quality cost of a compressed cache, measured before the job runs."""

from typing import Literal

from kvbatch.job_file.sections.base import Count, Ratio, Section


class QualityGuardSection(Section):
    """Measures the compressed cache on the job's rows, before the job runs (`kvbatch.estimate.quality`)."""

    sample: Count = 20
    """Number of rows to compare, sampled with `generation.seed`."""
    max_nll_delta: float | None = 0.03
    """Maximum rise of the answers' negative log-likelihood, measured with the full cache, in nats per token."""
    min_top1_agreement: Ratio | None = None
    """Minimum share of tokens for which both caches have the same likeliest token. By default no limit."""
    action: Literal["warn", "fail", "fallback_full"] = "warn"
    """Action beyond a limit: `warn` warns and continues, `fail` ends with exit code 65, `fallback_full` runs with the
    full cache."""
