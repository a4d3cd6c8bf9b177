"""A job from its files to its summary: open, plan, load, run.

The corpus is read twice. The first pass plans every row; the second, window by window, submits rows in the
plan's order and writes a shard as soon as all its rows are done. Only windows with unfinished rows are held.
A run that was interrupted is continued: its plan stands, and the rows that it finished are not run again.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvbatch.carry import Carry, find_run_of_same_rows
from kvbatch.environment import hiding
from kvbatch.errors import KvbatchError, ModelUnavailable, fault, is_fault
from kvbatch.fitting import plan_memory
from kvbatch.job import Job
from kvbatch.job_runner import JobRunner
from kvbatch.lock import HeldLock, IfLocked, job_lock
from kvbatch.manifest import (
    RunDirectory,
    adopt_plan,
    describe_directory,
    find_same_run,
    find_unfinished_run,
    new_run_id,
    next_number,
    point_latest,
)
from kvbatch.precision import run_to_keep_to
from kvbatch.progress import Progress
from kvbatch.runlog import RunLog, write_heartbeat
from kvbatch.staging import clear_drafts, drafted, publish
from kvbatch.stop import Stopper

if TYPE_CHECKING:
    from engine import LLM, EngineConfig
    from kvbatch.corpus import Corpus, InputSpec
    from kvbatch.model import ModelHandle


@dataclass(frozen=True)
class RunOutcome:
    """Say which run holds the job's output, and whether it was made now."""

    run: RunDirectory
    is_new: bool


def run_job(
    job: Job,
    *,
    new_run: bool = False,
    resume: RunDirectory | None = None,
    carry: Carry | None = None,
    if_locked: IfLocked | None = None,
    stream: TextIO | None = None,
    stopper: Stopper | None = None,
    on_run: Callable[[RunDirectory], None] = lambda run: None,
    origin: Mapping[str, Any] | None = None,
    make_llm: "Callable[[ModelHandle, EngineConfig], LLM] | None" = None,
) -> RunOutcome:
    """Run a job: go on with its latest run if that did not come to its end, do nothing if it did the same already.

    Args:
        new_run: begin anew in any case.
        resume: go on with this run and no other.
        carry: begin anew with these rows of earlier runs; as `input.incremental` says by default.
        if_locked: what to do while another process runs the job; fail by default.
        stream: where progress is shown, stderr by default.
        stopper: holds signals back while a shard is written.
        on_run: told the run directory once there is one.
        origin: what a new run's manifest says of the command that began it.
        make_llm: makes the engine; by default the model is loaded into it.

    Raises:
        KvbatchError: With the exit code of what went wrong.
    """
    from kvbatch.corpus import Corpus
    from kvbatch.verify import find_problems

    started_s = time.monotonic()
    with hiding(job):
        corpus = Corpus(input_spec(job))
    home = resume.path.parent if resume else Path(job.output_dir)
    with (
        hiding(job),
        job_lock(home, if_locked or IfLocked()) as lock,
        _progress(job, stream) as progress,
    ):
        clear_drafts(home)
        done = _done_run(job, corpus, resume, carry, new_run)
        damage = find_problems(done, deep=resume is not None) if done and not carry else []
        if done and not damage:
            return RunOutcome(done, is_new=False)
        for problem in damage:
            progress.note(f"repairing the run: {problem.path} {problem.problem}")
        progress.start("opening")
        earlier = resume or done or (None if new_run or carry else find_unfinished_run(job))
        kept = run_to_keep_to(job, earlier, carry, new_run=new_run)
        runner = JobRunner(job, corpus, progress, stopper or Stopper(), make_llm or _load_llm, earlier, kept)
        runner.check_lock = lock.check
        if earlier and not runner.may_continue(earlier, insists=resume is not None):
            earlier = None
        if earlier:
            run = earlier
            runner.divide_budget(run)
            if not resume:
                point_latest(home, run.run_id)
            on_run(run)
            with _recorded(run, job, progress, lock) as log:
                prepared = runner.prepare(run, log)
        else:
            runner.choose_rows(carry, new_run)
            runner.manifest |= {"number": next_number(home)} | dict(origin or {})
            planned = runner.find_plan()
            if not planned:
                corpus.check_selects()
            runner.divide_budget(planned)
            with drafted(home, new_run_id(job), ("shards", "logs", "stats")) as draft:
                describe_directory(draft, job, runner.manifest)
                if planned:
                    adopt_plan(planned, draft)
                with _recorded(draft, job, progress, lock, is_kept=False) as log:
                    prepared = runner.prepare(draft, log)
                with runner.stopper.shield():
                    run = publish(draft)
                    point_latest(home, run.run_id)
            on_run(run)
        with _recorded(run, job, progress, lock) as log:
            runner.run(run, log, *prepared, started_s)
    return RunOutcome(run, is_new=True)


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
    progress.beat = lambda phase, **values: lock.is_held and write_heartbeat(run.heartbeat, phase, **values)
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
    job: Job, corpus: "Corpus", resume: RunDirectory | None, carry: Carry | None, new_run: bool
) -> RunDirectory | None:
    """Return the run that leaves nothing to do, if there is one."""
    if resume:
        return resume if resume.is_success else None
    if carry:
        from kvbatch.earlier_rows import EarlierRows

        return None if EarlierRows(carry).num_redone else carry.directories[0]
    if new_run:
        return None
    done = find_same_run(job, corpus.files)
    return done or (find_run_of_same_rows(job, corpus) if job.input.incremental else None)


@contextmanager
def opened_job(
    job: Job, *, stream: TextIO | None = None, stopper: Stopper | None = None
) -> "Iterator[JobRunner]":
    """Open a job to look into it, without a run; raises as `run_job`."""
    from kvbatch.corpus import Corpus

    with hiding(job), _progress(job, stream) as progress:
        progress.start("opening")
        kept = run_to_keep_to(job, None, None, new_run=False)
        corpus = Corpus(input_spec(job))
        runner = JobRunner(job, corpus, progress, stopper or Stopper(), _load_llm, kept=kept)
        runner.engine_config, runner.budget = plan_memory(job, runner.model, runner.builder)
        yield runner


def _progress(job: Job, stream: TextIO | None) -> Progress:
    return Progress(stream, hide=job.environment.hide)


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
        on_bad_row=section.on_bad_row,
        on_bad_file=section.on_bad_file,
    )


def _load_llm(model: "ModelHandle", config: "EngineConfig") -> "LLM":
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
