"""A run's rows in other formats, in input order, a few at a time."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any

from kvbatch.corpus.strings import plain_value
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.read_output import iter_tables, output_columns, read_rows
from kvbatch.text import escaped

Row = dict[str, Any]  # a row's columns as values that JSON can hold


@dataclass(frozen=True)
class ExportOptions:
    """Say which rows and columns are exported, and how.

    Args:
        columns: names in the order in which they are written; all columns if empty. Not for openai-batch.
        only_new: leave out the rows that the run reused from earlier runs.
        raw: leave cells of CSV as they are, even if a spreadsheet would run them as formulas.
        bom: begin CSV with a byte-order mark, by which spreadsheets recognise UTF-8.
    """

    columns: tuple[str, ...] = ()
    only_new: bool = False
    raw: bool = False
    bom: bool = False


def export_rows(
    run: RunDirectory, format_: str, out: IO[bytes], options: ExportOptions | None = None
) -> None:
    """Write the rows of a run.

    Args:
        format_: a key of `FORMATS`.
        out: gets UTF-8.

    Raises:
        InputError: The run directory is damaged.
    """
    for line in FORMATS[format_](run, options or ExportOptions()):
        out.write(line.encode())


def exported_columns(run: RunDirectory) -> list[str]:
    """Return the columns that an export can have: those of the output, and one for the answer to each question.

    Raises:
        InputError: The run directory is damaged.
    """
    names = output_columns(run)
    if "output" not in names:
        return names
    place = names.index("output") + 1
    return [*names[:place], *_answer_columns(run, names), *names[place:]]


def _answer_columns(run: RunDirectory, names: list[str]) -> list[str]:
    """Name a column for each of several questions: answer_1, or kvb_answer_1 where the input has a column answer_1."""
    questions = run.read_manifest().semantic.get("prompt.questions", ())
    if isinstance(questions, list):
        num_questions = len(questions)
    else:  # they came from the environment, and the manifest only keeps their hash
        answers = read_rows(run, ["answers"])["answers"].drop_nulls()
        num_questions = len(answers[0]) if len(answers) else 0
    found = [f"answer_{number + 1}" for number in range(num_questions)]
    return [f"kvb_{name}" for name in found] if set(found) & set(names) else found


def _jsonl(run: RunDirectory, options: ExportOptions) -> Iterator[str]:
    """Yield one JSON object a row."""
    columns = _columns(run, options)
    for row in _rows(run, options):
        yield _json({name: row[name] for name in columns})


def _csv(run: RunDirectory, options: ExportOptions) -> Iterator[str]:
    """Yield RFC 4180 lines below a header; null is an empty field, lists and structs are JSON."""
    cell = _cell if options.raw else _harmless_cell
    line = io.StringIO()
    writer = csv.writer(line)

    def written(values: list[Any]) -> str:
        line.seek(0)
        line.truncate()
        writer.writerow(cell(value) for value in values)
        return line.getvalue()

    columns = _columns(run, options)
    yield "\ufeff" * options.bom + written(list(columns))
    for row in _rows(run, options):
        yield written([row[name] for name in columns])


def _openai_batch(run: RunDirectory, options: ExportOptions) -> Iterator[str]:
    """Yield the lines of OpenAI's batch output, https://platform.openai.com/docs/guides/batch."""
    manifest = run.read_manifest()
    created = int(datetime.fromisoformat(manifest.created).timestamp())
    for index, row in _numbered_rows(run, options):
        row_id = next(iter(row.values()))
        name = f"{manifest.run_id}-{index}"
        answer: Row = {
            "id": f"batch_req_{name}",
            "custom_id": str(row_id),
            "response": None,
            "error": None,
        }
        if row["kvb_status"] == "ok":
            body = {"id": f"chatcmpl-{name}", "object": "chat.completion", "created": created}
            body |= {
                "model": manifest.model and manifest.model.path,
                "choices": [_choice(row)],
                "usage": _usage(row),
            }
            answer["response"] = {"status_code": 200, "request_id": name, "body": body}
        else:
            answer["error"] = {"code": row["kvb_error_code"], "message": row["kvb_error_message"]}
        yield _json(answer)


# https://owasp.org/www-community/attacks/CSV_Injection; some spreadsheets pass over blanks and quotes, or take
# full-width signs for plain ones. A text with an apostrophe before its formula gets another: one can always be removed.
_FORMULA = re.compile(r"[\t\r\n]|[\s'\"\ufeff]*[=+\-@＝＋－＠]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

FORMATS: dict[str, Callable[[RunDirectory, ExportOptions], Iterator[str]]] = {
    "jsonl": _jsonl,
    "openai-batch": _openai_batch,
    "csv": _csv,
}


def _json(row: Row) -> str:
    """Return a line that may be shown on a terminal."""
    return escaped(json.dumps(row, ensure_ascii=False, allow_nan=False)) + "\n"


def _choice(row: Row) -> Row:
    return {
        "index": 0,
        "message": {"role": "assistant", "content": row["output"]},
        "logprobs": None,
        "finish_reason": "length" if row["kvb_finish_reason"] == "length" else "stop",
    }


def _usage(row: Row) -> Row:
    prompt, completion = row["kvb_prompt_tokens"], row["kvb_completion_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": row["kvb_cached_prompt_tokens"]},
    }


def _columns(run: RunDirectory, options: ExportOptions) -> list[str]:
    return list(options.columns) or exported_columns(run)


def _rows(run: RunDirectory, options: ExportOptions) -> Iterator[Row]:
    """Yield the columns of each exported row, those of the single answers included."""
    return (row for _, row in _numbered_rows(run, options))


def _numbered_rows(run: RunDirectory, options: ExportOptions) -> Iterator[tuple[int, Row]]:
    """Yield the place of each exported row among all rows of the run, and its columns."""
    start = 0
    run.read_manifest()  # so that what is no run directory is no empty export
    answer_columns = _answer_columns(run, output_columns(run))
    for table in iter_tables(run):
        names = [name for name in table.column_names if not options.columns or name in options.columns]
        for i in range(len(table)):
            if options.only_new and table.column("kvb_run_id")[i].as_py() != run.run_id:
                continue
            row = {name: plain_value(table.column(name)[i]) for name in names}
            answers = table.column("kvb_answers")[i].as_py() if answer_columns else None
            texts = [answer["output"] for answer in answers or ()] or [None] * len(answer_columns)
            yield start + i, row | dict(zip(answer_columns, texts, strict=True))
        start += len(table)


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else value


def _harmless_cell(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would take for a formula; a number is none."""
    cell = _cell(value)
    is_formula = isinstance(cell, str) and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell)
    return f"'{cell}" if is_formula else cell
