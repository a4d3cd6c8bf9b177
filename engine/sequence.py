"""One sequence on its way through the engine. No torch: the cache is held, never looked into."""

import time
from dataclasses import dataclass, field
from typing import Any

from engine.request import FinishReason, Request


@dataclass(eq=False)
class Sequence:
    """Keep a sequence's tokens, its three counts and its share of the time.

    The counts are equal until compression, which moves `kv_len` alone:
    `num_computed_tokens`, tokens whose KV has been computed or was found in a shared prefix;
    `position`, the rotary position of the next token to compute; `kv_len`, slots its longest lane holds.
    """

    request: Request
    num_pages: int  # reserved at admission, shared pages left out
    is_prefix: bool = False  # others will continue it: its prompt does not end
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    position: int = 0
    kv_len: int = 0
    cached_prompt_tokens: int = 0
    num_chunks: int = 0
    cache: Any = None  # kvcache.SequenceCache while admitted
    random: Any = None  # torch.Generator of a sequence that samples
    constraint: Any = None  # engine.constraint.Constraint of a sequence whose output has a given form
    lookup: Any = None  # engine.prompt_lookup.Lookup of a sequence that has draft tokens
    finish_reason: FinishReason | None = None
    error_message: str | None = None
    created_s: float = field(default_factory=lambda: time.perf_counter())
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.request.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def in_prefill(self) -> bool:
        return self.num_computed_tokens < self.num_prompt_tokens

    def reuse(self, num_tokens: int) -> None:
        """Count the first `num_tokens` prompt tokens as computed: a shared prefix holds them."""
        assert self.num_computed_tokens == 0 and num_tokens < self.num_prompt_tokens
        self.cached_prompt_tokens = num_tokens
        self.num_computed_tokens = self.position = self.kv_len = num_tokens

    def spend(self, seconds: float) -> None:
        """Add the sequence's share of a step: to the prompt's time as long as no token is generated."""
        if self.num_generated:
            self.decode_s += seconds
        else:
            self.prefill_s += seconds

    def wait_s(self) -> float:
        """Return the seconds since the engine took the request that were not spent on this sequence."""
        return max(0.0, time.perf_counter() - self.created_s - self.prefill_s - self.decode_s)

    def advance(self, num_tokens: int) -> None:
        """Count the next `num_tokens` tokens as computed and cached."""
        if self.in_prefill:
            self.num_chunks += 1
        self.num_computed_tokens += num_tokens
        self.position += num_tokens
        self.kv_len += num_tokens
        assert self.num_computed_tokens <= len(self.token_ids), "more computed than there is"
