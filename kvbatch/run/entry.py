"""A job from its files to its summary: open, plan, load, run.

The corpus is read twice. The first pass plans every row; the second, window by window, submits rows in the
plan's order and writes a shard as soon as all its rows are done. Only windows with unfinished rows are held.
A run that was interrupted is continued: its plan stands, and the rows that it finished are not run again.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvbatch.corpus import Corpus
from kvbatch.errors import KvbatchError, ModelUnavailable, fault, is_fault
from kvbatch.estimate.calibration import calibrated
from kvbatch.job_file.environment import hiding
from kvbatch.job_file.sections import Job
from kvbatch.opened_job import OpenedJob, choose_rows, make_progress, open_job
from kvbatch.progress.display import Progress
from kvbatch.run_dir.describe import adopt_plan, describe_directory
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.event_log import RunLog, write_heartbeat
from kvbatch.run_dir.find_runs import (
    find_same_run,
    find_unfinished_run,
    new_run_id,
    next_number,
    point_latest,
)
from kvbatch.run_dir.lock import HeldLock, IfLocked, job_lock
from kvbatch.run_dir.resume import can_continue, find_plan, kept_budget_bytes, kept_shard_rows
from kvbatch.run_dir.reuse import Reuse, find_run_of_same_rows, run_to_keep
from kvbatch.run_dir.staging import clear_drafts, drafted, publish
from kvbatch.run_dir.verify import find_problems
from kvbatch.signals import Stopper

if TYPE_CHECKING:
    from engine import EngineConfig, EngineCore
    from kvbatch.model.handle import ModelHandle
    from kvbatch.run.session import RunSession


@dataclass(frozen=True)
class RunOutcome:
    """Say which run holds the job's output, and whether it was made now."""

    run: RunDirectory
    is_new: bool


@dataclass(frozen=True)
class Caller:
    """How a job was started.

    Args:
        if_locked: what to do while another process runs the job; fail by default.
        stopper: holds signals back while a shard is written.
        on_run: called with the run directory once there is one.
        origin: what a new run's manifest says of the command that began it.
    """

    if_locked: IfLocked = field(default_factory=IfLocked)
    stopper: Stopper | None = None
    on_run: Callable[[RunDirectory], None] = lambda run: None
    origin: Mapping[str, Any] = field(default_factory=dict)


def run_job(
    job: Job,
    *,
    new_run: bool = False,
    resume: RunDirectory | None = None,
    reuse: Reuse | None = None,
    caller: Caller | None = None,
    stream: TextIO | None = None,
    make_llm: "Callable[[ModelHandle, EngineConfig], EngineCore] | None" = None,
) -> RunOutcome:
    """Run a job: go on with its latest run if that did not come to its end, do nothing if it did the same already.

    Args:
        new_run: begin anew in any case.
        resume: go on with this run and no other.
        reuse: begin anew with these rows of earlier runs; as `input.incremental` says by default.
        caller: how the job was started, and where its progress goes.
        stream: where progress is shown, stderr by default.
        make_llm: makes the engine of a model; by default its weights are loaded.

    Raises:
        KvbatchError: With the exit code of what went wrong.
    """
    started_s = time.monotonic()
    caller = caller or Caller()
    stopper = caller.stopper or Stopper()
    with hiding(job):
        corpus = Corpus(job.input.spec())
    home = resume.path.parent if resume else Path(job.output_dir)
    with (
        hiding(job),
        job_lock(home, caller.if_locked) as lock,
        make_progress(job, stream) as progress,
    ):
        clear_drafts(home)
        done = _done_run(job, corpus, resume, reuse, new_run)
        damage = find_problems(done, deep=resume is not None) if done and not reuse else []
        if done and not damage:
            return RunOutcome(done, is_new=False)
        for problem in damage:
            progress.note(f"repairing the run: {problem.path} {problem.problem}")
        progress.start("opening")
        earlier = resume or done or (None if new_run or reuse else find_unfinished_run(job))
        kept = run_to_keep(job, earlier, reuse, new_run=new_run)
        opened = open_job(job, corpus, progress, stopper, earlier=earlier, kept=kept)
        insists = resume is not None
        continues = earlier is not None and can_continue(
            earlier, job, opened.fingerprint, opened.inputs, insists=insists
        )
        if make_llm is None:
            opened = calibrated(opened, progress)

        def session(opened: OpenedJob, known_bytes: int | None) -> "RunSession":
            from kvbatch.run.session import RunSession

            memory = opened.plan_memory(known_bytes=known_bytes)
            return RunSession(opened, memory, progress, stopper, lock.check, make_llm or load_llm)

        if earlier and continues:
            run = earlier
            running = session(_with_plan_of(run, opened), kept_budget_bytes(run, job))
            if not resume:
                point_latest(home, run.run_id)
            caller.on_run(run)
            with _recorded(run, job, progress, lock) as log:
                prepared = running.prepare(run, log)
        else:
            opened, reuse = choose_rows(opened, reuse, progress.note, earlier=earlier, new_run=new_run)
            planned = find_plan(job, opened.fingerprint, opened.inputs, reuse)
            if planned:
                running = session(_with_plan_of(planned, opened), kept_budget_bytes(planned, job))
            else:
                corpus.check_selects()
                running = session(opened, None)
            manifest = replace(
                running.opened.manifest(running.memory, reuse), number=next_number(home), **caller.origin
            )
            with drafted(home, new_run_id(job), ("shards", "logs", "stats")) as draft:
                describe_directory(draft, running.opened.job, manifest)
                if planned:
                    adopt_plan(planned, draft)
                with _recorded(draft, job, progress, lock, is_kept=False) as log:
                    prepared = running.prepare(draft, log)
                with stopper.shield():
                    run = publish(draft)
                    point_latest(home, run.run_id)
            caller.on_run(run)
        with _recorded(run, job, progress, lock) as log:
            running.run(run, log, prepared, started_s)
    return RunOutcome(run, is_new=True)


def _with_plan_of(run: RunDirectory, opened: OpenedJob) -> OpenedJob:
    """Return the job with the shard size of a run's plan, if the run has one."""
    shard_rows = kept_shard_rows(run)
    return opened if shard_rows is None else opened.with_shard_rows(shard_rows)


@contextmanager
def _recorded(
    run: RunDirectory, job: Job, progress: Progress, lock: HeldLock, *, is_kept: bool = True
) -> Iterator[RunLog]:
    """Keep a run's log and heartbeat during a block, and write an error into the log.

    Args:
        is_kept: whether the directory outlives an error.

    Raises:
        KvbatchError: In place of an error of another kind.
        OutputError: The log cannot be opened.
    """
    log = RunLog(run.log, job.environment.hide)

    def beat(phase: str, **values: Any) -> None:
        if lock.is_held:
            write_heartbeat(run.heartbeat, phase, **values)

    progress.beat = beat
    try:
        yield log
    except BaseException as error:
        log.failure(error)
        if not is_fault(error):
            raise
        where = f"; see {run.log}" if is_kept else " (--debug shows where)"
        raise KvbatchError(f"internal error, {fault(error)}{where}") from error
    finally:
        progress.beat = None
        log.close()


def _done_run(
    job: Job, corpus: Corpus, resume: RunDirectory | None, reuse: Reuse | None, new_run: bool
) -> RunDirectory | None:
    """Return the run that leaves nothing to do, if there is one."""
    if resume:
        return resume if resume.is_success else None
    if reuse:
        from kvbatch.run_dir.previous_rows import PreviousRows

        return None if PreviousRows(reuse).num_redone else reuse.directories[0]
    if new_run:
        return None
    done = find_same_run(job, corpus.files)
    return done or (find_run_of_same_rows(job, corpus) if job.input.incremental else None)


def load_llm(model: "ModelHandle", config: "EngineConfig") -> "EngineCore":
    """Load a model into an engine.

    Raises:
        ModelUnavailable: The engine cannot be made of it, or its memory cannot be had.
    """
    from engine import EngineCore
    from engine.detokenizer import Detokenizer
    from engine.errors import EngineError
    from engine.memory import is_out_of_memory

    decoder = model.decoder
    try:
        return EngineCore(decoder, config, Detokenizer(model.tokenizer))
    except EngineError as error:
        raise ModelUnavailable(f"model {model.section.name}: {error}") from error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelUnavailable(
            f"the memory for keys and values cannot be had on {model.device} ({error}); give "
            "engine.memory_budget less"
        ) from error
