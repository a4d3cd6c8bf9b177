"""The generation section: how an answer is drawn, where it ends and which form it has."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from kvbatch.corpus.openai_batch import check_arguments
from kvbatch.job_file.answer_schema import check_schema, read_schema
from kvbatch.job_file.sections.base import Count, Section

_SCHEMA_OR_PATH = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}


class GenerationSection(Section):
    """How the answer is drawn and where it ends."""

    max_new_tokens: Count = 256
    """The most tokens of an answer."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """0 always takes the likeliest token; otherwise logits are divided by the temperature and a token is drawn."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from the k likeliest tokens; 0 is off."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that together reach this probability."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Never draw a token less likely than this fraction of the likeliest."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Each row draws with a seed of its own, derived from this seed and the row's id."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer; it is cut before them."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens that end an answer, besides the model's own."""
    ignore_eos: bool = False
    """Go on after the model's own end tokens."""
    repetition_stop: bool = True
    """End an answer that repeats itself."""
    json_schema: Annotated[dict[str, Any] | None, WithJsonSchema(_SCHEMA_OR_PATH)] = None
    """The answer is JSON of this schema, given here or as the path of a file; by default answers are free text."""
    choices: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """The answer is one of these, which `{choices}` lists in the prompt."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the model's chat template: `{enable_thinking: false}`."""

    @field_validator("json_schema", mode="before")
    @classmethod
    def _read_schema(cls, value: Any) -> Any:
        return read_schema(value) if isinstance(value, str) else value

    @field_validator("json_schema")
    @classmethod
    def _is_a_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None:
            check_schema(schema)
        return schema

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_the_users(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        check_arguments(arguments, "generation.chat_template_kwargs")
        return arguments

    @field_validator("choices")
    @classmethod
    def _are_told_apart(cls, choices: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(choices)) < len(choices) or any(choice != choice.strip() for choice in choices):
            raise ValueError("each choice stands once, without spaces around it")
        return choices

    @model_validator(mode="after")
    def _asks_for_one_form(self) -> "GenerationSection":
        if self.choices and self.json_schema is not None:
            raise ValueError("generation.choices and generation.json_schema exclude each other; keep one")
        if self.stop and (self.choices or self.json_schema is not None):
            raise ValueError("generation.stop would cut an answer whose form is given; leave it out")
        return self
