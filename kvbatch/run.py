"""A job from its files to its summary: open, plan, load, run.

The corpus is read twice. The first pass plans every row; the second, window by window, submits rows in the
plan's order and writes a shard as soon as all its rows are done. Only windows with unfinished rows are held.
A run that was interrupted is continued: its plan stands, and the rows that it finished are not run again.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kvbatch.carry import Carry, find_run_of_same_rows
from kvbatch.environment import hiding
from kvbatch.errors import KvbatchError, ModelUnavailable
from kvbatch.fitting import plan_memory
from kvbatch.job import Job
from kvbatch.job_runner import JobRunner
from kvbatch.lock import IfLocked, job_lock
from kvbatch.manifest import (
    RunDirectory,
    adopt_plan,
    create_run,
    find_same_run,
    find_unfinished_run,
)
from kvbatch.precision import run_to_keep_to
from kvbatch.progress import Progress
from kvbatch.runlog import RunLog, write_heartbeat
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
        make_llm: makes the engine; by default the model is loaded into it.

    Raises:
        KvbatchError: With the exit code of what went wrong.
    """
    from kvbatch.corpus import Corpus

    started_s = time.monotonic()
    with hiding(job):
        corpus = Corpus(input_spec(job))
    home = resume.path.parent if resume else Path(job.output_dir)
    with hiding(job), job_lock(home, if_locked or IfLocked()), _progress(job, stream) as progress:
        done = _done_run(job, corpus, resume, carry, new_run)
        if done:
            return RunOutcome(done, is_new=False)
        progress.start("opening")
        earlier = resume or (None if new_run or carry else find_unfinished_run(job))
        kept = run_to_keep_to(job, earlier, carry, new_run=new_run)
        runner = JobRunner(job, corpus, progress, stopper or Stopper(), make_llm or _load_llm, earlier, kept)
        if earlier and not runner.may_continue(earlier, insists=resume is not None):
            earlier = None
        planned = None
        if not earlier:
            runner.choose_rows(carry, new_run)
            planned = runner.find_plan()
        runner.divide_budget(earlier or planned)
        run = earlier or create_run(job, runner.manifest)
        if planned:
            adopt_plan(planned, run)
        on_run(run)
        log = RunLog(run.log, job.environment.hide)
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
        raise ModelUnavailable(f"model {model.section.path}: {error}") from error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelUnavailable(
            f"the memory for keys and values cannot be had on {model.device} ({error}); give "
            "engine.memory_budget less"
        ) from error
