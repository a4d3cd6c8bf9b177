"""Measure what a compressed cache costs in quality on the job's own corpus.

Writes `stats/quality.parquet`. Each sampled row is prefilled twice. The compressed cache generates the answer, as in
the job. The full cache then scores the likelihood of each token of that answer. Of a row with several questions or
parts, one is sampled by the seed, so that the sample is spread over questions and parts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kvbatch.atomic_file import write_table
from kvbatch.errors import InputError, JobFileError
from kvbatch.estimate.sample import sample_requests
from kvbatch.job_file.sections import QualityGuardSection
from kvbatch.progress.display import Progress
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.text import counted

if TYPE_CHECKING:
    from engine import EngineConfig, EngineCore, Request
    from kvbatch.opened_job import OpenedJob
    from kvbatch.plan.memory_plan import MemoryPlan
    from kvcache.config import KVCacheConfig

SCHEMA = pa.schema(
    [
        ("policy", pa.string()),
        ("row_id", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("nll", pa.float64()),  # of the answer, by the cache it comes from; nats a token, like all below
        ("full_nll", pa.float64()),  # of the same answer by the full cache
        ("nll_delta", pa.float64()),
        ("kl", pa.float64()),
        ("top1_agreement", pa.float64()),
        ("first_divergence", pa.int64()),  # token of the answer, null if there is none
        ("kv_kept_ratio", pa.float64()),
        ("error", pa.string()),  # why the row could not be compared
    ]
)


@dataclass(frozen=True)
class Verdict:
    """The averages over a policy's sampled rows; figures are None if no row could be compared.

    Args:
        problems: the limits that it does not keep, in words.
    """

    num_rows: int
    num_failed: int
    nll_delta: float | None
    kl: float | None
    top1_agreement: float | None
    kv_kept_ratio: float | None
    problems: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every limit is kept."""
        return not self.problems

    def __str__(self) -> str:
        if self.nll_delta is None:
            return "none of the sampled rows could be compared"
        return (
            f"{counted(self.num_rows, 'row')}, NLL {self.nll_delta:+.4f}, KL {self.kl:.4f}, the same first choice for "
            f"{self.top1_agreement:.1%} of the tokens, {self.kv_kept_ratio:.1%} of the bytes"
        )


def assess(rows: Iterable[Mapping[str, Any]], limits: QualityGuardSection) -> Verdict:
    """Average a policy's rows and hold them against the limits."""
    rows = list(rows)
    compared = [row for row in rows if row["error"] is None]
    if not compared:
        return Verdict(0, len(rows), None, None, None, None, ("no sampled row could be compared",))
    means = {name: fmean(row[name] for row in compared) for name in ("nll_delta", "kl", "top1_agreement")}
    problems = []
    if limits.max_nll_delta is not None and means["nll_delta"] > limits.max_nll_delta:
        problems.append(f"the NLL grows by {means['nll_delta']:.4f}, more than {limits.max_nll_delta:g}")
    if limits.min_top1_agreement is not None and means["top1_agreement"] < limits.min_top1_agreement:
        problems.append(
            f"the first choice is the same for {means['top1_agreement']:.1%} of the tokens, "
            f"less than {limits.min_top1_agreement:.1%}"
        )
    ratio = fmean(row["kv_kept_ratio"] for row in compared)
    return Verdict(
        len(compared), len(rows) - len(compared), **means, kv_kept_ratio=ratio, problems=tuple(problems)
    )


def guard_run(
    opened: "OpenedJob",
    memory: "MemoryPlan",
    limits: QualityGuardSection,
    run: RunDirectory,
    progress: Progress,
) -> Verdict:
    """Compare a job's cache with the full one, and write down what was found; raises as `QualitySample`."""
    rows = QualitySample(opened, memory, limits.sample, progress).compare({"job": opened.policy})
    write_table(pa.Table.from_pylist(rows, SCHEMA), run.quality)
    return assess(rows, limits)


class QualitySample:
    """A seeded sample of a job's rows that run, and the model to compare policies on.

    Args:
        opened: the job.
        memory: how it divides its memory.
        size: rows; fewer if the corpus has fewer.
        progress: shows each row that all policies have answered.

    Raises:
        InputError: No row of the corpus can run.
        ModelUnavailable: The weights cannot be loaded.
    """

    def __init__(self, opened: "OpenedJob", memory: "MemoryPlan", size: int, progress: Progress):
        self._opened, self._memory, self._progress = opened, memory, progress
        self._requests = sample_requests(opened, size)
        if not self._requests:
            raise InputError("no row of the corpus can run in the full cache: nothing to compare caches on")
        progress.expect(len(self._requests))
        progress.step("loading weights")
        self._decoder = opened.model.decoder

    def __len__(self) -> int:
        return len(self._requests)

    def compare(self, policies: Mapping[str, "KVCacheConfig"]) -> list[dict[str, Any]]:
        """Answer every row under every policy; return one row of `SCHEMA` for each pair.

        Raises:
            JobFileError: The memory budget does not hold the longest sampled row, or a policy does not suit the model.
        """
        from kvcache.config import KVCacheConfig

        requests = [request for _, request in self._requests]
        full = self._engine(KVCacheConfig(), requests)
        engines = {name: self._engine(policy, requests) for name, policy in policies.items()}
        rows = []
        for row_id, request in self._requests:
            rows += _compare_row(row_id, request, full, engines, self._progress)
            self._progress.advance(1, len(request.prompt_token_ids))
        return rows

    def _engine(self, policy: "KVCacheConfig", requests: Sequence["Request"]) -> "EngineCore":
        """Return an engine whose pool holds the longest of the rows, alone."""
        from engine import EngineCore
        from engine.detokenizer import Detokenizer
        from engine.memory_division import cache_layout
        from engine.request_pages import prefix_pages, request_pages

        # Guesses would come and go with the machine's load, and with them the last digits.
        config: EngineConfig = replace(
            self._memory.engine_config, cache=policy, max_sequences=1, prompt_lookup=False
        )
        try:
            layout = cache_layout(self._decoder.config, config, self._decoder.dtype.itemsize)
            pages = max(
                request_pages(
                    layout, len(r.prompt_token_ids), r.sampling.max_new_tokens, prefix_tokens=r.prefix_tokens
                )
                + prefix_pages(layout, r.prefix_tokens)
                for r in requests
            )
            return EngineCore(
                self._decoder, replace(config, pool_pages=pages), Detokenizer(self._opened.model.tokenizer)
            )
        except ValueError as error:  # a policy that does not suit the model, a budget that is too small
            raise JobFileError(f"cache {policy.compress_method}: {error}") from error


def _compare_row(
    row_id: str,
    request: "Request",
    full: "EngineCore",
    engines: Mapping[str, "EngineCore"],
    progress: Progress,
) -> list[dict[str, Any]]:
    from engine.teacher_forcing import answer, drift, reading

    rows = []
    blank = dict.fromkeys(SCHEMA.names) | {"row_id": row_id, "prompt_tokens": len(request.prompt_token_ids)}
    try:
        progress.step(f"row {row_id}, full cache")
        with reading(full, request) as context:
            for place, (name, llm) in enumerate(engines.items(), 1):
                progress.step(f"row {row_id}, cache {name} ({place} of {len(engines)})")
                result, log_probs = answer(llm, request)
                found = drift(result.token_ids, log_probs, context.log_probs(result.token_ids))
                rows.append(
                    blank
                    | {
                        "policy": name,
                        "completion_tokens": len(result.token_ids),
                        "nll": found.nll,
                        "full_nll": found.full_nll,
                        "nll_delta": found.nll_delta,
                        "kl": found.kl,
                        "top1_agreement": found.top1_agreement,
                        "first_divergence": found.first_divergence,
                        "kv_kept_ratio": result.kv_kept_bytes / result.kv_full_bytes,
                    }
                )
    except ValueError as error:
        done = {row["policy"] for row in rows}
        rows += [blank | {"policy": name, "error": str(error)} for name in engines if name not in done]
    return rows
