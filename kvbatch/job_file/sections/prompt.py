"""The prompt section: what is asked of every document."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from kvbatch.job_file.sections.base import Section
from kvbatch.job_file.template import check_question, check_template, column_names

Cleaning = Literal["ansi", "invisible", "blobs"]


class PromptSection(Section):
    """What is asked of every document."""

    template: str | None = None
    """Prompt for every document. `{text}` is replaced by the document; `{id}`, `{column}` and `{choices}` are replaced
    too. Required, except with format `openai-batch`, whose rows contain their prompts."""
    system: str | None = None
    """System message before the prompt. By default none."""
    chat: Literal["auto"] | bool = "auto"
    """Apply the tokenizer's chat template to the prompt. `auto` applies it if the tokenizer has one."""
    questions: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Questions about each document, which is read once. Each question replaces `{question}`, the template's last
    placeholder."""
    clean: tuple[Cleaning, ...] = ()
    """Remove from every document: terminal sequences (`ansi`), invisible characters (`invisible`), long encoded data
    (`blobs`)."""

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
