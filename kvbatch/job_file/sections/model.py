"""The model section: which model answers, and in which precision."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvbatch.job_file.sections.base import Count, Section


class ModelSection(Section):
    """Which model answers."""

    path: str | Annotated[tuple[str, ...], Field(min_length=1)]
    """Directory, hub id, `.gguf` file or `pypi:package==version`; or a list of packages, whose data files are joined in
    order."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; by default its main branch."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the GGUF file; required for a list of packages."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of weights and arithmetic; `auto` takes what is measured to be faster on this CPU; within 10 %, and on
    a GPU, bfloat16. A run that is continued or reused keeps its own."""
    weight_quant: Literal["int8"] | None = None
    """`int8` keeps the layers' weights at 8 bits, on a CPU: half of bfloat16's bytes, and faster. By default they stay
    at `dtype`."""
    max_context: Count | None = None
    """Tokens of prompt and answer together, at most the model's own limit, which is the default."""
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
