"""How the engine runs: what is fixed when it starts."""

from dataclasses import dataclass, field

from kvcache.config import KVCacheConfig


@dataclass(frozen=True)
class EngineConfig:
    """Fix the engine's memory and step sizes.

    Args:
        memory_budget_bytes: bytes for page pool and step workspace together, taken once at start.
        step_tokens: the most tokens one step computes; lowered where the budget is small (`engine.memory_division`).
        max_sequences: the most sequences that hold pages at once.
        pool_pages: blocks in the pool, where the caller knows the peak; never more than the budget holds.
        cache: the cache policy.
        repeat_token_ids: a prompt to repeat the text before it, for scorers that reconstruct the text.
        calibration_token_ids: the text of `engine.calibration`, for what is measured of a model; empty: random tokens.
        attention: name of the attention backend, or None for the device's own.
        prompt_lookup: add draft tokens to steps of few sequences (`engine.prompt_lookup`); not if deterministic.
        deterministic: compute batch-invariantly: a sequence's tokens do not depend on others in its steps, to the bit,
            on one machine with one number of threads (`engine.scheduler`). Decoding many at once takes longer.

    Raises:
        ValueError: A value out of range.
    """

    memory_budget_bytes: int
    step_tokens: int = 1024
    max_sequences: int = 64
    pool_pages: int | None = None
    cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    repeat_token_ids: tuple[int, ...] = ()
    calibration_token_ids: tuple[int, ...] = ()
    attention: str | None = None
    prompt_lookup: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.memory_budget_bytes <= 0:
            raise ValueError(f"memory_budget_bytes must be positive, not {self.memory_budget_bytes}")
        if self.step_tokens < 16:
            raise ValueError(f"step_tokens must be at least 16, not {self.step_tokens}")
        if self.max_sequences < 1:
            raise ValueError(f"max_sequences must be at least 1, not {self.max_sequences}")
