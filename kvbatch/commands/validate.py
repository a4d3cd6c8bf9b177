"""`kvbatch validate`: everything about a job that can be found wrong without a GPU and without weights, all at once."""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kvbatch.errors import InputError, JobFileError, KvbatchError, LimitExceeded, OutputError
from kvbatch.job_file.load import load_job
from kvbatch.job_file.sections import Job
from kvbatch.run_dir.find_runs import find_unfinished_run
from kvbatch.text import escaped

if TYPE_CHECKING:
    from engine.promise import FittedPolicy
    from kvbatch.corpus import Corpus, InputSpec
    from kvbatch.corpus.text_lengths import TextLengths
    from kvbatch.model.handle import ModelHandle
    from kvbatch.prompts.chat import AnyPromptBuilder

_BATCH_ROWS = 512


@dataclass(frozen=True)
class Finding:
    """Something that was looked at: fine (`ok`), worth knowing (`note`), or what a run would fail on (`error`)."""

    about: str
    kind: str
    message: str
    exit_code: int = 0  # of the run that fails on it


def run_validate(job_file: Path, overrides: Sequence[str], *, as_json: bool, out: TextIO) -> int:
    """Print the findings about a job; return the exit code that a run of it would begin with."""
    exit_code = 0
    findings = []
    for finding in findings_of(job_file, overrides):
        findings.append(finding)
        exit_code = exit_code or finding.exit_code
        if not as_json:
            print(f"{finding.about:<7} {finding.kind:<6} {escaped(finding.message)}", file=out, flush=True)
    if as_json:
        found = {"exit_code": exit_code, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(found, ensure_ascii=False), file=out)
    return exit_code


def findings_of(job_file: Path, overrides: Sequence[str]) -> Iterator[Finding]:
    """Yield what there is to say about a job, its input, its model and its output."""
    try:
        job = load_job(job_file, overrides)
    except JobFileError as error:
        yield from (_error("job", error, str(line)) for line in error.args)
        return
    except InputError as error:
        yield _error("job", error)
        return
    from kvbatch.corpus.text_lengths import TextLengths

    lengths = TextLengths()
    yield Finding("job", "ok", f"{job_file}: {job.name}")
    for finding in chain(_input(job, lengths), _model(job, lengths), _output(job)):
        yield replace(finding, message=job.environment.hide(finding.message))


def _input(job: Job, lengths: "TextLengths") -> Iterator[Finding]:
    """Look at the input; where the condition on its rows may be at fault, again without it for what that hides.

    Args:
        lengths: collects those of the texts that would run.
    """
    from kvbatch.corpus.text_lengths import TextLengths

    spec = job.input.spec()
    found = []
    for finding in _looked_at(job, spec, lengths):
        found.append(finding)
        yield finding
    if spec.where is not None and any(finding.exit_code for finding in found):
        for finding in _looked_at(job, replace(spec, where=None), TextLengths()):
            if finding not in found:
                yield replace(finding, message=f"without where: {finding.message}")


def _looked_at(job: Job, spec: "InputSpec", lengths: "TextLengths") -> Iterator[Finding]:
    from kvbatch.corpus import Corpus
    from kvbatch.corpus.spec import passthrough_note
    from kvbatch.plan.feasibility import check_prompt_columns

    try:
        corpus = Corpus(spec)
    except KvbatchError as error:
        yield _error("input", error)
        return
    mistakes = corpus.mistakes()
    for mistake in mistakes:
        yield _error("input", InputError(mistake))
    if mistakes:
        yield Finding("input", "note", "rows are looked at once every file and column can be read")
        return
    try:
        yield from _rows(corpus, lengths)
        check_prompt_columns(job, corpus.passthrough_schema.names)
    except KvbatchError as error:
        yield _error("input", error)
    for warning in corpus.warnings:
        yield Finding("input", "note", warning)
    if spec.passthrough == "all":
        yield Finding("input", "note", passthrough_note(spec))


def _rows(corpus: "Corpus", lengths: "TextLengths") -> Iterator[Finding]:
    """Read every row; raises InputError for a file that breaks off."""
    from kvbatch.plan.unique_ids import UniqueIds
    from kvbatch.run_dir.plan_file import bounded_windows

    ids = UniqueIds()
    rejected: Counter[str] = Counter()
    num_rows = 0
    for window in bounded_windows(corpus.documents(), _BATCH_ROWS):
        num_rows += len(window)
        repeated = ids.repeated([str(document.row_id) for document in window])
        for document, is_repeated in zip(window, repeated, strict=True):
            if document.status != "ok" or is_repeated:
                rejected[document.error_code or "duplicate_id"] += 1
            elif document.text is not None:
                lengths.note(document.text)
        window.clear()
        del document  # the last one's text goes with the window
    text = f"{len(corpus.files):,} files, {num_rows:,} rows"
    if corpus.num_left_out:
        text += f" (where left out {corpus.num_left_out:,} of {corpus.num_left_out + num_rows:,} rows)"
    if corpus.skipped:
        text += f", {len(corpus.skipped):,} files skipped"
    reasons = ", ".join(f"{code} {count:,}" for code, count in rejected.most_common())
    if not rejected:
        yield Finding("input", "ok", text)
    elif rejected.total() < num_rows:
        yield Finding("input", "note", f"{text}, {rejected.total():,} of them rejected: {reasons}")
    else:
        yield _error("input", LimitExceeded(f"{text}, all of them rejected: {reasons}"))


def _model(job: Job, lengths: "TextLengths") -> Iterator[Finding]:
    from engine.model_files import holds_weights
    from kvbatch.model.cache_policy import known_policy
    from kvbatch.model.handle import open_model, resolve_device
    from kvbatch.model.source import ModelAbsent
    from kvbatch.plan.feasibility import check_room
    from kvbatch.prompts.chat import chat_template, prompt_builder
    from kvbatch.prompts.notes import prompt_notes
    from kvbatch.prompts.sampling import RowSampling
    from kvbatch.prompts.structured_output import answer_form
    from kvbatch.run_dir.reuse import kept_policy, kept_precision, run_to_keep

    try:
        run = run_to_keep(job, find_unfinished_run(job), None, new_run=False)
        kept = kept_precision(run) if run else None
        model = open_model(job.model, job.engine, job.cache.policy, kept=kept, look_only=True)
    except ModelAbsent as error:
        yield Finding("model", "note", f"{job.model.name}: {error}; prompt and memory are checked then")
        return
    except KvbatchError as error:
        yield _error("model", error)
        return
    has_weights = holds_weights(model.files.directory)
    text = f"{job.model.name}: {model.config.architecture}, context {model.config.max_context:,}"
    yield Finding("model", *(("ok", text) if has_weights else ("note", f"{text}; there are no weights here")))
    for note in model.files.notes:
        yield Finding("model", "note", note)
    yield Finding("dtype", "ok", str(model.precision))
    yield Finding("threads", "ok", f"{model.threads.count}: {model.threads.reason}")
    if job.cache.policy.compresses:
        fitted = (kept_policy(run, job, model.files.revision) if run else None) or known_policy(job, model)
        yield Finding("cache", *_promise(job, model, fitted))
    try:
        chat = chat_template(model.tokenizer, job)
        builder = prompt_builder(model.tokenizer, job, chat)
        check_room(job, builder, model.config.max_context)
        RowSampling(job.generation, model.tokenizer)
        answer_form(job.generation, model)
        yield Finding("prompt", "ok", f"{builder.num_static_tokens:,} tokens beside the document")
    except KvbatchError as error:
        yield _error("prompt", error)
        return
    for note in prompt_notes(job, chat):
        yield Finding("prompt", "note", note)
    if chat and chat.shows_time:
        yield Finding(
            "prompt", "note", "the chat template writes the time, in all rows that of the run's start"
        )
    try:
        resolve_device(job.engine.device)
    except KvbatchError as error:
        yield Finding("memory", "note", f"not checked: {error}")
        return
    yield from _memory(job, model, builder, lengths)


def _promise(job: Job, model: "ModelHandle", fitted: "FittedPolicy | None") -> tuple[str, str]:
    """Say what the cache policy loses on the model, or that it is not known yet."""
    from kvbatch.model.cache_policy import policy_text

    broken = fitted is not None and not fitted.holds
    return "note" if broken or fitted is None else "ok", policy_text(job.cache.preset, model, fitted)


def _memory(
    job: Job, model: "ModelHandle", builder: "AnyPromptBuilder", lengths: "TextLengths"
) -> Iterator[Finding]:
    """Divide the memory, and hold the cache preset against the full cache for texts of these lengths."""
    from kvbatch.plan.memory_plan import plan_memory
    from kvbatch.plan.preset_advice import preset_advice

    try:
        memory = plan_memory(job, model, builder)
        pages_bytes = memory.budget.capacity_pages * memory.budget.layout.page_bytes
        text = f"{pages_bytes:,} bytes for keys and values, of {memory.budget_bytes:,}, on {model.device}"
        yield Finding("memory", "ok", text)
    except KvbatchError as error:
        yield _error("memory", error)
        return
    around = builder.num_static_tokens
    tokens = (around + text for text in lengths.tokens(lambda text: len(builder.tokens.documents([text])[0])))
    if advice := preset_advice(job, model, builder, tokens, memory.budget_bytes):
        yield Finding("cache", "note", advice)


def _output(job: Job) -> Iterator[Finding]:
    targets = {"output.dir": Path(job.output_dir)}
    if job.output.metrics:
        targets["output.metrics"] = Path(os.path.expanduser(job.output.metrics)).parent
    for key, target in targets.items():
        place = target
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            with tempfile.TemporaryFile(dir=place):
                yield Finding("output", "ok", f"{key}: {target}")
        except OSError as error:
            yield _error("output", OutputError(f"{key}: {target} cannot be written: {error.strerror}"))


def _error(about: str, error: KvbatchError, message: str | None = None) -> Finding:
    return Finding(about, "error", message or str(error), error.exit_code)
