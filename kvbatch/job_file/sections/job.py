"""The whole job: all sections, and the validation of keys across sections."""

import os
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, model_validator

from kvbatch.job_file.environment import Environment
from kvbatch.job_file.sections.base import Section
from kvbatch.job_file.sections.cache import CacheSection
from kvbatch.job_file.sections.engine import EngineSection
from kvbatch.job_file.sections.generation import GenerationSection
from kvbatch.job_file.sections.input import InputSection
from kvbatch.job_file.sections.limits import LimitsSection
from kvbatch.job_file.sections.long_document import LongDocumentSection
from kvbatch.job_file.sections.model import ModelSection
from kvbatch.job_file.sections.output import OutputSection
from kvbatch.job_file.sections.prompt import PromptSection
from kvbatch.job_file.sections.quality_guard import QualityGuardSection
from kvbatch.job_file.template import CHOICES, check_question, column_names

PART_COLUMNS = {"part", "num_parts"}  # placeholders of `long_document.part_prompt` alone


class Job(Section):
    """One job file, complete with its defaults."""

    version: Literal[1]
    """Version of the job file format."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Name of the job, and of its output directory."""
    input: InputSection
    model: ModelSection
    prompt: PromptSection = PromptSection()
    generation: GenerationSection = GenerationSection()
    long_document: LongDocumentSection = LongDocumentSection()
    cache: CacheSection = CacheSection()
    quality_guard: QualityGuardSection | None = None
    engine: EngineSection = EngineSection()
    limits: LimitsSection = LimitsSection()
    output: OutputSection = OutputSection()
    _environment: Environment = PrivateAttr(default_factory=Environment)

    @model_validator(mode="after")
    def _something_is_asked(self) -> "Job":
        if self.input.format != "openai-batch":
            if self.prompt.template is None:
                raise ValueError("prompt.template is missing; add what is asked of every document")
            return self
        unused = {
            "prompt": self.prompt != PromptSection(),
            "input.id_column": self.input.id_column is not None,
            "input.text_column": self.input.text_column != InputSection.model_fields["text_column"].default,
        }
        for key, is_set in unused.items():
            if is_set:
                raise ValueError(f"{key} has no meaning with input.format openai-batch; leave it out")
        if self.long_document.on_too_long != "error":
            raise ValueError("long_document.on_too_long must be error with input.format openai-batch")
        return self

    @model_validator(mode="after")
    def _columns_are_listed(self) -> "Job":
        if self.input.passthrough != "all":
            for key, names in self.prompt_columns.items():
                for name in names:
                    if name not in self.input.passthrough:
                        raise ValueError(
                            f"{key} uses {{{name}}}, which input.passthrough does not list; "
                            + ("set generation.choices, or " if name == CHOICES else "")
                            + f"add {name!r} to input.passthrough, or double the braces to mean them literally"
                        )
        return self

    @model_validator(mode="after")
    def _parts_are_asked(self) -> "Job":
        if self.prompt.questions:
            templates = {
                "prompt.template": self.prompt.template,
                "long_document.part_prompt": self.long_document.part_prompt,
                "long_document.reduce_prompt": self.long_document.reduce_prompt,
            }
            for key, template in templates.items():
                if template is not None:
                    try:
                        check_question(template, has_choices=bool(self.generation.choices))
                    except ValueError as error:
                        raise ValueError(f"{key}: {error}") from error
        return self

    @model_validator(mode="after")
    def _tells_the_template(self) -> "Job":
        if self.generation.chat_template_kwargs and self.prompt.chat is False:
            raise ValueError(
                "generation.chat_template_kwargs has no meaning with prompt.chat: false; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _can_stream(self) -> "Job":
        if self.long_document.on_too_long == "stream":
            if not self.cache.policy.can_stream:
                raise ValueError(
                    "long_document.on_too_long: stream keeps the tokens that matter, which a cache policy must score "
                    "chunk by chunk; set cache.preset, to default for one"
                )
            if self.quality_guard and self.quality_guard.action == "fallback_full":
                raise ValueError(
                    "quality_guard.action: fallback_full cannot stream, since the full cache does not; use warn or fail"
                )
            if len(self.prompt.questions) > 1:
                raise ValueError(
                    "long_document.on_too_long: a streamed document cannot be shared by several prompt.questions; "
                    "ask one, or split"
                )
        return self

    @property
    def environment(self) -> Environment:
        """Which of its values came from the environment."""
        return self._environment

    def with_environment(self, environment: Environment) -> "Job":
        """Return the job with what it took from the environment."""
        job = self.model_copy()
        job._environment = environment
        return job

    @property
    def prompt_columns(self) -> dict[str, list[str]]:
        """The columns that each template of the job needs beside text and id."""
        constant = set(self.prompt_values)
        own = constant | ({"question"} if self.prompt.questions else set())
        templates = {
            "prompt.template": (self.prompt.template, own),
            "prompt.system": (self.prompt.system, constant),
            "long_document.part_prompt": (self.long_document.part_prompt, own | PART_COLUMNS),
            "long_document.reduce_prompt": (self.long_document.reduce_prompt, own),
        }
        return {
            key: [name for name in column_names(template or "") if name not in known]
            for key, (template, known) in templates.items()
        }

    @property
    def prompt_values(self) -> dict[str, str]:
        """Placeholders that are the same for every row, with what stands there."""
        return {CHOICES: ", ".join(self.generation.choices)} if self.generation.choices else {}

    @property
    def output_dir(self) -> str:
        """The directory that holds the job's runs."""
        return os.path.expanduser(self.output.dir or f"runs/{self.name}")
