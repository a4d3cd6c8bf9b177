"""One opened job: its model, prompts, memory and rows, and what is done with them.

Owns no lock and no choice of the run: `kvbatch.run.entry` does.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

from kvbatch.corpus.skipped import by_reason
from kvbatch.errors import (
    InputError,
    JobChanged,
    KvbatchError,
    LimitExceeded,
    ModelUnavailable,
    fault,
    is_fault,
)
from kvbatch.job_file.environment import hiding, without_credentials
from kvbatch.job_file.sections import Job
from kvbatch.plan.feasibility import check_prompt_columns, check_room, plan_memory
from kvbatch.progress.display import Progress
from kvbatch.prompts.chat_template import now
from kvbatch.run.limits import over_limits
from kvbatch.run_dir.advice import run_command, superseded_by
from kvbatch.run_dir.checked_file import describe_file
from kvbatch.run_dir.event_log import RunLog
from kvbatch.run_dir.fingerprint import RENDERED, Fingerprint, changes, hash_files, job_fingerprint
from kvbatch.run_dir.manifest import (
    PLAN_FILES,
    RunDirectory,
    describe_run,
    input_changes,
    kept_memory_budget,
    plan_directory,
    prompt_time,
)
from kvbatch.run_dir.record import write_record
from kvbatch.run_dir.reuse import Reuse, check_model, precision_to_keep, reused_by_default, time_of_last
from kvbatch.signals import Stopper
from kvbatch.text import counted, digest, format_bytes

if TYPE_CHECKING:
    from engine import LLM, EngineConfig, EngineStats
    from engine.budget import Budget
    from kvbatch.corpus import Corpus, InputSpec
    from kvbatch.model.handle import ModelHandle
    from kvbatch.model.precision import KeptPrecision
    from kvbatch.prompts.builder import PromptBuilder
    from kvbatch.prompts.chat import ChatPromptBuilder
    from kvbatch.run_dir.plan_file import PlanSummary
    from kvbatch.run_dir.recovery import Recovered


class JobRunner:
    """Open what a job needs, all but the weights; `divide_budget` completes it.

    Args:
        earlier: the run that may be continued; what was found when it began holds on.
        kept: precision of the run whose rows stand beside this one's.

    Raises:
        ModelUnavailable: The model or the device cannot be used.
        JobFileError: Prompt and model do not go together.
        InputError: An input file cannot be read.
    """

    engine_config: "EngineConfig"
    budget: "Budget"
    check_lock: Callable[[], None] = staticmethod(lambda: None)  # raises where another process may have begun
    builder: "PromptBuilder | ChatPromptBuilder"
    fingerprint: Fingerprint
    manifest: dict[str, Any]

    def __init__(
        self,
        job: Job,
        corpus: "Corpus",
        progress: Progress,
        stopper: Stopper,
        make_llm: "Callable[[ModelHandle, EngineConfig], LLM]",
        earlier: RunDirectory | None = None,
        kept: "KeptPrecision | None" = None,
    ):
        with stopper.shield():  # a library that was half imported does not always end well
            import torch  # noqa: F401

            from kvbatch.model.handle import open_model
            from kvbatch.prompts.chat import chat_template
            from kvbatch.prompts.notes import prompt_notes
            from kvbatch.prompts.sampling import RowSampling
            from kvbatch.prompts.structured_output import answer_form
            from kvbatch.prompts.tokenizer import PieceTokenizer

        self.job, self.corpus = job, corpus
        self.progress, self.stopper, self._make_llm = progress, stopper, make_llm
        self.earlier = earlier
        corpus.check()
        self.model = open_model(job.model, job.engine, kept=kept)
        for note in self.model.notes:
            progress.note(f"warning: model {job.model.name}: {note}")
        tokenizer = self.model.tokenizer
        self.sampling = RowSampling(job.generation, tokenizer)
        self.answers = answer_form(job.generation, self.model)
        self._chat = chat_template(tokenizer, job)
        self._tokens = PieceTokenizer(tokenizer)
        self._described = describe_run(job, corpus.files) | {"skipped": by_reason(corpus.skipped)}
        self._input_hashes: dict[str, str] | None = None
        self._render_at((earlier and prompt_time(earlier.read_manifest())) or now())
        check_room(job, self.builder, self.model.config.max_context)
        for note in prompt_notes(job, self._chat):
            progress.note(f"note: {note}")

    def _render_at(self, time: datetime) -> None:
        """Make the prompts of a run whose time this is, and say what it depends on."""
        import torch

        from kvbatch.prompts.chat import prompt_builder

        job, described = self.job, self._described
        self._chat = self._chat and self._chat.at(time)
        self.builder = prompt_builder(self.model.tokenizer, job, self._chat, self._tokens)
        dtype = str(self.model.dtype).removeprefix("torch.")
        rendered = {RENDERED: self._chat.digest} if self._chat else {}
        self.fingerprint = job_fingerprint(job).with_found(
            semantic={
                "kvbatch": described["kvbatch"],
                "model content": self.model.revision,
                "model dtype": dtype,
                "tokenizer": self.model.tokenizer_hash,
                **rendered,
            },
            machine={
                "device": self.model.device,
                "threads": torch.get_num_threads(),
                "versions": described["versions"],
            },
        )
        self.manifest = described | {
            "prompt_time": time.isoformat(),
            "model": {
                "path": without_credentials(job.model.name),
                "revision": self.model.revision,
                "directory": str(self.model.path),
                "architecture": self.model.config.architecture,
                "dtype": dtype,
                "weight_quant": job.model.weight_quant,
                "max_context": self.model.config.max_context,
                "notes": list(self.model.notes),
            },
            "device": self.model.device,
            "precision": asdict(self.model.precision),
            "threads": asdict(self.model.threads),
            "prefix_tokens": len(self.builder.prefix_ids),
            "semantic": self.fingerprint.semantic,
            "semantic_hash": digest(self.fingerprint.semantic),
            "operational": self.fingerprint.operational,
            "operational_hash": digest(self.fingerprint.operational),
            "reuse": Reuse().to_dict(),
        }

    def may_continue(self, run: RunDirectory, *, insists: bool) -> bool:
        """Tell whether a run can be continued as this job.

        Args:
            insists: on this run; else one that ended, or holds no finished row, is left for a new one.

        Raises:
            JobChanged: It holds finished rows, and what decides the output is not what it was.
            InputError: An input file or the run cannot be read.
        """
        from kvbatch.run_dir.commit import has_finished_rows
        from kvbatch.run_dir.previous_rows import can_be_reused

        found = run.read_manifest()
        if "semantic" not in found:
            if insists:
                raise InputError(f"{run.path} is of a kvbatch that could not continue runs; run the job anew")
            return False
        self._input_hashes = hash_files(self.corpus.files, found["input_files"], found["input_sha256"])
        changed_keys = changes(found["semantic"], self.fingerprint.semantic)
        lines = changed_keys + input_changes(found, self._input_hashes)
        # a new run reuses what this one finished
        builds_upon = not insists and self.job.input.incremental
        if not lines:
            return not builds_upon or can_be_reused(run)
        if builds_upon and not changed_keys:
            return False
        if not insists and (run.end or not has_finished_rows(run)):
            return False
        remedy = "kvbatch run --new-run starts afresh"
        if self.job.input.incremental and not changed_keys:
            remedy = f"{run_command(found)} takes over in a new run what this one finished"
        later = superseded_by(run, found)
        raise JobChanged(
            f"{run.path} {f'was superseded by run {later} and ' if later else ''}cannot be continued, since what "
            "decides its output changed:",
            *(f"  {line}" for line in lines),
            f"({remedy})",
        )

    def choose_rows(self, reuse: Reuse | None, new_run: bool) -> None:
        """Choose what a new run reuses, and with it the time that its prompts were rendered at.

        A template that writes the date would otherwise have every row done again each day, or rows of two days beside
        each other.

        Raises:
            JobChanged: The model is not that of the run whose rows shall stand beside it.
            InputError: The manifest of that run cannot be read.
        """
        time = now()
        if reuse is None and self.job.input.incremental and not new_run:
            self._render_at(time_of_last(self.job, self.fingerprint.semantic) or time)
            reuse = reused_by_default(self.job, self.fingerprint.semantic)
            if reuse is None:
                self._render_at(time)
        elif reuse:
            check_model(reuse, self.fingerprint.semantic)
            self._render_at(prompt_time(reuse.directories[0].read_manifest()) or time)
        elif self.earlier:
            self._render_at(time)
        if reuse and self._chat and self._chat.shows_time and self._chat.at(time).digest != self._chat.digest:
            self.progress.note(
                f"note: the chat template writes the time, which stays that of {self._chat.time:%Y-%m-%d}, when the "
                "rows that are reused were done; kvbatch run --new-run takes today's, and does all rows"
            )
        self.manifest["reuse"] = (reuse or Reuse()).to_dict()

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
        if found.get("memory_budget") == kept_memory_budget(self.job):
            known_bytes = found.get("memory_budget_bytes")
        self.engine_config, self.budget = plan_memory(self.job, self.model, self.builder, known_bytes)
        self.manifest["memory_budget_bytes"] = self.engine_config.memory_budget_bytes
        self.manifest["input_sha256"] = self._input_hashes or hash_files(self.corpus.files)

    def find_plan(self) -> RunDirectory | None:
        """Return what `kvbatch plan` left for this very job, its input and what it reuses, if it left that."""
        planned = plan_directory(self.job)
        try:
            found = planned.read_manifest()
            for name in PLAN_FILES:
                planned.check_file(planned.path / name)
        except InputError:  # there is none, or none that can be used
            return None
        fits = {"plan", "files"} <= found.keys() and found.get("operational") == self.fingerprint.operational
        fits = fits and Reuse.of(planned) == Reuse(**self.manifest["reuse"])
        return planned if fits and self.may_continue(planned, insists=False) else None

    def prepare(self, run: RunDirectory, log: RunLog) -> tuple["PlanSummary", "Recovered"]:
        """Judge the cache, as far as the job wants it, and plan a run, or find out what of it is done already.

        Raises:
            KvbatchError: The run is refused; as `run_job`.
        """
        from kvbatch.run.repair import restore_files

        restore_files(self, run)
        self._guard(run, log)
        return self._plan(run, log)

    def run(
        self, run: RunDirectory, log: RunLog, plan: "PlanSummary", recovered: "Recovered", started_s: float
    ) -> None:
        """Load the model and run what is left of a run that was prepared; raises as `run_job`."""
        from kvbatch.estimate.step_time import keep_speed
        from kvbatch.report import summary as report
        from kvbatch.run.repair import check_whole
        from kvbatch.run.shard_loop import ShardLoop
        from kvbatch.run_dir.stats_files import kept_stats, write_stats

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
        self.check_lock()
        if llm:
            files = write_stats(llm.monitor, run)
            keep_speed(self, llm.monitor.speed, self.progress.phase_s["running"])
        seconds = self.progress.phase_s | {"wall": time.monotonic() - started_s}
        measures = self._measures(plan, llm, seconds) | {"continued_rows": recovered.num_finished}
        if not llm:  # nothing was computed; what was measured when it was stays
            measures |= {key: value for key, value in recovered.summary.items() if key in measures}
            files = kept_stats(run, recovered.summary.get("files", {}), self.progress.note)
        check_whole(run)
        summary = report.summarise(run, measures)
        problem = over_limits(self.job.limits, summary)
        if problem:
            summary |= {"status": "over_limits", "over_limits": problem}
        write_record(run.summary, summary | {"files": files})
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
        from kvbatch.report.html import write_page

        try:
            write_page(run, summary | {"page": str(run.page)})
        except BaseException as error:
            if not isinstance(error, KvbatchError) and not is_fault(error):
                raise
            text = f"report.html was not written, {fault(error) if is_fault(error) else error}"
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
            from kvbatch.estimate.quality import guard_run

            self.progress.start("judging")
            try:
                verdict = guard_run(self, run)
            except InputError as error:  # nothing that could have lost anything
                self.progress.note(f"warning: quality_guard: {error}")
                return
            found = asdict(verdict)
            log.event("judged", **found)
            self.progress.note(f"quality: {verdict}")
            manifest = run.read_manifest()
            if run.quality.exists():
                described = {"stats/quality.parquet": describe_file(run.quality)}
                manifest["files"] = manifest.get("files", {}) | described
            manifest["quality"] = found
            if found["problems"] and guard.action == "fallback_full":
                manifest.pop("plan", None)  # one made beforehand is of the compressed cache
                for name in PLAN_FILES:
                    manifest.get("files", {}).pop(name, None)
            run.write_manifest(manifest)
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
            if self.job.cache.policy.quantizes:
                self.model.decoder.rotate_heads()
            problem += "; the job runs with the full cache"
            full = self.job.cache.model_validate({"preset": "none"})
            self.job = self.job.model_copy(update={"cache": full})
            self.divide_budget(run)
        self.progress.note(f"warning: {problem}")

    def _plan(self, run: RunDirectory, log: RunLog) -> tuple["PlanSummary", "Recovered"]:
        """Plan the run, or read the plan it has and what was finished by it."""
        from kvbatch.run.repair import restore_plan
        from kvbatch.run_dir.plan_file import PlanSummary
        from kvbatch.run_dir.recovery import recover

        self.progress.start("planning")
        manifest = run.read_manifest()
        if "plan" not in manifest:
            plan = self.make_plan(run)
            log.event(
                "planned",
                rows=plan.num_rows,
                running=plan.num_running,
                reused=plan.num_reused,
                outcomes=plan.outcomes,
                bins=plan.num_bins,
            )
            return plan, recover(run)
        restore_plan(self, run)
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
        """Plan the corpus into a directory, and keep the plan in its manifest.

        Args:
            known_tokens: see `Planner`.

        Raises:
            JobFileError: The prompt uses a column that the input does not have.
            InputError: An input file cannot be read.
            OutputError: The directory cannot be written.
        """
        plan, files = self.write_plan(run, known_tokens)
        before = run.read_manifest()
        planned = {
            "plan": asdict(plan),
            "num_rows": plan.num_rows,
            "left_out": self.corpus.num_left_out,
            "text_sha256": plan.text_hashes,
            "predicted_kv_peak_bytes": plan.predicted_kv_peak_bytes,
            "reuse": before["reuse"],
            "files": before.get("files", {}) | files,
        }
        kept = {key: before[key] for key in ("run_id", "number") if key in before}
        run.write_manifest(self.manifest | kept | planned)
        return plan

    def write_plan(
        self, run: RunDirectory, known_tokens: Mapping[str, int] | None = None
    ) -> tuple["PlanSummary", dict[str, Any]]:
        """Write the plan's files; return what they come to, and what describes them; raises as `make_plan`."""
        from kvbatch.plan.planner import Planner
        from kvbatch.run_dir.previous_rows import PreviousRows

        reuse = Reuse.of(run)
        earlier = PreviousRows(reuse) if reuse.runs else None
        context = self.model.config.max_context
        planner = Planner(self.job, self.builder, self.budget, context, earlier, known_tokens)
        plan = planner.write(self.corpus.documents(), run.path, self.progress.advance)
        for warning in self.corpus.warnings:
            self.progress.note(f"warning: {warning}")
        if plan.num_rows:
            check_prompt_columns(self.job, self.corpus.passthrough_schema.names)
        return plan, planner.files

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


@contextmanager
def opened_job(
    job: Job, *, stream: TextIO | None = None, stopper: Stopper | None = None
) -> "Iterator[JobRunner]":
    """Open a job to look into it, without a run; raises as `run_job`."""
    from kvbatch.corpus import Corpus

    with hiding(job), make_progress(job, stream) as progress:
        progress.start("opening")
        kept = precision_to_keep(job, None, None, new_run=False)
        corpus = Corpus(input_spec(job))
        runner = JobRunner(job, corpus, progress, stopper or Stopper(), load_llm, kept=kept)
        runner.engine_config, runner.budget = plan_memory(job, runner.model, runner.builder)
        yield runner


def make_progress(job: Job, stream: TextIO | None) -> Progress:
    return Progress(stream, hide=job.environment.hide)


def input_spec(job: Job) -> "InputSpec":
    """Return the job's input section as the corpus takes it."""
    return job.input.spec()


def load_llm(model: "ModelHandle", config: "EngineConfig") -> "LLM":
    from engine import LLM
    from engine.detokenizer import Detokenizer
    from engine.errors import EngineError
    from engine.memory import is_out_of_memory

    decoder = model.decoder
    try:
        return LLM(decoder, config, Detokenizer(model.tokenizer))
    except EngineError as error:
        raise ModelUnavailable(f"model {model.section.name}: {error}") from error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelUnavailable(
            f"the memory for keys and values cannot be had on {model.device} ({error}); give "
            "engine.memory_budget less"
        ) from error
