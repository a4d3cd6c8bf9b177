"""The prompt section: what is asked of every document."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from kvbatch.job_file.sections.base import Section
from kvbatch.job_file.template import check_question, check_template, column_names

Cleaning = Literal["ansi", "invisible", "blobs"]


class PromptSection(Section):
    """What is asked of every document."""

    template: str | None = None
    """What is asked, with `{text}` where the document goes; `{id}`, `{column}` and `{choices}` are filled too.
    Required, except with format `openai-batch`, whose rows ask for themselves."""
    system: str | None = None
    """The system message before the question; by default none."""
    chat: Literal["auto"] | bool = "auto"
    """Put the prompt into the tokenizer's chat template; `auto` where it has one."""
    questions: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Several questions about one document, which is read once: each fills `{question}`, the template's last
    placeholder."""
    clean: tuple[Cleaning, ...] = ()
    """What is removed from every document: terminal sequences (`ansi`), invisible characters (`invisible`), long
    encoded data (`blobs`)."""

    @field_validator("template", "system")
    @classmethod
    def _parses(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is not None:
            check_template(text, num_texts=1 if info.field_name == "template" else 0)
        return text

    @model_validator(mode="after")
    def _asks_last(self) -> "PromptSection":
        if self.questions:
            check_question(self.template or "")
            if "question" in column_names(self.system or ""):
                raise ValueError("{question} must stand in prompt.template, not in prompt.system")
        return self
