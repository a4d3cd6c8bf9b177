"""The long_document section: how a document longer than the model's context is handled."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from kvbatch.job_file.sections.base import Count, Section
from kvbatch.job_file.template import check_template


class LongDocumentSection(Section):
    """How a document that does not fit into the model's context is handled."""

    on_too_long: Literal["error", "truncate", "split", "stream"] = "error"
    """How a document longer than the model's context is handled: `error` fails its row, `truncate` cuts the document,
    `split` answers it in parts and combines the answers, `stream` reads all of it in constant memory."""
    truncation_side: Literal["left", "middle", "right"] = "right"
    """Part of the document that truncation removes: its beginning (`left`), its middle or its end (`right`)."""
    part_tokens: Count | None = None
    """Split documents of more tokens than this. By default documents longer than the context are split."""
    overlap_tokens: Annotated[int, Field(ge=0)] = 0
    """Number of tokens at the end of a part that the next part repeats."""
    boundary: Literal["code", "paragraph", "line"] = "paragraph"
    """Kind of place where parts end. Without such a place nearby, the next finer kind is used. `code` ends parts
    before an unindented block."""
    part_prompt: str | None = None
    """Prompt for a part, with `{text}`, `{part}` and `{num_parts}`. By default `prompt.template`."""
    reduce_prompt: str | None = None
    """Prompt for the answers of the parts, which replace `{text}`. By default `prompt.template`."""
    keep_parts: bool = False
    """Also write the answers of the parts to the output."""

    @field_validator("part_prompt", "reduce_prompt")
    @classmethod
    def _parses(cls, text: str | None) -> str | None:
        if text is not None:
            check_template(text, num_texts=1)
        return text
