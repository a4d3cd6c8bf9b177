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
    """Columns copied to the output and usable in the prompt; `all` for every one."""
    where: str | None = None
    """SQL condition on a row's columns; rows for which it does not hold are not read."""
    limit: Count | None = None
    """Read only the first rows."""
    max_row_bytes: Count = 1024**3
    """A longer row is rejected, its neighbours run."""
    encoding_errors: Literal["reject", "replace"] = "reject"
    """What becomes of a row with bytes that are not UTF-8: rejected, or they are replaced by U+FFFD."""
    on_bad_row: Literal["reject", "fail"] = "reject"
    """What becomes of a row that cannot be read: rejected by name, or it ends the job before the model loads."""
    on_bad_file: Literal["fail", "skip"] = "fail"
    """What becomes of a file that cannot be read to its end: it ends the job before the model loads, or it is left out
    as a whole and named."""
    incremental: bool = False
    """Generate the rows that are new or changed, and reuse the answers of the others from the last run."""

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
