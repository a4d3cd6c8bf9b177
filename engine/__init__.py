"""From token ids to token ids: the engine over a paged KV cache.

It has models, attention, scheduling and sampling, over kvcache. Corpora, prompts and jobs are in kvbatch.
"""

from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.request import EngineStats, Request, Result, SamplingParams

__all__ = ["LLM", "EngineConfig", "EngineCore", "EngineStats", "Request", "Result", "SamplingParams"]

if TYPE_CHECKING:
    from engine.engine_core import EngineCore
    from engine.llm import LLM


def __getattr__(name: str) -> Any:
    # These two import torch; configs and requests must stay cheap to import.
    if name == "EngineCore":
        from engine.engine_core import EngineCore

        return EngineCore
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
