"""From token ids to token ids: the engine over a paged KV cache.

Owns models, attention, scheduling and sampling. Knows kvcache; knows nothing of files, prompts or jobs.
"""

from engine.config import EngineConfig
from engine.request import EngineStats, Request, Result, SamplingParams

__all__ = ["LLM", "EngineConfig", "EngineStats", "Request", "Result", "SamplingParams"]


def __getattr__(name: str):
    # LLM imports torch; configs and requests must stay cheap to import.
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
