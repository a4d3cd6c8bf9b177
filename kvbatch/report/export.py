"""A run's rows in other formats, in input order, a few at a time."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import IO, Any

from kvbatch.corpus.strings import plain_value
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.read_output import iter_tables
from kvbatch.text import escaped


def export_rows(run: RunDirectory, format_: str, out: IO[bytes], *, raw: bool = False) -> None:
    """Write all rows of a run.

    Args:
        format_: a key of `FORMATS`.
        out: gets UTF-8.
        raw: whether cells of CSV stay as they are, even if a spreadsheet would run them as formulas.

    Raises:
        InputError: The run directory is damaged.
    """
    lines = _csv(run, raw=raw) if format_ == "csv" else FORMATS[format_](run)
    for line in lines:
        out.write(line.encode())


def _jsonl(run: RunDirectory) -> Iterator[str]:
    """Yield one JSON object a row, with all columns."""
    for row in _rows(run):
        yield _json(row)


def _csv(run: RunDirectory, *, raw: bool = False) -> Iterator[str]:
    """Yield RFC 4180 lines below a header; null is an empty field, lists and structs are JSON."""
    cell = _cell if raw else _harmless_cell
    line = io.StringIO()
    writer = csv.writer(line)
    has_header = False
    for row in _rows(run):
        if not has_header:
            writer.writerow(cell(name) for name in row)
            has_header = True
        writer.writerow(cell(value) for value in row.values())
        yield line.getvalue()
        line.seek(0)
        line.truncate()


def _openai_batch(run: RunDirectory) -> Iterator[str]:
    """Yield the lines of OpenAI's batch output, https://platform.openai.com/docs/guides/batch."""
    manifest = run.read_manifest()
    created = int(datetime.fromisoformat(manifest.created).timestamp())
    for index, row in enumerate(_rows(run)):
        row_id = next(iter(row.values()))
        name = f"{manifest.run_id}-{index}"
        answer: dict[str, Any] = {
            "id": f"batch_req_{name}",
            "custom_id": str(row_id),
            "response": None,
            "error": None,
        }
        if row["kvb_status"] == "ok":
            body = {"id": f"chatcmpl-{name}", "object": "chat.completion", "created": created}
            body |= {"model": manifest.model.path, "choices": [_choice(row)], "usage": _usage(row)}
            answer["response"] = {"status_code": 200, "request_id": name, "body": body}
        else:
            answer["error"] = {"code": row["kvb_error_code"], "message": row["kvb_error_message"]}
        yield _json(answer)


# https://owasp.org/www-community/attacks/CSV_Injection; some spreadsheets pass over blanks and quotes, or take
# full-width signs for plain ones. What has an apostrophe before its formula gets another: one can always be taken away.
_FORMULA = re.compile(r"[\t\r\n]|[\s'\"\ufeff]*[=+\-@＝＋－＠]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

FORMATS: dict[str, Callable[[RunDirectory], Iterator[str]]] = {
    "jsonl": _jsonl,
    "openai-batch": _openai_batch,
    "csv": _csv,
}


def _json(row: dict[str, Any]) -> str:
    """Return a line that may be shown on a terminal."""
    return escaped(json.dumps(row, ensure_ascii=False, allow_nan=False)) + "\n"


def _choice(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": 0,
        "message": {"role": "assistant", "content": row["output"]},
        "logprobs": None,
        "finish_reason": "length" if row["kvb_finish_reason"] == "length" else "stop",
    }


def _usage(row: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = row["kvb_prompt_tokens"], row["kvb_completion_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": row["kvb_cached_prompt_tokens"]},
    }


def _rows(run: RunDirectory) -> Iterator[dict[str, Any]]:
    """Yield each row as what JSON can hold."""
    run.read_manifest()  # so that what is no run directory is no empty export
    for table in iter_tables(run):
        for i in range(len(table)):
            yield {
                name: plain_value(column[i])
                for name, column in zip(table.column_names, table.columns, strict=True)
            }


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else value


def _harmless_cell(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would take for a formula; a number is none."""
    cell = _cell(value)
    is_formula = isinstance(cell, str) and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell)
    return f"'{cell}" if is_formula else cell
