"""How long a job will run: the forecast of its steps, at the speed that this machine was measured at."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from kvbatch.errors import InputError
from kvbatch.estimate.sample import sample_requests
from kvbatch.estimate.step_time import keep_speed, known_speed
from kvbatch.opened_job import OpenedJob
from kvbatch.plan.planner import MAX_FORECAST_ROWS
from kvbatch.run_dir.commit import planned_shards
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.find_runs import open_run, plan_directory
from kvbatch.run_dir.plan_file import PlanRow, PlanSummary
from kvbatch.run_dir.record import read_record, write_record

if TYPE_CHECKING:
    from kvbatch.plan.memory_plan import MemoryPlan
    from kvbatch.progress.display import Progress

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


def keeping_rows(shards: Iterator[list[PlanRow]], rows: list[PlanRow]) -> Iterator[list[PlanRow]]:
    """Pass shards on; once one was used, keep its rows, as far as a forecast needs them."""
    for shard in shards:
        yield shard
        if len(rows) < MAX_FORECAST_ROWS:
            rows += [row for row in shard if row.status == "ok"]


def measure_speed(opened: OpenedJob, memory: "MemoryPlan", progress: "Progress") -> None:
    """Run a few of the job's own rows, together, and keep how fast they ran and how long their answers were."""
    from engine import EngineCore
    from engine.detokenizer import Detokenizer
    from engine.request_pages import prefix_pages, request_pages

    progress.start("measuring")
    found = sorted(
        (request for _, request in sample_requests(opened, _SAMPLE)), key=lambda r: len(r.prompt_token_ids)
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
    layout = memory.budget.layout
    pages = prefix_pages(layout, max(r.prefix_tokens for r in requests) or 1) + sum(
        request_pages(
            layout, len(r.prompt_token_ids), r.sampling.max_new_tokens, prefix_tokens=r.prefix_tokens
        )
        for r in requests
    )
    llm = EngineCore(opened.model.decoder, memory.with_pool(pages), Detokenizer(opened.model.tokenizer))
    started_s = time.perf_counter()
    results = {result.request_id: result for result in llm.generate(requests)}
    seconds = time.perf_counter() - started_s
    keep_speed(opened, memory.engine_config, llm.monitor.speed, seconds, min_steps=1)
    answers = [results[i].completion_tokens for i in range(len(whole))]
    write_record(_answers_file(opened), {"answer_tokens": fmean(answers)})


def _answers_file(opened: OpenedJob) -> Path:
    return plan_directory(opened.job).path / "calibration.json"


def estimate_time(
    opened: OpenedJob,
    memory: "MemoryPlan",
    summary: PlanSummary,
    run: RunDirectory,
    rows: Sequence[PlanRow] | None = None,
) -> Estimate | None:
    """Forecast the running time of a plan; None where the speed is unknown or nothing is to run.

    Args:
        summary: what the plan comes to.
        run: the directory of the plan.
        rows: the plan's running rows, in place of those that the directory holds.
    """
    speed = known_speed(opened, memory.engine_config)
    if speed is None or not summary.num_running:
        return None
    answer_tokens, basis = _answer_tokens(opened)
    if rows is None:
        read: list[PlanRow] = []
        for _ in keeping_rows(planned_shards(run), read):
            pass
        rows = read
    ordered = sorted(rows, key=lambda row: (row.shard, row.order))[:MAX_FORECAST_ROWS]
    pages = min(summary.peak_pages, memory.budget.capacity_pages)
    forecast = opened.planner(memory).forecast(
        ordered, pages, max(1, round(answer_tokens)), speed.coefficients
    )
    scale = summary.prompt_tokens / sum(row.prompt_tokens for row in ordered)
    return Estimate(forecast.seconds * scale * speed.overhead, answer_tokens, basis)


def _answer_tokens(opened: OpenedJob) -> tuple[float, str]:
    """Return how long answers are: as in the last run, as in the calibration, or at most."""
    most = opened.job.generation.max_new_tokens
    try:
        last = open_run(Path(opened.job.output_dir) / "latest").read_summary()
        if last.get("own_answers") and last.get("completion_tokens"):
            return min(most, last["completion_tokens"] / last["own_answers"]), "as in the last run"
    except InputError:
        pass
    try:
        found = read_record(_answers_file(opened), "kvbatch plan --measure")["answer_tokens"]
        return min(most, found), "as in the calibration"
    except (InputError, KeyError):
        return float(most), "the most there may be"
