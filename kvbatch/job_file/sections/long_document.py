"""The long_document section: what happens to a document that the model's context does not hold."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from kvbatch.job_file.sections.base import Count, Section
from kvbatch.job_file.template import check_template


class LongDocumentSection(Section):
    """What happens to a document that does not fit into the model's context."""

    on_too_long: Literal["error", "truncate", "split", "stream"] = "error"
    """A document beyond the model's context: `error` fails its row, `truncate` cuts it, `split` answers it in parts and
    puts the answers together, `stream` reads all of it at constant memory."""
    truncation_side: Literal["left", "middle", "right"] = "right"
    """The part of the document that truncation leaves out: its beginning (`left`), its middle or its end (`right`)."""
    part_tokens: Count | None = None
    """Split documents of more tokens; by default those beyond the context."""
    overlap_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens of a part that the next one repeats."""
    boundary: Literal["code", "paragraph", "line"] = "paragraph"
    """Where parts end: at the nearest place of this kind, else of the next finer kind; `code` is before an unindented
    block."""
    part_prompt: str | None = None
    """What is asked of a part, with `{text}`, `{part}` and `{num_parts}`; by default the prompt's template."""
    reduce_prompt: str | None = None
    """What is asked of the parts' answers, which are its `{text}`; by default the prompt's template."""
    keep_parts: bool = False
    """Write the answers of the parts to the output too."""

    @field_validator("part_prompt", "reduce_prompt")
    @classmethod
    def _parses(cls, text: str | None) -> str | None:
        if text is not None:
            check_template(text, num_texts=1)
        return text
