"""One session of a run: guard the quality, plan the rows, load the model, run what is left, write what came of it."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvbatch.errors import InputError, KvbatchError, LimitExceeded, fault, is_fault
from kvbatch.estimate.quality import guard_run
from kvbatch.estimate.step_time import keep_speed
from kvbatch.job_file.sections import CacheSection
from kvbatch.opened_job import OpenedJob
from kvbatch.planning import make_plan
from kvbatch.progress.display import Progress
from kvbatch.report import summary as report
from kvbatch.run.limits import over_limits
from kvbatch.run.repair import check_whole, restore_files, restore_plan
from kvbatch.run.shard_loop import ShardLoop
from kvbatch.run_dir.checked_file import describe_file
from kvbatch.run_dir.directory import PLAN_FILES, RunDirectory
from kvbatch.run_dir.event_log import RunLog
from kvbatch.run_dir.plan_file import PlanSummary
from kvbatch.run_dir.record import write_record
from kvbatch.run_dir.resume import Recovered, recover
from kvbatch.run_dir.stats_files import kept_stats, write_stats
from kvbatch.signals import Stopper
from kvbatch.text import counted, format_bytes

if TYPE_CHECKING:
    from engine import EngineConfig, EngineCore
    from kvbatch.model.handle import ModelHandle
    from kvbatch.plan.memory_plan import MemoryPlan


@dataclass(frozen=True)
class Prepared:
    """What a session runs.

    Args:
        memory: the job's own, or that of the full cache where the quality guard chose it.
        plan: what the plan comes to.
        recovered: what earlier sessions finished.
    """

    memory: "MemoryPlan"
    plan: PlanSummary
    recovered: Recovered


@dataclass(frozen=True)
class RunSession:
    """Prepare and run an opened job.

    Args:
        opened: the job.
        memory: how it divides its memory.
        progress: shows where the session is.
        stopper: holds signals back while a shard is written.
        check_lock: raises where another process may have begun.
        load: makes the engine; the model is loaded into it.
    """

    opened: OpenedJob
    memory: "MemoryPlan"
    progress: Progress
    stopper: Stopper
    check_lock: Callable[[], None]
    load: "Callable[[ModelHandle, EngineConfig], EngineCore]"

    def prepare(self, run: RunDirectory, log: RunLog) -> Prepared:
        """Run the quality guard, if the job has one, and plan the run, or read its plan and what of it is done.

        Raises:
            KvbatchError: The run is refused; as `run_job`.
        """
        restore_files(run, self.opened.job, self.progress.note)
        memory = self._guard(run, log)
        plan, recovered = self._plan(memory, run, log)
        return Prepared(memory, plan, recovered)

    def run(self, run: RunDirectory, log: RunLog, prepared: Prepared, started_s: float) -> None:
        """Load the model and run what is left of a run that was prepared; raises as `run_job`."""
        plan, recovered = prepared.plan, prepared.recovered
        llm: EngineCore | None = None
        files: dict[str, Any] = {}
        if recovered.num_left:
            self.progress.start("loading")
            llm = self.load(self.opened.model, prepared.memory.with_pool(plan.peak_pages))
            log.event("loaded", weight_bytes=self.opened.model.weight_bytes)
            self.progress.live = partial(_describe, llm)
        self.progress.start("running", plan.num_rows)
        if not recovered.is_whole:
            ShardLoop(self, run, log, llm, recovered).run(plan)
        self.progress.end()
        self.check_lock()
        if llm:
            files = write_stats(llm.monitor, run)
            running_s = self.progress.phase_s["running"]
            keep_speed(self.opened, prepared.memory.engine_config, llm.monitor.speed, running_s)
        seconds = self.progress.phase_s | {"wall": time.monotonic() - started_s}
        measures = self._measures(prepared, llm, seconds) | {"continued_rows": recovered.num_finished}
        if not llm:  # nothing was computed; what was measured when it was stays
            measures |= {key: value for key, value in recovered.summary.items() if key in measures}
            files |= kept_stats(run, recovered.summary.get("files", {}), self.progress.note)
        check_whole(run)
        summary = report.summarise(run, measures)
        problem = over_limits(self.opened.job.limits, summary)
        if problem:
            summary["status"], summary["over_limits"] = "over_limits", problem
        write_record(run.summary, {**summary, "files": files})
        self._write_page(run, summary, log)
        if problem:
            where = [f"{run.path}/deadletter has failed rows with their reason"] * any(
                run.deadletter.glob("*")
            )
            remedy = [f"cut {summary['advice']}"] * ("max_cut_ratio" in problem)
            raise LimitExceeded("; ".join([problem, *where, *remedy]))
        run.succeed()
        log.event("finished", wall_s=seconds["wall"])

    def _write_page(self, run: RunDirectory, summary: report.Summary, log: RunLog) -> None:
        """Write the report; a run whose rows are safe does not fail because of it."""
        from kvbatch.report.html.page import write_page

        try:
            write_page(run, {**summary, "page": str(run.page)})
        except BaseException as error:
            if not isinstance(error, KvbatchError) and not is_fault(error):
                raise
            text = f"report.html was not written, {fault(error) if is_fault(error) else error}"
            log.event("warning", message=text)
            self.progress.note(f"warning: {text}; kvbatch report {run.path} writes it again")

    def _guard(self, run: RunDirectory, log: RunLog) -> "MemoryPlan":
        """Compare the compressed cache with the full one on sampled rows, once a run; return the memory to run with.

        Raises:
            LimitExceeded: The cache does not keep a limit, and the job is to fail then.
        """
        job = self.opened.job
        guard = job.quality_guard
        if not guard or not job.cache.policy.compresses:
            return self.memory
        found = run.read_manifest().quality
        if found is None:
            self.progress.start("comparing")
            try:
                verdict = guard_run(self.opened, self.memory, guard, run, self.progress)
            except InputError as error:  # nothing that could have lost anything
                self.progress.note(f"warning: quality_guard: {error}")
                return self.memory
            found = asdict(verdict)
            log.event("compared", **found)
            self.progress.note(f"quality: {verdict}")
            self._keep_quality(run, found, drops_plan=found["problems"] and guard.action == "fallback_full")
        if not found["problems"]:
            return self.memory
        problem = "the compressed cache does not keep quality_guard: " + " and ".join(found["problems"])
        if guard.action == "fail":
            raise LimitExceeded(
                f"{problem}; choose a milder cache (kvbatch tune finds one), other limits, or action: warn"
            )
        if guard.action == "warn":
            self.progress.note(f"warning: {problem}")
            return self.memory
        self.progress.note(f"warning: {problem}; the job runs with the full cache")
        return self.opened.plan_memory(
            cache=CacheSection(preset="none").policy, known_bytes=self.memory.budget_bytes
        )

    def _keep_quality(self, run: RunDirectory, found: dict[str, Any], *, drops_plan: bool) -> None:
        """Write what the guard found into the manifest."""
        manifest = run.read_manifest()
        files = dict(manifest.files)
        if run.quality.exists():
            files["stats/quality.parquet"] = describe_file(run.quality)
        if drops_plan:  # one made beforehand is of the compressed cache
            files = {name: facts for name, facts in files.items() if name not in PLAN_FILES}
            manifest = replace(manifest, plan=None)
        run.write_manifest(replace(manifest, files=files, quality=found))

    def _plan(self, memory: "MemoryPlan", run: RunDirectory, log: RunLog) -> tuple[PlanSummary, Recovered]:
        """Plan the run, or read the plan it has and what was finished by it."""
        self.progress.start("planning")
        planned = run.read_manifest().plan
        if planned is None:
            plan = make_plan(self.opened, memory, run, self.progress)
            log.event(
                "planned",
                rows=plan.num_rows,
                running=plan.num_running,
                reused=plan.num_reused,
                outcomes=plan.outcomes,
                bins=plan.num_bins,
            )
            return plan, recover(run)
        restore_plan(self.opened, memory, run, self.progress)
        plan, recovered = planned, recover(run)
        log.event("continued", finished=recovered.num_finished, left=recovered.num_left)
        if recovered.num_finished:
            counts = f"{recovered.num_finished:,} of {plan.num_running:,} rows are finished"
            self.progress.note(f"continuing {run.path}: {counts}")
        else:
            self.progress.note(f"{run.path} has a plan already: {counted(plan.num_running, 'row')} to run")
        if not recovered.is_whole:
            for _ in self.opened.corpus.documents():  # the output's types are known after a whole pass
                pass
        return plan, recovered

    def _measures(
        self, prepared: Prepared, llm: "EngineCore | None", seconds: dict[str, float]
    ) -> dict[str, Any]:
        from engine.memory import peak_resident_bytes

        plan, memory = prepared.plan, prepared.memory
        stats = llm.stats() if llm else None
        pool_bytes = stats.kv_pool_bytes if stats else 0
        return {
            "wall_s": seconds["wall"],
            "opening_s": seconds["opening"],
            "planning_s": seconds["planning"],
            "calibrating_s": seconds.get("calibrating", 0.0),
            "comparing_s": seconds.get("comparing", 0.0),
            "loading_s": seconds.get("loading", 0.0),
            "running_s": seconds["running"],
            "session_computed_prompt_tokens": stats.computed_prompt_tokens if stats else 0,
            "session_completion_tokens": stats.completion_tokens if stats else 0,
            "drafted_tokens": stats.drafted_tokens if stats else 0,
            "accepted_tokens": stats.accepted_tokens if stats else 0,
            "kv_peak_bytes_predicted": plan.predicted_kv_peak_bytes,
            "kv_peak_bytes_measured": stats.kv_peak_bytes if stats else 0,
            "kv_mean_bytes": stats.kv_mean_bytes if stats else 0,
            "kv_pool_bytes": pool_bytes,
            "kv_allocated_bytes": stats.kv_allocated_bytes if stats else 0,
            "memory_budget_bytes": memory.budget_bytes,
            "process_predicted_bytes": sum(memory.process_bytes(pool_bytes).values()) if stats else 0,
            "weight_bytes": memory.weight_bytes if stats else 0,
            "process_peak_bytes": peak_resident_bytes() if stats else 0,
            "packing_efficiency": plan.packing_efficiency,
            "num_bins": plan.num_bins,
            "num_shards": plan.num_shards,
            "device": self.opened.model.device,
            "dtype": self.opened.model.precision.dtype,
        }


def _describe(llm: "EngineCore", seconds: float) -> str:
    """Say what an engine has done in so many seconds."""
    stats = llm.stats()
    tokens = stats.computed_prompt_tokens + stats.completion_tokens
    return (
        f"{tokens / seconds:,.0f} tokens/s, step {stats.num_steps:,}, "
        f"KV {format_bytes(stats.kv_peak_bytes)} at most"
    )
