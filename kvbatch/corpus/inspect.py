"""Print the rows that a job would read, as JSON or as a summary, without loading a model.

No row is printed of a file that cannot be read to its end, because its rows would be incomplete.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from tempfile import SpooledTemporaryFile
from typing import TextIO

from kvbatch.corpus import Corpus, Document, FileProblem, InputSpec, SourceFile
from kvbatch.corpus.fields import FieldTypes
from kvbatch.corpus.json_values import NumberText
from kvbatch.corpus.parquet_schema import open_parquet
from kvbatch.corpus.skipped import by_reason
from kvbatch.errors import InputError, ReaderLeft
from kvbatch.text import escaped

SPOOL_BYTES = 4 << 20
SHOWN_ROWS = 3
SHOWN_REJECTS = 5
SHOWN_CHARS = 60


@dataclass
class _FileView:
    """What has been seen of one file."""

    num_rows: int = 0
    rejects: Counter = field(default_factory=Counter)
    first_rows: list[Document] = field(default_factory=list)
    first_rejects: list[Document] = field(default_factory=list)

    def note(self, document: Document) -> None:
        self.num_rows += 1
        if document.status == "rejected":
            self.rejects[document.error_code] += 1
            if len(self.first_rejects) < SHOWN_REJECTS:
                self.first_rejects.append(document)
        elif len(self.first_rows) < SHOWN_ROWS:
            short = None if document.text is None else document.text[: SHOWN_CHARS * 2]
            self.first_rows.append(replace(document, text=short, values=None))


def run_inspect(spec: InputSpec, *, as_json: bool, out: TextIO, err: TextIO) -> int:
    """Print the rows of an input: one JSON object a line, or a summary for people.

    Args:
        out: gets the data.
        err: gets warnings.

    Returns:
        0, or 66 if some file cannot be read at all.

    Raises:
        InputError: `where` cannot be used.
    """
    corpus = Corpus(spec)
    problem: FileProblem | None
    # The summary lists the types of all fields. For Parquet they come from the schema, so no other column is read.
    records = corpus if as_json else Corpus(replace(spec, passthrough="all"))
    refused = {problem.path: problem for problem in corpus.problems()}
    known = {file.path for file in corpus.files}
    fatal = [problem for path, problem in refused.items() if path not in known]
    totals = _FileView()
    try:
        for problem in fatal:
            _show_problem(problem, as_json, out)
        for file in corpus.files:
            problem = refused.get(file.path)
            if problem is None:
                reader = records if file.format == "jsonl" else corpus
                problem = _show_file(reader, file, totals, as_json, out)
            else:
                _show_problem(problem, as_json, out)
            fatal += [problem] if problem else []
            if spec.limit is not None and totals.num_rows >= spec.limit:
                break
    except ReaderLeft:
        return InputError.exit_code if fatal else 0
    num_rejected = totals.rejects.total()
    summary = {"rows": totals.num_rows, "rejected": num_rejected, "fatal": len(fatal)}
    skipped = corpus.skipped
    if as_json:
        counts = {"skipped_files": len(skipped), "skipped": by_reason(skipped)} if skipped else {}
        print(json.dumps({"summary": summary | counts}), file=out)
    else:
        more = f", {len(skipped):,} skipped" if skipped else ""
        print(
            f"{totals.num_rows:,} rows, {num_rejected:,} rejected, {len(fatal):,} files unreadable{more}",
            file=out,
        )
    for warning in dict.fromkeys(corpus.warnings + records.warnings):
        print(f"warning: {escaped(warning)}", file=err)
    return InputError.exit_code if fatal else 0


def _show_file(
    corpus: Corpus, file: SourceFile, totals: _FileView, as_json: bool, out: TextIO
) -> FileProblem | None:
    """Print one file, or what is wrong with it; add it to the totals only if it was read whole."""
    view, fields = _FileView(), FieldTypes()
    left = None if corpus.spec.limit is None else corpus.spec.limit - totals.num_rows
    with SpooledTemporaryFile(SPOOL_BYTES, "w+", encoding="utf-8", newline="") as spool:
        try:
            for document in _first(corpus.read(file, fields), left):
                view.note(document)
                if as_json:
                    spool.write(json.dumps(_row_object(document)) + "\n")
                del document
        except InputError as error:
            problem = FileProblem(file.path, str(error).removeprefix(f"{file.path}: "))
            _show_problem(problem, as_json, out)
            return problem
        spool.seek(0)
        while chunk := spool.read(1 << 16):
            out.write(chunk)
    totals.num_rows += view.num_rows
    totals.rejects += view.rejects
    if not as_json:
        _show_view(file, view, _column_types(file, fields), out)
    return None


def _first(documents: Iterator[Document], limit: int | None) -> Iterator[Document]:
    for count, document in enumerate(documents, 1):
        if limit is not None and count > limit:
            return
        yield document


def _row_object(document: Document) -> dict:
    row_id = document.row_id
    shown_id: str | int | float | None = row_id
    if isinstance(row_id, NumberText) and repr(float(row_id)) == row_id:
        shown_id = float(row_id)  # the same digits, and a number as in the input
    return {
        "file": document.file,
        "row": document.row,
        "row_id": shown_id,
        "status": document.status,
        "chars": document.chars,
        "sha1": document.sha1,
        "error": None if document.error_code is None else f"{document.error_code}: {document.error_message}",
    }


def _show_problem(problem: FileProblem, as_json: bool, out: TextIO) -> None:
    if not as_json:
        print(f"{escaped(problem.path)}\n  cannot be read: {escaped(problem.message)}\n", file=out)
        return
    row: dict[str, str | None] = dict.fromkeys(("file", "row", "row_id", "status", "chars", "sha1", "error"))
    row.update(file=problem.path, status="fatal", error=problem.message)
    print(json.dumps(row), file=out)


def _column_types(file: SourceFile, fields: FieldTypes) -> list[str]:
    if file.format == "parquet":
        with open_parquet(file) as parquet:
            found = [f"{each.name}: {each.type}" for each in parquet.schema_arrow]
        return found + [f"{name}: string, from the path" for name, _ in file.partitions]
    return [
        f"{name}: {'mixed (JSON text)' if seen.as_json else seen.arrow}"
        for name, seen in fields.types().items()
    ]


def _show_view(file: SourceFile, view: _FileView, columns: list[str], out: TextIO) -> None:
    packed = f", {'+'.join(file.compression)}" if file.compression else ""
    print(f"{escaped(str(file.path))}  ({file.format}{packed}, {file.num_bytes:,} bytes)", file=out)
    rejected = ", ".join(f"{count:,} {code}" for code, count in sorted(view.rejects.items()))
    print(f"  {view.num_rows:,} rows" + (f", rejected: {rejected}" if rejected else ""), file=out)
    names = escaped(", ".join(columns)) or "none"
    print(f"  {'columns' if file.format == 'parquet' else 'other fields'}: {names}", file=out)
    for document in view.first_rows:
        shown = " ".join((document.text or "").split())
        shown = shown if len(shown) <= SHOWN_CHARS else shown[:SHOWN_CHARS] + "…"
        print(f"  {document.row:>6}  {escaped(str(document.row_id))}  {shown!r}", file=out)
    for document in view.first_rejects:
        print(f"  rejected  {document.error_code}: {escaped(str(document.error_message))}", file=out)
    print(file=out)
