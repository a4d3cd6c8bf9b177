"""One opened job: its model, prompts, memory and rows, and what is done with them.

Owns no lock and no choice of the run: `kvbatch.run` does.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kvbatch.advice import run_command, superseded_by
from kvbatch.carry import Carry, carried_by_default, check_model
from kvbatch.errors import InputError, JobChanged, LimitExceeded
from kvbatch.fingerprint import changes, digest, hash_files, job_fingerprint
from kvbatch.fitting import check_prompt_columns, check_room, plan_memory
from kvbatch.job import Job
from kvbatch.limits import over_limits
from kvbatch.manifest import (
    RunDirectory,
    describe_run,
    input_changes,
    plan_directory,
)
from kvbatch.progress import Progress, counted, format_bytes
from kvbatch.runlog import RunLog
from kvbatch.stop import Stopper
from kvbatch.writer import write_json

if TYPE_CHECKING:
    from engine import LLM, EngineConfig, EngineStats
    from engine.budget import Budget
    from kvbatch.corpus import Corpus
    from kvbatch.model import ModelHandle
    from kvbatch.plan import PlanSummary
    from kvbatch.recovery import Recovered


class JobRunner:
    """Open what a job needs, all but the weights; `divide_budget` completes it.

    Args:
        earlier: the run that may be continued; what was found when it began holds on.

    Raises:
        ModelUnavailable: The model or the device cannot be used.
        JobFileError: Prompt and model do not go together.
        InputError: An input file cannot be read.
    """

    engine_config: "EngineConfig"
    budget: "Budget"

    def __init__(
        self,
        job: Job,
        corpus: "Corpus",
        progress: Progress,
        stopper: Stopper,
        make_llm: "Callable[[ModelHandle, EngineConfig], LLM]",
        earlier: RunDirectory | None = None,
    ):
        import torch

        from kvbatch.answers import answer_form
        from kvbatch.chat_prompt import prompt_builder
        from kvbatch.model import open_model

        self.job, self.corpus = job, corpus
        self.progress, self.stopper, self._make_llm = progress, stopper, make_llm
        self.earlier = earlier
        corpus.check()
        self.model = open_model(job.model, job.engine)
        self.builder = prompt_builder(self.model.tokenizer, job)
        context = self.model.config.max_context
        self.answers = answer_form(job.generation, self.model)
        check_room(job, self.builder, context)
        dtype = str(self.model.dtype).removeprefix("torch.")
        described = describe_run(job, corpus.files)
        self.fingerprint = job_fingerprint(job).with_found(
            semantic={
                "kvbatch": described["kvbatch"],
                "model content": self.model.revision,
                "model dtype": dtype,
                "tokenizer": self.model.tokenizer_hash,
            },
            machine={
                "device": self.model.device,
                "threads": torch.get_num_threads(),
                "versions": described["versions"],
            },
        )
        self._input_hashes: dict[str, str] | None = None
        self.manifest = described | {
            "model": {
                "path": job.model.path,
                "revision": self.model.revision,
                "directory": str(self.model.path),
                "architecture": self.model.config.architecture,
                "dtype": dtype,
                "weight_quant": job.model.weight_quant,
                "max_context": context,
            },
            "device": self.model.device,
            "prefix_tokens": len(self.builder.prefix_ids),
            "semantic": self.fingerprint.semantic,
            "semantic_hash": digest(self.fingerprint.semantic),
            "operational": self.fingerprint.operational,
            "operational_hash": digest(self.fingerprint.operational),
            "carry": Carry().to_dict(),
        }

    def may_continue(self, run: RunDirectory, *, insists: bool) -> bool:
        """Tell whether a run can be continued as this job.

        Args:
            insists: on this run; else one that ended, or holds no finished row, is left for a new one.

        Raises:
            JobChanged: It holds finished rows, and what decides the output is not what it was.
            InputError: An input file or the run cannot be read.
        """
        from kvbatch.commit import finished_rows

        found = run.read_manifest()
        if "semantic" not in found:
            if insists:
                raise InputError(f"{run.path} is of a kvbatch that could not continue runs; run the job anew")
            return False
        self._input_hashes = hash_files(self.corpus.files, found["input_files"], found["input_sha256"])
        changed_keys = changes(found["semantic"], self.fingerprint.semantic)
        lines = changed_keys + input_changes(found, self._input_hashes)
        if not lines:
            return True
        if not insists and (run.end or next(finished_rows(run), None) is None):
            return False
        if not insists and self.job.input.incremental and not changed_keys:
            return False  # a new run carries over what this one finished
        remedy = "kvbatch run --new-run starts afresh"
        if self.job.input.incremental and not changed_keys:
            remedy = f"{run_command(found)} takes over in a new run what this one finished"
        later = superseded_by(run, found)
        raise JobChanged(
            f"{run.path} {f'was superseded by run {later} and ' if later else ''}cannot be continued, since what "
            "decides its output changed:\n  " + "\n  ".join(lines) + f"\n({remedy})"
        )

    def choose_rows(self, carry: Carry | None, new_run: bool) -> None:
        """Choose what a new run carries over.

        Raises:
            JobChanged: The model is not that of the run whose rows shall stand beside it.
        """
        if carry is None and self.job.input.incremental and not new_run:
            carry = carried_by_default(self.job, self.fingerprint.semantic)
        elif carry:
            check_model(carry, self.fingerprint.semantic)
        self.manifest["carry"] = (carry or Carry()).to_dict()

    def divide_budget(self, earlier: RunDirectory | None) -> None:
        """Divide the memory, as the run that is continued did: its plan stands.

        Raises:
            JobFileError: Model and budget do not go together.
        """
        found = earlier.read_manifest() if earlier else {}
        if "plan" in found:
            shard_rows = found["operational"]["output.shard_rows"]
            output = self.job.output.model_copy(update={"shard_rows": shard_rows})
            self.job = self.job.model_copy(update={"output": output})
        known_bytes = None
        if found.get("memory_budget") == self.job.engine.memory_budget:
            known_bytes = found.get("memory_budget_bytes")
        self.engine_config, self.budget = plan_memory(self.job, self.model, self.builder, known_bytes)
        self.manifest["memory_budget_bytes"] = self.engine_config.memory_budget_bytes
        self.manifest["input_sha256"] = self._input_hashes or hash_files(self.corpus.files)

    def find_plan(self) -> RunDirectory | None:
        """Return what `kvbatch plan` left for this very job, its input and what it carries over, if it left that."""
        planned = plan_directory(self.job)
        if not planned.manifest.exists():
            return None
        found = planned.read_manifest()
        fits = "plan" in found and found.get("operational") == self.fingerprint.operational
        fits = fits and Carry.of(planned) == Carry(**self.manifest["carry"])
        return planned if fits and self.may_continue(planned, insists=False) else None

    def prepare(self, run: RunDirectory, log: RunLog) -> tuple["PlanSummary", "Recovered"]:
        """Judge the cache, as far as the job wants it, and plan a run, or find out what of it is done already.

        Raises:
            KvbatchError: The run is refused; as `run_job`.
        """
        self._guard(run, log)
        return self._plan(run, log)

    def run(
        self, run: RunDirectory, log: RunLog, plan: "PlanSummary", recovered: "Recovered", started_s: float
    ) -> None:
        """Load the model and run what is left of a run that was prepared; raises as `run_job`."""
        from kvbatch import report
        from kvbatch.shard_loop import ShardLoop
        from kvbatch.speed import keep_speed
        from kvbatch.stats import write_stats

        llm = None
        if recovered.num_left:
            self.progress.start("loading")
            llm = self._make_llm(self.model, replace(self.engine_config, pool_pages=plan.peak_pages))
            log.event("loaded", weight_bytes=self.model.weight_bytes)
            self.progress.live = lambda seconds: _describe(llm.stats(), seconds)
        self.progress.start("running", plan.num_rows)
        if not recovered.is_whole:
            ShardLoop(self, run, log, llm, recovered).run(plan)
        self.progress.end()
        if llm:
            write_stats(llm.monitor, run)
            keep_speed(self, llm.monitor.speed, self.progress.phase_s["running"])
        seconds = self.progress.phase_s | {"wall": time.monotonic() - started_s}
        measures = self._measures(plan, llm, seconds) | {"continued_rows": recovered.num_finished}
        if recovered.is_whole:  # nothing was done; what was measured when it was stays
            measures |= {key: value for key, value in run.read_summary().items() if key in measures}
        summary = report.summarise(run, measures)
        problem = over_limits(self.job.limits, summary)
        if problem:
            summary |= {"status": "over_limits", "over_limits": problem}
        write_json(run.summary, summary)
        self._write_page(run, summary, log)
        if problem:
            where = [f"{run.path}/deadletter has failed rows with their reason"] * any(
                run.deadletter.glob("*")
            )
            remedy = [f"cut {summary['advice']}"] * ("max_cut_ratio" in problem)
            raise LimitExceeded("; ".join([problem, *where, *remedy]))
        run.succeed()
        log.event("finished", wall_s=seconds["wall"])

    def _write_page(self, run: RunDirectory, summary: dict[str, Any], log: RunLog) -> None:
        """Write the report; a run whose rows are safe does not fail because of it."""
        from kvbatch.page import write_page

        try:
            write_page(run, summary | {"page": str(run.page)})
        except Exception as error:
            text = f"report.html was not written, {type(error).__name__}: {error}"
            log.event("warning", message=text)
            self.progress.note(f"warning: {text}; kvbatch report {run.path} writes it again")

    def _guard(self, run: RunDirectory, log: RunLog) -> None:
        """Compare the compressed cache with the full one on sampled rows, once a run, and do what the job says.

        Raises:
            LimitExceeded: It does not keep a limit, and the job is to fail then.
        """
        guard = self.job.quality_guard
        if not guard or not self.job.cache.policy.compresses:
            return
        found = run.read_manifest().get("quality")
        if found is None:
            from kvbatch.quality import guard_run

            self.progress.start("judging")
            try:
                verdict = guard_run(self, run)
            except InputError as error:  # nothing that could have lost anything
                self.progress.note(f"warning: quality_guard: {error}")
                return
            found = asdict(verdict)
            log.event("judged", **found)
            self.progress.note(f"quality: {verdict}")
            manifest = run.read_manifest() | {"quality": found}
            if found["problems"] and guard.action == "fallback_full":
                manifest.pop("plan", None)  # one made beforehand is of the compressed cache
            write_json(run.manifest, manifest)
        self.manifest["quality"] = found
        if not found["problems"]:
            return
        problem = "the compressed cache does not keep quality_guard: " + " and ".join(found["problems"])
        if guard.action == "fail":
            raise LimitExceeded(
                f"{problem}; choose a milder cache (kvbatch tune finds one), other limits, or action: warn"
            )
        if guard.action == "fallback_full":
            # as the session left it that judged: its engine turned the heads
            if self.job.cache.policy.quantises:
                self.model.decoder.rotate_heads()
            problem += "; the job runs with the full cache"
            full = self.job.cache.model_validate({"preset": "none"})
            self.job = self.job.model_copy(update={"cache": full})
            self.divide_budget(run)
        self.progress.note(f"warning: {problem}")

    def _plan(self, run: RunDirectory, log: RunLog) -> tuple["PlanSummary", "Recovered"]:
        """Plan the run, or read the plan it has and what was finished by it."""
        from kvbatch.plan import PlanSummary
        from kvbatch.recovery import recover

        self.progress.start("planning")
        manifest = run.read_manifest()
        if "plan" not in manifest:
            plan = self.make_plan(run)
            log.event(
                "planned",
                rows=plan.num_rows,
                running=plan.num_running,
                carried=plan.num_carried,
                outcomes=plan.outcomes,
                bins=plan.num_bins,
            )
            return plan, recover(run)
        plan, recovered = PlanSummary(**manifest["plan"]), recover(run)
        log.event("continued", finished=recovered.num_finished, left=recovered.num_left)
        if recovered.num_finished:
            counts = f"{recovered.num_finished:,} of {plan.num_running:,} rows are finished"
            self.progress.note(f"continuing {run.path}: {counts}")
        else:
            self.progress.note(f"{run.path} has a plan already: {counted(plan.num_running, 'row')} to run")
        if not recovered.is_whole:
            for _ in self.corpus.documents():  # the output's types are known after a whole pass
                pass
        return plan, recovered

    def make_plan(self, run: RunDirectory, known_tokens: Mapping[str, int] | None = None) -> "PlanSummary":
        """Plan the corpus into a directory.

        Args:
            known_tokens: see `Planner`.

        Raises:
            JobFileError: The prompt uses a column that the input does not have.
            InputError: An input file cannot be read.
            OutputError: The directory cannot be written.
        """
        from kvbatch.earlier_rows import EarlierRows
        from kvbatch.plan import Planner

        carry = Carry.of(run)
        earlier = EarlierRows(carry) if carry.runs else None
        context = self.model.config.max_context
        planner = Planner(self.job, self.builder, self.budget, context, earlier, known_tokens)
        plan = planner.write(self.corpus.documents(), run.path, self.progress.advance)
        for warning in self.corpus.warnings:
            self.progress.note(f"warning: {warning}")
        if plan.num_rows:
            check_prompt_columns(self.job, self.corpus.passthrough_schema.names)
        planned = {
            "plan": asdict(plan),
            "num_rows": plan.num_rows,
            "text_sha256": plan.text_hashes,
            "predicted_kv_peak_bytes": plan.predicted_kv_peak_bytes,
            "carry": carry.to_dict(),
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
            "session_computed_prompt_tokens": stats.computed_prompt_tokens if stats else 0,
            "session_completion_tokens": stats.completion_tokens if stats else 0,
            "drafted_tokens": stats.drafted_tokens if stats else 0,
            "accepted_tokens": stats.accepted_tokens if stats else 0,
            "kv_peak_bytes_predicted": plan.predicted_kv_peak_bytes,
            "kv_peak_bytes_measured": stats.kv_peak_bytes if stats else 0,
            "kv_mean_bytes": stats.kv_mean_bytes if stats else 0,
            "kv_pool_bytes": stats.kv_pool_bytes if stats else 0,
            "kv_allocated_bytes": stats.kv_allocated_bytes if stats else 0,
            "memory_budget_bytes": self.engine_config.memory_budget_bytes,
            "packing_efficiency": plan.packing_efficiency,
            "num_bins": plan.num_bins,
            "num_shards": plan.num_shards,
            "device": self.model.device,
            "dtype": self.manifest["model"]["dtype"],
        }


def _describe(stats: "EngineStats", seconds: float) -> str:
    """Say what an engine has done in so many seconds."""
    tokens = stats.computed_prompt_tokens + stats.completion_tokens
    return (
        f"{tokens / seconds:,.0f} tokens/s, step {stats.num_steps:,}, "
        f"KV {format_bytes(stats.kv_peak_bytes)} at most"
    )
