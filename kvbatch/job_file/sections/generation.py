"""The generation section: how the tokens of an answer are sampled, where it ends and which form it has."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from kvbatch.corpus.openai_batch import check_arguments
from kvbatch.job_file.answer_schema import check_schema, read_schema
from kvbatch.job_file.sections.base import Count, Section

_SCHEMA_OR_PATH = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}


class GenerationSection(Section):
    """How the tokens of an answer are sampled and where it ends."""

    max_new_tokens: Count = 256
    """Maximum number of tokens in an answer."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """0 always takes the likeliest token. Otherwise logits are divided by the temperature and a token is sampled."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k likeliest tokens. 0 is off."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together reach this probability."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Never sample a token whose probability is below this fraction of the likeliest token's."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of sampling. Each row samples with its own seed, derived from this one and the row's id."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer. The answer is cut before the string."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens that end an answer, in addition to the model's own end tokens."""
    ignore_eos: bool = False
    """Continue an answer after the model's own end tokens."""
    repetition_stop: bool = True
    """End an answer that repeats itself."""
    json_schema: Annotated[dict[str, Any] | None, WithJsonSchema(_SCHEMA_OR_PATH)] = None
    """Constrain answers to JSON of this schema, given here or as the path of a file. By default answers are
    free text."""
    choices: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Constrain answers to one of these texts. `{choices}` lists them in the prompt."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments for the model's chat template, for example `{enable_thinking: false}`."""

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
