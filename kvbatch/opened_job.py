"""One opened job: its corpus, model and prompts, and what decides its output. A value, which nothing changes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, TextIO

from kvbatch.corpus import Corpus
from kvbatch.corpus.skipped import by_reason
from kvbatch.job_file.environment import hiding, without_credentials
from kvbatch.job_file.sections import Job
from kvbatch.plan.feasibility import check_room
from kvbatch.progress.display import Progress
from kvbatch.prompts.chat_template import now
from kvbatch.run_dir.describe import describe_run
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.fingerprint import RENDERED, Fingerprint, InputHashes, job_fingerprint
from kvbatch.run_dir.manifest import Manifest, ModelFacts
from kvbatch.run_dir.reuse import (
    Reuse,
    check_model,
    kept_policy,
    kept_precision,
    reused_by_default,
    run_to_keep,
    time_of_last,
)
from kvbatch.signals import Stopper
from kvbatch.text import digest

if TYPE_CHECKING:
    from engine.models.basis import BasisTable
    from engine.promise import FittedPolicy
    from kvbatch.model.handle import ModelHandle
    from kvbatch.plan.memory_plan import MemoryPlan
    from kvbatch.plan.planner import Planner
    from kvbatch.prompts.chat import AnyPromptBuilder
    from kvbatch.prompts.chat_template import ChatTemplate
    from kvbatch.prompts.long_document import LongDocuments
    from kvbatch.prompts.sampling import RowSampling
    from kvbatch.prompts.structured_output import AnswerForm, RowConstraint
    from kvbatch.run_dir.previous_rows import PreviousRows
    from kvcache.config import KVCacheConfig


@dataclass(frozen=True)
class OpenedJob:
    """A job with all that it needs but weights and memory.

    Args:
        job: the job file's content.
        corpus: its input.
        model: found and described; its weights are loaded when first asked for.
        prompts: makes prompts.
        chat: the chat template that `prompts` renders, if they need one.
        sampling: says of each row how it is generated.
        answers: the form that answers must have, if the job asks for one.
        time: what a chat template takes for now.
        described: what a manifest says before anything was read.
        inputs: hashes of the input files.
        other_bytes: resident memory of the process once the job is open, before weights are loaded.
        fitted: the policy that keeps the cache preset's promise on the model; None where the cache is full, or the
            policy has not been measured yet.
        budget_bytes: the memory budget, where weights were loaded before the memory is divided.
    """

    job: Job
    corpus: Corpus
    model: "ModelHandle"
    prompts: "AnyPromptBuilder"
    chat: "ChatTemplate | None"
    sampling: "RowSampling"
    answers: "AnswerForm | None"
    time: datetime
    described: Manifest
    inputs: InputHashes
    other_bytes: int
    fitted: "FittedPolicy | None" = None
    budget_bytes: int | None = None

    @property
    def policy(self) -> "KVCacheConfig":
        """The cache policy that runs, or the job file's where it has not been fitted yet."""
        asked = self.job.cache.policy
        return (
            replace(asked, tiers=self.fitted.tiers)
            if self.fitted and self.fitted.limit is not None
            else asked
        )

    @property
    def fingerprint(self) -> Fingerprint:
        """What the run depends on, the opened model included."""
        import torch

        found = {
            "kvbatch": self.described.kvbatch,
            "model content": self.model.files.revision,
            "model dtype": self.model.precision.dtype,
            "tokenizer": self.model.tokenizer_hash,
        }
        if self.fitted:
            found["cache policy"] = digest(asdict(self.policy))[:12]
        return job_fingerprint(self.job).with_found(
            semantic=found | ({RENDERED: self.chat.digest} if self.chat else {}),
            machine={
                "device": self.model.device,
                "threads": torch.get_num_threads(),
                "versions": self.described.versions,
            },
        )

    @property
    def constraint(self) -> "Callable[[], RowConstraint] | None":
        """What makes a row's constraint, if answers must have a form."""
        return self.answers.constraint if self.answers else None

    def at(self, time: datetime) -> "OpenedJob":
        """Return the same job with prompts of another time."""
        from kvbatch.prompts.chat import prompt_builder

        chat = self.chat and self.chat.at(time)
        prompts = prompt_builder(self.model.tokenizer, self.job, chat, self.prompts.tokens)
        return replace(self, prompts=prompts, chat=chat, time=time)

    def with_shard_rows(self, shard_rows: int) -> "OpenedJob":
        """Return the same job with shards of another size."""
        output = self.job.output.model_copy(update={"shard_rows": shard_rows})
        return replace(self, job=self.job.model_copy(update={"output": output}))

    def with_basis(self, basis: "BasisTable") -> "OpenedJob":
        """Return the same job with a model that is loaded in another basis."""
        return replace(self, model=replace(self.model, basis=basis))

    def with_job(self, job: Job) -> "OpenedJob":
        """Return the job under another job file, which has the same input, model and prompts."""
        return replace(self, job=job)

    def long_documents(self) -> "LongDocuments":
        """Return what makes the prompts of all rows, those of documents that are too long as well."""
        from kvbatch.prompts.long_document import LongDocuments

        room = self.model.config.max_context - self.job.generation.max_new_tokens
        return LongDocuments(self.prompts, self.job, room)

    def plan_memory(
        self, *, cache: "KVCacheConfig | None" = None, known_bytes: int | None = None
    ) -> "MemoryPlan":
        """Divide the job's memory; see `kvbatch.plan.memory_plan.plan_memory`."""
        from kvbatch.plan.memory_plan import plan_memory

        return plan_memory(
            self.job,
            self.model,
            self.prompts,
            other_bytes=self.other_bytes,
            cache=cache or self.policy,
            known_bytes=known_bytes or self.budget_bytes,
        )

    def planner(
        self,
        memory: "MemoryPlan",
        *,
        previous: "PreviousRows | None" = None,
        known_tokens: Mapping[str, int] | None = None,
    ) -> "Planner":
        """Return what plans the job's rows; see `Planner`."""
        from kvbatch.plan.planner import Planner

        return Planner(self.job, self.long_documents(), memory.budget, previous, known_tokens)

    def manifest(self, memory: "MemoryPlan", reuse: Reuse) -> Manifest:
        """Return what the manifest of a new run or plan says before its rows are planned."""
        model, fingerprint = self.model, self.fingerprint
        return replace(
            self.described,
            prompt_time=self.time.isoformat(),
            model=ModelFacts(
                path=without_credentials(self.job.model.name),
                revision=model.files.revision,
                directory=str(model.files.directory),
                architecture=model.config.architecture,
                dtype=model.precision.dtype,
                weight_quant=self.job.model.weight_quant,
                max_context=model.config.max_context,
                notes=model.files.notes,
            ),
            device=model.device,
            precision=asdict(model.precision),
            threads=asdict(model.threads),
            prefix_tokens=len(self.prompts.prefix_ids),
            semantic=dict(fingerprint.semantic),
            semantic_hash=digest(fingerprint.semantic),
            operational=dict(fingerprint.operational),
            operational_hash=digest(fingerprint.operational),
            reuse=reuse.to_dict(),
            cache_preset=self.job.cache.preset,
            cache_policy=self.fitted.to_dict() if self.fitted else None,
            memory_budget_bytes=memory.budget_bytes,
            input_sha256=self.inputs.hashes(),
        )


def open_job(
    job: Job,
    corpus: Corpus,
    progress: Progress,
    stopper: Stopper,
    *,
    earlier: RunDirectory | None = None,
    kept: RunDirectory | None = None,
) -> OpenedJob:
    """Open what a job needs, all but weights and memory.

    Args:
        earlier: the run that may be continued; its prompts keep their time.
        kept: the run whose rows stand beside the job's, so that precision and cache policy stay.

    Raises:
        ModelUnavailable: The model or the device cannot be used.
        JobFileError: Prompt and model do not go together.
        InputError: An input file cannot be read.
    """
    from engine.memory import resident_bytes

    with stopper.shield():  # a library that was half imported does not always end well
        import torch  # noqa: F401

        from kvbatch.model.cache_policy import known_policy
        from kvbatch.model.handle import open_model
        from kvbatch.prompts.chat import chat_template, prompt_builder
        from kvbatch.prompts.notes import prompt_notes
        from kvbatch.prompts.sampling import RowSampling
        from kvbatch.prompts.structured_output import answer_form
        from kvbatch.prompts.tokenizer import PieceTokenizer

    corpus.check()
    precision = kept_precision(kept) if kept else None
    model = open_model(job.model, job.engine, job.cache.policy, kept=precision)
    fitted = (kept_policy(kept, job, model.files.revision) if kept else None) or known_policy(job, model)
    for note in model.files.notes:
        progress.note(f"warning: model {job.model.name}: {note}")
    time = (earlier and earlier.read_manifest().time) or now()
    sampling = RowSampling(job.generation, model.tokenizer)
    answers = answer_form(job.generation, model)
    chat = chat_template(model.tokenizer, job, time)
    prompts = prompt_builder(model.tokenizer, job, chat, PieceTokenizer(model.tokenizer))
    described = replace(describe_run(job, corpus.files), skipped=by_reason(corpus.skipped))
    opened = OpenedJob(
        job=job,
        corpus=corpus,
        model=model,
        prompts=prompts,
        chat=chat,
        sampling=sampling,
        answers=answers,
        time=time,
        described=described,
        inputs=InputHashes(corpus.files),
        other_bytes=resident_bytes(),
        fitted=fitted,
    )
    check_room(job, prompts, model.config.max_context)
    for note in prompt_notes(job, chat):
        progress.note(f"note: {note}")
    return opened


@contextmanager
def opened_job(
    job: Job, *, stream: TextIO | None = None, stopper: Stopper | None = None
) -> Iterator[tuple[OpenedJob, Progress]]:
    """Open a job to look into it, without a run; raises as `open_job`."""
    with hiding(job), make_progress(job, stream) as progress:
        progress.start("opening")
        kept = run_to_keep(job, None, None, new_run=False)
        yield open_job(job, Corpus(job.input.spec()), progress, stopper or Stopper(), kept=kept), progress


def make_progress(job: Job, stream: TextIO | None) -> Progress:
    """Return the progress of a job, which shows no value of the environment."""
    return Progress(stream, hide=job.environment.hide)


def choose_rows(
    opened: OpenedJob,
    reuse: Reuse | None,
    note: Callable[[str], None],
    *,
    earlier: RunDirectory | None = None,
    new_run: bool = False,
) -> tuple[OpenedJob, Reuse]:
    """Choose what a new run reuses; return it with the job at the time that its prompts are rendered at.

    The prompts of a run that reuses rows keep the time of these rows. A template that writes the date would otherwise
    have every row generated again each day, or put rows of two days beside each other.

    Args:
        reuse: what the user chose.
        note: shows a note to the user.
        earlier: the run that was not continued; the job was opened at its time.
        new_run: reuse nothing unless the user chose it.

    Raises:
        JobChanged: The model is not that of the run whose rows shall stand beside the new ones.
        InputError: The manifest of that run cannot be read.
    """
    time = now()
    if reuse:
        check_model(reuse, opened.fingerprint.semantic)
        opened = opened.at(reuse.directories[0].read_manifest().time or time)
    elif opened.job.input.incremental and not new_run:
        opened = opened.at(time_of_last(opened.job, opened.fingerprint.semantic) or time)
        reuse = reused_by_default(opened.job, opened.fingerprint.semantic)
        if reuse is None:
            opened = opened.at(time)
    elif earlier:
        opened = opened.at(time)
    chat = opened.chat
    if reuse and chat and chat.shows_time and chat.at(time).digest != chat.digest:
        note(
            f"note: the chat template writes the time, which stays that of {opened.time:%Y-%m-%d}, when the rows "
            "that are reused were generated; kvbatch run --new-run takes today's and generates all rows"
        )
    return opened, reuse or Reuse()
