"""`kvbatch plan`: what a job will do, need, take and cost, before it runs and without its weights.

The plan stays beside the job's runs, and the next run of the same job and input uses it. What prompts have in tokens is
taken from the last plan or run where that has them, by content.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from kvbatch.errors import InputError, JobFileError
from kvbatch.estimate.running_time import Estimate, estimate_time, keeping_rows, measure_speed
from kvbatch.job_file.sections import Job
from kvbatch.job_file.template import parse_template
from kvbatch.model.cache_policy import known_policy, policy_text
from kvbatch.opened_job import OpenedJob, choose_rows, opened_job
from kvbatch.plan.preset_advice import preset_advice
from kvbatch.planning import make_plan
from kvbatch.run_dir.commit import planned_shards
from kvbatch.run_dir.describe import describe_directory
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.find_runs import plan_directory
from kvbatch.run_dir.fingerprint import RENDERED, config_hash, job_fingerprint
from kvbatch.run_dir.lock import IfLocked, job_lock
from kvbatch.run_dir.plan_file import PlanRow, PlanSummary
from kvbatch.run_dir.resume import find_plan, kept_budget_bytes
from kvbatch.run_dir.reuse import Reuse
from kvbatch.run_dir.staging import drafted, publish
from kvbatch.run_dir.stats_files import read_stats

if TYPE_CHECKING:
    from kvbatch.plan.memory_plan import MemoryPlan
    from kvbatch.progress.display import Progress
    from kvbatch.signals import Stopper

# What decides how long a prompt is; a plan that has the same may be asked for token counts.
_PROMPT_KEYS = (
    "tokenizer",
    "model content",
    RENDERED,
    "prompt.",
    "generation.chat_template_kwargs",
    "generation.choices",
    "input.text_column",
)
_WHAT_IF_SECTIONS = ("cache", "engine")
_NUM_CLASSES = 12  # and one for what is longer than nearly all
_LONG_RATIO = 0.99


@dataclass(frozen=True)
class PlanView:
    """A plan and what to say of it.

    Args:
        run: the directory of the plan.
        is_new: whether it was made now.
        cache: what the cache policy keeps and loses on the model, if that is known.
        advice: what to set where the cache preset is not worth its loss.
        what_if: the same rows under other keys, and how these are written.
    """

    run: RunDirectory
    is_new: bool
    summary: PlanSummary
    memory: "MemoryPlan"
    lengths: list[tuple[int, int, int]]  # from, to, rows
    estimate: Estimate | None
    cache: str
    advice: str | None = None
    what_if: "tuple[str, PlanView] | None" = None


def plan_job(
    job: Job,
    *,
    what_if: Sequence[str] = (),
    other: Job | None = None,
    measures: bool = False,
    stopper: "Stopper | None" = None,
) -> PlanView:
    """Plan a job, unless a plan of the very same is there.

    Args:
        what_if: the keys that `other`, the job to compare with, has otherwise, as they were written.
        measures: measure the speed on a few rows, for which the weights are loaded.

    Raises:
        KvbatchError: With the exit code of what went wrong.
    """
    if other:
        if job.environment.key:  # else hashes of equal values would differ
            other = other.with_environment(replace(other.environment, key=job.environment.key))
        _check_what_if(job, other)
    with (
        job_lock(Path(job.output_dir), IfLocked(), "plan"),
        opened_job(job, stopper=stopper) as (opened, progress),
    ):
        run, reuse = plan_directory(job), Reuse()
        if not other or config_hash(other) == config_hash(job):  # else no row is reused under its keys
            opened, reuse = choose_rows(opened, None, progress.note)
        found = find_plan(job, opened.fingerprint, opened.inputs, reuse)
        summary = found.read_manifest().plan if found else None
        if found and summary:
            memory = opened.plan_memory(known_bytes=kept_budget_bytes(found, job))
        else:
            memory = opened.plan_memory()
            summary = _make(opened, memory, run, reuse, progress)
        if measures and summary.num_running:
            measure_speed(opened, memory, progress)
        estimate = estimate_time(opened, memory, summary, run)
        lengths = _prompt_tokens(run)
        advice = preset_advice(job, opened.model, opened.prompts, lengths.tolist(), memory.budget_bytes)
        view = PlanView(run, not found, summary, memory, _classes(lengths), estimate, _cache(opened), advice)
        if other:
            view = replace(view, what_if=(" ".join(what_if), _compare(opened, other, view)))
        return view


def _make(
    opened: OpenedJob, memory: "MemoryPlan", run: RunDirectory, reuse: Reuse, progress: "Progress"
) -> PlanSummary:
    """Plan anew; the plan of before stays until this one stands. Raises as `make_plan`."""
    known = _known_tokens(opened, run)
    with drafted(run.path.parent, run.path.name) as draft:
        describe_directory(draft, opened.job, opened.manifest(memory, reuse))
        progress.start("planning")
        summary = make_plan(opened, memory, draft, progress, known)
        publish(draft)
    return summary


def _known_tokens(opened: OpenedJob, plan: RunDirectory) -> dict[str, int]:
    """Return the prompt tokens of rows by content, from the last plan and run whose prompts are made alike."""
    job = opened.job
    if job.input.format == "openai-batch":
        return {}  # a row says more than its content: how long its answer may be
    if job.prompt.clean or any(
        piece.is_placeholder and piece.text == "id"
        for text in (job.prompt.template, job.prompt.system)
        for piece in parse_template(text or "")
    ):
        return {}  # neither the id nor what cleaning removed is in a row's content or count
    if job.prompt.questions or job.long_document.part_tokens:
        return {}  # a count does not tell how a prompt is divided
    wanted = _prompt_keys(opened.fingerprint.semantic)
    known: dict[str, int] = {}
    for run in (plan, RunDirectory(Path(job.output_dir) / "latest")):
        try:
            if _prompt_keys(run.read_manifest().semantic) != wanted:
                continue
            rows = read_stats(run, run.plan, ["content", "outcome", "prompt_tokens"])
        except InputError:
            continue
        if rows is None:
            continue
        rows = rows.filter((pl.col("outcome") == "fits") & pl.col("content").is_not_null())
        known |= dict(zip(rows["content"], rows["prompt_tokens"], strict=True))
    return known


def _prompt_keys(semantic: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in semantic.items() if key.startswith(_PROMPT_KEYS)}


def _check_what_if(job: Job, other: Job) -> None:
    """Prove that two jobs differ in nothing but what prompts do not depend on.

    Raises:
        JobFileError: They do.
    """
    mine, theirs = ({**f.semantic, **f.operational} for f in (job_fingerprint(job), job_fingerprint(other)))
    for key in {**mine, **theirs}:
        if mine.get(key) != theirs.get(key) and key.split(".")[0] not in _WHAT_IF_SECTIONS:
            raise JobFileError(
                f"--what-if compares keys of {' and '.join(_WHAT_IF_SECTIONS)}, not {key}; plan a second time with -s"
            )


def _compare(opened: OpenedJob, job: Job, view: PlanView) -> PlanView:
    """Return the view of the same rows under another job; raises as `plan_memory`."""
    other = replace(
        opened.with_job(job), fitted=known_policy(job, opened.model)
    )  # with what is known of its own cache
    # what is free now is less than before the first of two jobs of one budget
    is_same = job.engine.memory_budget == opened.job.engine.memory_budget
    memory = other.plan_memory(known_bytes=view.memory.budget_bytes if is_same else None)
    rows: list[PlanRow] = []
    summary = other.planner(memory).replan(keeping_rows(planned_shards(view.run), rows))
    return replace(
        view,
        summary=summary,
        memory=memory,
        estimate=estimate_time(other, memory, summary, view.run, rows),
        cache=_cache(other),
    )


def _cache(opened: OpenedJob) -> str:
    if not opened.policy.compresses:
        return "full"
    return policy_text(opened.job.cache.preset, opened.model, opened.fitted)


def _prompt_tokens(run: RunDirectory) -> "np.ndarray":
    """Return the prompt tokens of the plan's rows, int64; rows without a prompt are left out."""
    return pl.read_parquet(run.plan, columns=["prompt_tokens"])["prompt_tokens"].drop_nulls().to_numpy()


def _classes(tokens: "np.ndarray") -> list[tuple[int, int, int]]:
    """Return lengths in classes of equal, round width; the last one takes what is longer than most."""
    if not len(tokens):
        return []
    sizes = (step * 10**power for power in range(10) for step in (1, 2, 5))
    most, longest = np.quantile(tokens, _LONG_RATIO, method="higher"), int(np.max(tokens))
    width = next(size for size in sizes if most < size * _NUM_CLASSES)
    counts = np.bincount(np.minimum(tokens // width, _NUM_CLASSES)).tolist()
    starts = range(0, len(counts) * width, width)
    ends = [*starts[1:], max(starts[-1] + width, longest + 1)]
    return list(zip(starts, ends, counts, strict=True))
