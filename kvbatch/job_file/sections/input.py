"""The input section: which documents are read."""

from typing import Literal

from kvbatch.corpus.spec import InputSpec
from kvbatch.job_file.sections.base import Count, Section

_NOT_IN_SPEC = ("path", "incremental")


class InputSection(Section):
    """Which documents are read, and which of their columns."""

    path: str | tuple[str, ...]
    """Files, globs or directories."""
    format: Literal["auto", "jsonl", "parquet", "openai-batch"] = "auto"
    """What the files are; `auto` reads it from their bytes; `openai-batch`: rows are requests for chat completions."""
    id_column: str | None = None
    """Column of the row ids; by default `id` where there is one, else made up from file, row and content."""
    text_column: str = "text"
    """Column of the documents; a dotted path reaches into objects."""
    passthrough: Literal["all"] | tuple[str, ...] = ()
    """Columns copied to the output and usable in the prompt; `all` copies every column but the text."""
    where: str | None = None
    """SQL condition on the columns of a row; rows that do not meet it are left out. By default all rows run."""
    limit: Count | None = None
    """Read only so many rows, the first ones; by default all."""
    max_row_bytes: Count = 1024**3
    """Bytes of a JSON line or a Parquet text; a longer row is rejected."""
    encoding_errors: Literal["reject", "replace"] = "reject"
    """Bytes that are not UTF-8: `reject` rejects their row, `replace` puts U+FFFD in their place."""
    on_bad_row: Literal["reject", "fail"] = "reject"
    """A row that cannot be read: `reject` writes it to the dead letters and goes on, `fail` ends the job before the
    model loads."""
    on_bad_file: Literal["fail", "skip"] = "fail"
    """A file that cannot be read to its end: `fail` ends the job before the model loads, `skip` leaves the whole file
    out and names it."""
    incremental: bool = False
    """Run only rows that are new or changed, and reuse the answers of the last run for the others."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The path, or all of them, as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path

    def spec(self) -> InputSpec:
        """Return what the corpus needs of it: all but the keys that say which rows a run does.

        Raises:
            JobFileError: A passthrough column has the name of an output column.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return InputSpec(paths=self.paths, **{k: v for k, v in values.items() if k not in _NOT_IN_SPEC})
