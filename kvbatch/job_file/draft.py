"""A first job file for documents: commented, and to be run as it is."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from kvbatch.job_file.sections import Job


@dataclass(frozen=True)
class Draft:
    """What a first job file says.

    Args:
        name: of the job.
        paths: of the documents.
        format: `auto` or `openai-batch`.
        id_column, text_column: None where the default holds.
        passthrough: columns copied to the output.
        model: `model.path`.
        max_new_tokens: of an answer.
        on_too_long: what becomes of documents beyond the context; None leaves the section out.
        lengths: what was found of the lengths, as a comment.
        preset: of the cache.
        cache: what was found of the cache, as a comment.
        memory_budget: a size.
    """

    name: str
    paths: Sequence[str]
    format: str
    id_column: str | None
    text_column: str | None
    passthrough: Sequence[str]
    model: str
    max_new_tokens: int
    on_too_long: str | None
    lengths: str
    preset: str
    cache: str
    memory_budget: str

    def text(self) -> str:
        """Return the job file."""
        return "\n".join(line for line in self._lines() if line is not None) + "\n"

    def job(self) -> Job:
        """Return the job that the file says."""
        return Job.model_validate_json(json.dumps(yaml.safe_load(self.text())))

    def _lines(self) -> list[str | None]:
        asks_itself = self.format == "openai-batch"
        paths = _quoted(self.paths[0]) if len(self.paths) == 1 else _list(self.paths)
        return [
            "# A first job for these documents: it runs as it is. The question is under prompt.template: change it.",
            "version: 1",
            f"name: {_quoted(self.name)} # the output goes to runs/{self.name}",
            "",
            "input:",
            f"  path: {paths} # files, globs or directories, from where kvbatch is run",
            f"  format: {self.format} # each row is a request" if asks_itself else None,
            f"  id_column: {_quoted(self.id_column)} # names a row in the output" if self.id_column else None,
            f"  text_column: {_quoted(self.text_column)}" if self.text_column else None,
            f"  passthrough: {_list(self.passthrough)} # copied to the output; in the prompt, as {{column}}"
            if self.passthrough
            else None,
            "  # limit: 10 # for a first try: kvbatch run -s input.limit=10",
            "",
            "model:",
            f"  path: {_quoted(self.model)} # a directory, a .gguf file, a hub id or pypi:package==version",
            *([] if asks_itself else _PROMPT),
            "",
            "generation:",
            f"  max_new_tokens: {self.max_new_tokens} # the most of an answer",
            *(self._long_document() if self.on_too_long else ()),
            "",
            "cache:",
            f"  # {self.cache}",
            f"  preset: {self.preset}",
            *(_GUARD if self.preset != "none" else ()),
            "",
            "engine:",
            f"  memory_budget: {self.memory_budget} # keys and values, beside the weights; or 60% of what is free",
        ]

    def _long_document(self) -> list[str]:
        lines = ["", "long_document:", f"  # {self.lengths}", f"  on_too_long: {self.on_too_long}"]
        if self.on_too_long == "truncate":
            lines.append("  truncation_side: middle # left out: left, middle or right")
        return lines


_PROMPT = (
    "",
    "prompt:",
    "  # {text} is the document. What stands before it is computed once for all rows.",
    "  template: |-",
    "    Read this document.",
    "",
    "    {text}",
    "",
    "    Say in two sentences what this document is about.",
)
_GUARD = (
    "",
    "quality_guard: # before the job runs, its cache is compared with the full one on some of its rows",
    "  sample: 4",
    "  action: warn # or fail, or fallback_full",
)


def job_name(text: str) -> str:
    """Return a name that a job may have, made of any text."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:100]
    return name or "job"


def _quoted(text: str) -> str:
    """Return a text as YAML has it: bare where that is safe, else as JSON; no variable of the environment in it."""
    if re.fullmatch(r"[A-Za-z_./][A-Za-z0-9_./-]*", text) and text.lower() not in _WORDS:
        return text
    return json.dumps(text, ensure_ascii=False).replace("${", "$${")


_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n", ".inf", ".nan")


def _list(names: Sequence[str]) -> str:
    return f"[{', '.join(map(_quoted, names))}]"
