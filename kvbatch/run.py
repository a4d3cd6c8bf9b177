"""A job from its files to its summary: open, plan, load, run.

The corpus is read twice. The first pass plans every row; the second, window by window, submits rows in the
plan's order and writes a shard as soon as all its rows are done. Only windows with unfinished rows are held.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from kvbatch.errors import JobFileError, KvbatchError, LimitExceeded
from kvbatch.job import Job
from kvbatch.manifest import RunDirectory, create_run, describe_run, find_same_run
from kvbatch.progress import Progress, format_bytes
from kvbatch.runlog import RunLog, write_heartbeat
from kvbatch.stop import Stopper
from kvbatch.template import column_names
from kvbatch.writer import write_json

if TYPE_CHECKING:
    from engine import LLM, EngineConfig, EngineStats
    from kvbatch.corpus import Corpus, InputSpec
    from kvbatch.model import ModelHandle
    from kvbatch.plan import PlanSummary
    from kvbatch.prompt import PromptBuilder


@dataclass(frozen=True)
class RunOutcome:
    """Say which run holds the job's output, and whether it was made now."""

    run: RunDirectory
    is_new: bool


def run_job(
    job: Job,
    *,
    new_run: bool = False,
    stream: TextIO | None = None,
    stopper: Stopper | None = None,
    make_llm: "Callable[[ModelHandle, EngineConfig], LLM] | None" = None,
) -> RunOutcome:
    """Run a job, unless its latest run did the same to the same files.

    Args:
        new_run: run it all the same.
        stream: where progress is shown, stderr by default.
        stopper: holds signals back while a shard is written.
        make_llm: makes the engine; by default the model is loaded into it.

    Raises:
        KvbatchError: With the exit code of what went wrong.
    """
    from kvbatch.corpus import Corpus

    started_s = time.monotonic()
    corpus = Corpus(input_spec(job))
    same = None if new_run else find_same_run(job, corpus.files)
    if same:
        return RunOutcome(same, is_new=False)
    with Progress(stream) as progress:
        progress.start("opening")
        runner = JobRunner(job, corpus, progress, stopper or Stopper(), make_llm or _load_llm)
        run = create_run(job, runner.manifest)
        log = RunLog(run.log)
        progress.beat = lambda phase, **values: write_heartbeat(run.heartbeat, phase, **values)
        try:
            runner.run(run, log, started_s)
        except BaseException as error:
            log.failure(error)
            if isinstance(error, KvbatchError) or not isinstance(error, Exception):
                raise
            raise KvbatchError(f"internal error, {type(error).__name__}: {error}; see {run.log}") from error
        finally:
            progress.beat = None
            log.close()
    return RunOutcome(run, is_new=True)


def input_spec(job: Job) -> "InputSpec":
    """Return the job's input section as the corpus takes it."""
    from kvbatch.corpus import InputSpec

    section = job.input
    return InputSpec(
        paths=section.paths,
        format=section.format,
        id_column=section.id_column,
        text_column=section.text_column,
        passthrough=section.passthrough,
        where=section.where,
        limit=section.limit,
        max_row_bytes=section.max_row_bytes,
        errors=section.errors,
    )


class JobRunner:
    """Open what a job needs, all but the weights.

    Raises:
        ModelUnavailable: The model or the device cannot be used.
        JobFileError: Prompt, model and budget do not go together.
        InputError: An input file cannot be read.
    """

    def __init__(
        self,
        job: Job,
        corpus: "Corpus",
        progress: Progress,
        stopper: Stopper,
        make_llm: "Callable[[ModelHandle, EngineConfig], LLM]",
    ):
        from kvbatch.model import open_model
        from kvbatch.prompt import PromptBuilder

        self.job, self.corpus = job, corpus
        self.progress, self.stopper, self._make_llm = progress, stopper, make_llm
        corpus.check()
        self.model = open_model(job.model, job.engine)
        self.builder = PromptBuilder(self.model.tokenizer, job.prompt)
        context = self.model.config.max_context
        room = context - self.builder.num_static_tokens - job.generation.max_new_tokens
        if room < 1:
            raise JobFileError(
                f"the prompt takes {self.builder.num_static_tokens:,} tokens before any document and "
                f"generation.max_new_tokens {job.generation.max_new_tokens:,}; the model's context of "
                f"{context:,} leaves no room for a document: shorten one of them"
            )
        self.engine_config, self.budget = _divide_budget(job, self.model, self.builder)
        self.manifest = describe_run(job, corpus.files) | {
            "model": {
                "path": job.model.path,
                "revision": self.model.revision,
                "directory": str(self.model.path),
                "architecture": self.model.config.architecture,
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "weight_quant": job.model.weight_quant,
                "max_context": context,
            },
            "device": self.model.device,
            "prefix_tokens": len(self.builder.prefix_ids),
            "memory_budget_bytes": self.engine_config.memory_budget_bytes,
        }

    def run(self, run: RunDirectory, log: RunLog, started_s: float) -> None:
        """Plan, load and run the job into a run directory; raises as `run_job`."""
        from kvbatch import report
        from kvbatch.shard_loop import ShardLoop
        from kvbatch.stats import write_stats

        plan = self._plan(run)
        log.event(
            "planned",
            rows=plan.num_rows,
            running=plan.num_running,
            outcomes=plan.outcomes,
            bins=len(plan.bins),
        )
        llm = None
        if plan.num_running:
            self.progress.start("loading")
            llm = self._make_llm(self.model, replace(self.engine_config, pool_pages=plan.peak_pages))
            log.event("loaded", weight_bytes=self.model.weight_bytes)
            self.progress.live = lambda: _describe(llm.stats())
        self.progress.start("running", plan.num_rows)
        ShardLoop(self, run, log, llm).run(plan)
        self.progress.end()
        if llm:
            write_stats(llm.monitor, run)
        seconds = self.progress.phase_s | {"wall": time.monotonic() - started_s}
        measures = self._measures(plan, llm, seconds)
        summary = report.summarise(run, measures)
        write_json(run.summary, summary)
        if summary["rows"] and not summary["ok"]:
            raise LimitExceeded(
                f"none of {summary['rows']:,} rows got an answer; {run.path}/deadletter has each with its reason"
            )
        run.succeed()
        log.event("finished", wall_s=seconds["wall"])

    def _plan(self, run: RunDirectory) -> "PlanSummary":
        from kvbatch.plan import Planner

        self.progress.start("planning")
        planner = Planner(self.job, self.builder, self.budget, self.model.config.max_context)
        plan = planner.write(self.corpus.documents(), run.path, self.progress.advance)
        for warning in self.corpus.warnings:
            self.progress.note(f"warning: {warning}")
        names = self.corpus.passthrough_schema.names
        for key in ("template", "system"):
            for name in column_names(getattr(self.job.prompt, key) or ""):
                if plan.num_rows and name not in names:
                    raise JobFileError(
                        f"prompt.{key} uses {{{name}}}, which the input does not have: {', '.join(names)}"
                    )
        planned = {
            "num_rows": plan.num_rows,
            "text_sha256": plan.text_hashes,
            "predicted_kv_peak_bytes": plan.predicted_kv_peak_bytes,
        }
        write_json(run.manifest, self.manifest | {"run_id": run.run_id} | planned)
        return plan

    def _measures(self, plan: "PlanSummary", llm: "LLM | None", seconds: dict[str, float]) -> dict[str, Any]:
        stats = llm.stats() if llm else None
        return {
            "wall_s": seconds["wall"],
            "opening_s": seconds["opening"],
            "planning_s": seconds["planning"],
            "loading_s": seconds.get("loading", 0.0),
            "running_s": seconds["running"],
            "kv_peak_bytes_predicted": plan.predicted_kv_peak_bytes,
            "kv_peak_bytes_measured": stats.kv_peak_bytes if stats else 0,
            "kv_mean_bytes": stats.kv_mean_bytes if stats else 0,
            "kv_pool_bytes": stats.kv_pool_bytes if stats else 0,
            "kv_allocated_bytes": stats.kv_allocated_bytes if stats else 0,
            "memory_budget_bytes": self.engine_config.memory_budget_bytes,
            "packing_efficiency": plan.packing_efficiency,
            "num_bins": len(plan.bins),
            "num_shards": plan.num_shards,
            "device": self.model.device,
            "dtype": self.manifest["model"]["dtype"],
        }


def _divide_budget(job: Job, model: "ModelHandle", builder: "PromptBuilder") -> tuple["EngineConfig", Any]:
    from engine import EngineConfig
    from engine.budget import divide_budget
    from engine.errors import BudgetError
    from engine.memory import resolve_budget

    try:
        config = EngineConfig(
            memory_budget_bytes=resolve_budget(
                job.engine.memory_budget, model.device, reserved_bytes=model.weight_bytes
            ),
            step_tokens=job.engine.step_tokens,
            max_sequences=job.engine.max_sequences,
            cache=job.cache.policy,
            repeat_token_ids=tuple(builder.repeat_ids),
            calibration_token_ids=tuple(builder.calibration_ids),
        )
        return config, divide_budget(model.config, config, model.dtype.itemsize, model.device)
    except BudgetError as error:
        raise JobFileError(f"engine.memory_budget: {error}") from error
    except ValueError as error:  # a policy that does not suit the model
        raise JobFileError(f"cache: {error}") from error


def _describe(stats: "EngineStats") -> str:
    return f"step {stats.num_steps:,}, KV {format_bytes(stats.kv_used_bytes)}"


def _load_llm(model: "ModelHandle", config: "EngineConfig") -> "LLM":
    from engine import LLM
    from engine.detokenizer import Detokenizer

    return LLM(model.load(), config, Detokenizer(model.tokenizer))
