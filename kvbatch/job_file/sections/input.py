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
    """Format of the files. `auto` detects it from their bytes. The rows of `openai-batch` are requests for chat
    completions."""
    id_column: str | None = None
    """Column of the row ids. By default `id`; without that column, ids are made from file, row number and content."""
    text_column: str = "text"
    """Column of the documents. A dotted path selects a field inside objects."""
    passthrough: Literal["all"] | tuple[str, ...] = ()
    """Columns copied to the output and usable in the prompt. `all` copies every column except the text."""
    where: str | None = None
    """SQL condition on the columns of a row. Rows that do not meet it are skipped. By default all rows run."""
    limit: Count | None = None
    """Number of rows to read, from the first on. By default all rows are read."""
    max_row_bytes: Count = 1024**3
    """Maximum bytes of a JSON line or a Parquet text. A row with more is rejected."""
    encoding_errors: Literal["reject", "replace"] = "reject"
    """How bytes that are not UTF-8 are handled: `reject` rejects their row, `replace` replaces them with U+FFFD."""
    on_bad_row: Literal["reject", "fail"] = "reject"
    """How a row that cannot be read is handled: `reject` writes it to the dead letters and continues, `fail` ends the
    job before the model loads."""
    on_bad_file: Literal["fail", "skip"] = "fail"
    """How a file that cannot be read to its end is handled: `fail` ends the job before the model loads, `skip` skips
    the whole file and reports it."""
    incremental: bool = False
    """Run only rows that are new or changed. Reuse the answers of the last run for the other rows."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The path, or all of them, as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path

    def spec(self) -> InputSpec:
        """Return the settings that the corpus reads: all keys except those that select the rows of a run.

        Raises:
            JobFileError: A passthrough column has the name of an output column.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return InputSpec(paths=self.paths, **{k: v for k, v in values.items() if k not in _NOT_IN_SPEC})
