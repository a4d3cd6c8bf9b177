"""`kvbatch plan`: what a job will do, need, take and cost, before it runs and without its weights.

The plan stays beside the job's runs, and the next run of the same job and input uses it. What prompts have in tokens is
taken from the last plan or run where that has them, by content.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import polars as pl

from kvbatch.errors import InputError, JobFileError
from kvbatch.estimate.step_time import keep_speed, known_speed
from kvbatch.job_file.sections import Job
from kvbatch.job_file.template import parse_template
from kvbatch.opened_job import JobRunner, opened_job
from kvbatch.plan.feasibility import plan_memory
from kvbatch.plan.planner import MAX_FORECAST_ROWS, Planner
from kvbatch.run_dir.commit import planned_shards
from kvbatch.run_dir.fingerprint import RENDERED, config_hash, job_fingerprint
from kvbatch.run_dir.lock import IfLocked, job_lock
from kvbatch.run_dir.manifest import RunDirectory, describe_directory, open_run, plan_directory
from kvbatch.run_dir.plan_file import PlanSummary
from kvbatch.run_dir.record import read_record, write_record
from kvbatch.run_dir.staging import drafted, publish
from kvbatch.run_dir.stats_files import read_stats
from kvbatch.text import counted, escaped, format_bytes

if TYPE_CHECKING:
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
_BAR_WIDTH = 40
# A calibration answers whole rows of so many prompt tokens together, the shortest of a sample, and reads the beginning
# of a longer one.
_SAMPLE, _WHOLE_TOKENS, _BEGINNING_TOKENS = 24, 4000, 3000


@dataclass(frozen=True)
class Estimate:
    """How long a job takes.

    Args:
        seconds: of running, loading and planning aside.
        answer_tokens: of a row, as assumed.
        basis: where that comes from, in words.
    """

    seconds: float
    answer_tokens: float
    basis: str


@dataclass(frozen=True)
class PlanView:
    """A plan and what to say of it.

    Args:
        run: the directory of the plan.
        is_new: whether it was made now.
        what_if: the same rows under other keys, and how these are written.
    """

    run: RunDirectory
    is_new: bool
    summary: PlanSummary
    memory_budget_bytes: int
    prefill_buffer_bytes: int
    lengths: list[tuple[int, int, int]]  # from, to, rows
    estimate: Estimate | None
    what_if: "tuple[str, PlanView] | None" = None


def plan_job(
    job: Job,
    *,
    what_if: Sequence[str] = (),
    other: Job | None = None,
    calibrate: bool = False,
    stopper: "Stopper | None" = None,
) -> PlanView:
    """Plan a job, unless a plan of the very same is there.

    Args:
        what_if: the keys that `other`, the job to compare with, has otherwise, as they were written.
        calibrate: measure the speed on a few rows, for which the weights are loaded.

    Raises:
        KvbatchError: With the exit code of what went wrong.
    """
    if other:
        if job.environment.key:  # else hashes of equal values would differ
            other = other.with_environment(replace(other.environment, key=job.environment.key))
        _check_what_if(job, other)
    with (
        job_lock(Path(job.output_dir), IfLocked(), "plan"),
        opened_job(job, stopper=stopper) as runner,
    ):
        run = plan_directory(job)
        if not other or config_hash(other) == config_hash(job):  # else no row is reused under its keys
            runner.choose_rows(None, new_run=False)
        found = runner.find_plan()
        if found:
            runner.divide_budget(found)
            summary = PlanSummary(**found.read_manifest()["plan"])
        else:
            summary = _make(runner, run)
        if calibrate and summary.num_running:
            _calibrate(runner)
        lengths = _lengths(run)
        view = PlanView(
            run,
            not found,
            summary,
            runner.engine_config.memory_budget_bytes,
            runner.budget.prefill_buffer_bytes,
            lengths,
            _estimate(runner, summary, run),
        )
        if other:
            view = replace(view, what_if=(" ".join(what_if), _compare(runner, other, view)))
        return view


def _make(runner: JobRunner, run: RunDirectory) -> PlanSummary:
    """Plan anew; the plan of before stays until this one stands. Raises as `JobRunner.make_plan`."""
    runner.divide_budget(None)
    known = _known_tokens(runner, run)
    with drafted(run.path.parent, run.path.name) as draft:
        describe_directory(draft, runner.job, runner.manifest)
        runner.progress.start("planning")
        summary = runner.make_plan(draft, known)
        publish(draft)
    return summary


def _known_tokens(runner: JobRunner, plan: RunDirectory) -> dict[str, int]:
    """Return the prompt tokens of rows by content, from the last plan and run whose prompts are made alike."""
    if runner.job.input.format == "openai-batch":
        return {}  # a row says more than its content: how long its answer may be
    if runner.job.prompt.clean or any(
        piece.is_placeholder and piece.text == "id"
        for text in (runner.job.prompt.template, runner.job.prompt.system or "")
        for piece in parse_template(text)
    ):
        return {}  # neither the id nor what cleaning removed is in a row's content or count
    if runner.job.prompt.questions or runner.job.long_document.part_tokens:
        return {}  # a count does not tell how a prompt is divided
    wanted = _prompt_keys(runner.fingerprint.semantic)
    known: dict[str, int] = {}
    for run in (plan, RunDirectory(Path(runner.job.output_dir) / "latest")):
        try:
            if _prompt_keys(run.read_manifest().get("semantic", {})) != wanted:
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


def _compare(runner: JobRunner, other: Job, view: PlanView) -> PlanView:
    """Return the view of the same rows under another job; raises as `plan_memory`."""
    job, config, budget = runner.job, runner.engine_config, runner.budget
    try:
        runner.job = other
        runner.engine_config, runner.budget = plan_memory(other, runner.model, runner.builder)
        planner = Planner(other, runner.builder, runner.budget, runner.model.config.max_context)
        rows: list[dict[str, Any]] = []
        summary = planner.replan(_kept(planned_shards(view.run), rows))
        estimate = _estimate(runner, summary, view.run, rows)
        return replace(
            view,
            summary=summary,
            memory_budget_bytes=runner.engine_config.memory_budget_bytes,
            prefill_buffer_bytes=runner.budget.prefill_buffer_bytes,
            estimate=estimate,
        )
    finally:
        runner.job, runner.engine_config, runner.budget = job, config, budget


def _kept(
    shards: Iterator[list[dict[str, Any]]], rows: list[dict[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """Pass shards on; once one was used, keep its rows, as far as a forecast needs them."""
    for shard in shards:
        yield shard
        if len(rows) < MAX_FORECAST_ROWS:
            rows += [row for row in shard if row["status"] == "ok"]


def _lengths(run: RunDirectory) -> list[tuple[int, int, int]]:
    """Return the prompts' lengths in classes of equal, round width; the last one takes what is longer than most."""
    tokens = pl.read_parquet(run.path / "plan.parquet", columns=["prompt_tokens"])[
        "prompt_tokens"
    ].drop_nulls()
    if not len(tokens):
        return []
    sizes = (step * 10**power for power in range(10) for step in (1, 2, 5))
    most = tokens.quantile(_LONG_RATIO, "higher")
    width = next(size for size in sizes if most < size * _NUM_CLASSES)
    classes = (tokens // width).clip(upper_bound=_NUM_CLASSES)
    by_class, last = dict(classes.value_counts().rows()), classes.max()
    starts = range(0, (last + 1) * width, width)
    ends = [*starts[1:], max(starts[-1] + width, tokens.max() + 1)]
    return [(start, end, by_class.get(start // width, 0)) for start, end in zip(starts, ends, strict=True)]


def _calibrate(runner: JobRunner) -> None:
    """Run a few of the job's own rows, together, and keep how fast they went and how long their answers were."""
    import time

    from engine import LLM
    from engine.detokenizer import Detokenizer
    from kvbatch.estimate.sample import sample_requests

    runner.progress.start("calibrating")
    found = sorted(
        (request for _, request in sample_requests(runner, _SAMPLE)), key=lambda r: len(r.prompt_token_ids)
    )
    if not found:  # all documents are streamed
        return
    totals = accumulate(len(request.prompt_token_ids) for request in found)
    whole = found[: max(1, sum(total <= _WHOLE_TOKENS for total in totals))]
    beginning = replace(
        found[-1],
        prompt_token_ids=found[-1].prompt_token_ids[:_BEGINNING_TOKENS],
        prefix_tokens=min(found[-1].prefix_tokens, _BEGINNING_TOKENS - 1),
        sampling=replace(found[-1].sampling, max_new_tokens=1),
    )
    requests = [replace(request, request_id=i) for i, request in enumerate([*whole, beginning])]
    layout = runner.budget.layout
    pages = sum(
        layout.sequence_pages(r.max_tokens, r.prefix_tokens, r.sampling.max_new_tokens) for r in requests
    ) + layout.sequence_pages(max(r.prefix_tokens for r in requests) or 1)
    config = replace(runner.engine_config, pool_pages=pages)
    llm = LLM(runner.model.decoder, config, Detokenizer(runner.model.tokenizer))
    started_s = time.perf_counter()
    results = {result.request_id: result for result in llm.generate(requests)}
    keep_speed(runner, llm.monitor.speed, time.perf_counter() - started_s, min_steps=1)
    answers = [results[i].completion_tokens for i in range(len(whole))]
    write_record(_answers_file(runner), {"answer_tokens": fmean(answers)})


def _answers_file(runner: JobRunner) -> Path:
    return plan_directory(runner.job).path / "calibration.json"


def _estimate(
    runner: JobRunner, summary: PlanSummary, run: RunDirectory, rows: list[dict[str, Any]] | None = None
) -> Estimate | None:
    """Forecast the running time, if the speed is known; `rows` are the plan's own unless given."""
    speed = known_speed(runner)
    if speed is None or not summary.num_running:
        return None
    answer_tokens, basis = _answer_tokens(runner)
    if rows is None:
        rows = []
        for _ in _kept(planned_shards(run), rows):
            pass
    ordered = sorted(rows, key=lambda row: (row["shard"], row["order"]))[:MAX_FORECAST_ROWS]
    planner = Planner(runner.job, runner.builder, runner.budget, runner.model.config.max_context)
    pages = min(summary.peak_pages, runner.budget.capacity_pages)
    seconds = planner.forecast(ordered, pages, max(1, round(answer_tokens)), speed.coefficients).seconds
    scale = summary.prompt_tokens / sum(row["prompt_tokens"] for row in ordered)
    return Estimate(seconds * scale * speed.overhead, answer_tokens, basis)


def _answer_tokens(runner: JobRunner) -> tuple[float, str]:
    """Return how long answers are: as in the last run, as in the calibration, or at most."""
    most = runner.job.generation.max_new_tokens
    try:
        last = open_run(Path(runner.job.output_dir) / "latest").read_summary()
        if last.get("own_answers") and last.get("completion_tokens"):
            return min(most, last["completion_tokens"] / last["own_answers"]), "as in the last run"
    except InputError:
        pass
    try:
        found = read_record(_answers_file(runner), "kvbatch plan --calibrate")["answer_tokens"]
        return min(most, found), "as in the calibration"
    except (InputError, KeyError):
        return float(most), "the most there may be"


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
    return "\n".join(lines)


def _facts(view: PlanView, price_per_hour: float | None) -> Iterator[tuple[str, str]]:
    summary = view.summary
    yield "running", f"{counted(summary.num_running, 'row')} in {counted(summary.num_bins, 'bin')}"
    efficiency = summary.packing_efficiency
    yield "packing", "–" if efficiency is None else f"{efficiency:.1%} of the pool"
    yield "KV full", format_bytes(summary.kv_full_bytes)
    ratio = f", {summary.kv_bytes / summary.kv_full_bytes:.1%}" if summary.kv_full_bytes else ""
    yield "KV kept", f"at most {format_bytes(summary.kv_bytes)}{ratio}"
    yield "KV peak", format_bytes(summary.predicted_kv_peak_bytes)
    prefill_buffers = (
        f" and {format_bytes(view.prefill_buffer_bytes)} of prefill buffers"
        if view.prefill_buffer_bytes
        else ""
    )
    budget = format_bytes(view.memory_budget_bytes)
    yield "memory", f"{format_bytes(summary.pool_bytes)} of pool{prefill_buffers}, of {budget}"
    estimate = view.estimate
    if estimate:
        answers = f"{estimate.answer_tokens:.0f} tokens an answer, {estimate.basis}"
        yield "time", f"{_duration(estimate.seconds)}, {answers}"
    else:
        yield "time", "unknown; --calibrate measures it" if summary.num_running else "none: nothing is to run"
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
        "memory_budget_bytes": view.memory_budget_bytes,
        "prefill_buffer_bytes": view.prefill_buffer_bytes,
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
