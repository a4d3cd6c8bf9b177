"""Batch LLM jobs over long documents: from a job file to Parquet."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbatch.run.api import run as run

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `kvbatch.run`, which is heavy, when it is first called."""
    if name == "run":
        import kvbatch.run as package

        return package
    raise AttributeError(f"module 'kvbatch' has no attribute {name!r}")
