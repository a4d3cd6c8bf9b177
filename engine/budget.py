"""From one byte budget to a page pool and a step size; planner and engine both ask here. No torch.

The workspace is what a step's activations take; it is given at most a tenth of the budget, so a small budget
means shorter steps (and so smaller chunks), never a step that outgrows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import BudgetError
from engine.overlap import overlaps_compression
from engine.prompt_lookup import STEP_TOKENS
from engine.scheduler import ALONE_DECODES
from kvcache.sizes.full import CacheLayout

if TYPE_CHECKING:
    from engine.models.config import ModelConfig  # imports transformers, which a planner may not need yet
    from kvcache.sizes.compressed import CompressedLayout

MIN_STEP_TOKENS = 16
WORKSPACE_RATIO = 0.1
PREFILL_BUFFER_RATIO = 0.25


@dataclass(frozen=True)
class Budget:
    """What the byte budget was divided into. `capacity_pages` is what rows may hold at once, `num_logits` after how
    many tokens of a step the next one may be chosen.

    Prefill buffers are for compressing policies: `num_prefill_buffers` sequences of `prefill_buffer_tokens` tokens
        are in prefill at once. Where
    compression runs beside the model (`overlaps_compression`), they hold one chunk more.
    """

    layout: CacheLayout | CompressedLayout
    workspace_bytes: int
    step_tokens: int
    max_sequences: int
    capacity_pages: int
    prefill_buffer_tokens: int = 0
    num_prefill_buffers: int = 0
    overlaps_compression: bool = False
    num_logits: int = 0

    @property
    def prefill_buffer_bytes(self) -> int:
        """Bytes of all prefill buffers."""
        return self.num_prefill_buffers and self.num_prefill_buffers * self.layout.prefill_buffer_bytes(
            self.prefill_buffer_tokens
        )


def cache_layout(
    model: ModelConfig, config: EngineConfig, element_bytes: int
) -> CacheLayout | CompressedLayout:
    """Return the page layout of a model under a cache policy.

    Raises:
        ValueError: The policy does not suit the model.
    """
    shape = (model.num_layers, model.num_kv_heads, model.head_dim)
    whole_bytes = 2 if config.cache.dtype == "bfloat16" else element_bytes
    if not config.cache.compresses:
        return CacheLayout(*shape, whole_bytes, config.cache.page_tokens)
    from kvcache.sizes.compressed import CompressedLayout

    if model.head_dim % 16:
        raise ValueError(
            f"a compressed cache needs heads of a multiple of 16, not {model.head_dim}; use preset none"
        )
    weights = config.cache.layer_budget
    if weights and len(weights) != model.num_layers:
        raise ValueError(f"layer_budget has {len(weights)} weights, but the model {model.num_layers} layers")
    return CompressedLayout(*shape, element_bytes, whole_bytes, config.cache)


def divide_budget(
    model: ModelConfig, config: EngineConfig, element_bytes: int, device: str = "cpu"
) -> Budget:
    """Divide `config.memory_budget_bytes` between step workspace and page pool.

    Args:
        element_bytes: bytes of one element of weights, activations and cache.
        device: where all of it lies.

    Raises:
        BudgetError: The budget does not hold the smallest step and one page of every lane.
        ValueError: The cache policy does not suit the model.
    """
    layout = cache_layout(model, config, element_bytes)
    if config.cache.compresses and device != "cpu":
        raise ValueError(f"a compressed cache runs on a CPU alone so far, not on {device}; use preset none")
    # Residual and its norm, q k v and the attention's output and its partner in a merge, gate, up and their product.
    token_elements = (
        3 * model.hidden_size
        + (4 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        + 3 * model.intermediate_size
    )
    token_bytes = token_elements * element_bytes
    limit = int(config.memory_budget_bytes * WORKSPACE_RATIO)
    step_tokens = max(MIN_STEP_TOKENS, min(config.step_tokens, limit // token_bytes))
    # Logits are float32 and only of the sequences that sample; a quarter of the step keeps room for prefill.
    most_logits = max(1, limit // (4 * model.vocab_size))
    max_sequences = max(1, min(config.max_sequences, step_tokens // 4 * 3, most_logits))
    workspace_tokens = max(step_tokens, _reconstruction_tokens(config))
    num_logits = max_sequences
    if config.deterministic:
        num_logits = max(num_logits, ALONE_DECODES)
    elif config.prompt_lookup:  # as far as there is room
        num_logits = max(num_logits, min(STEP_TOKENS, most_logits))
    workspace_bytes = workspace_tokens * token_bytes + num_logits * 4 * model.vocab_size
    overlaps = overlaps_compression(config.cache, device)
    if _cuts_no_chunks(config) and step_tokens < config.cache.chunk_size:
        raise BudgetError(
            f"scorer {config.cache.scorer} judges whole chunks of {config.cache.chunk_size} tokens, but a step has "
            f"{step_tokens}; give engine.memory_budget and engine.step_tokens more, or cache.chunk_size less"
        )
    prefill_buffer_tokens, num_prefill_buffers, prefill_buffer_bytes = _prefill_buffers(
        model, layout, config, step_tokens, overlaps
    )
    pages = layout.pages_in(config.memory_budget_bytes - workspace_bytes - prefill_buffer_bytes)
    if pages < layout.sequence_pages(1):
        raise BudgetError(
            f"a memory budget of {config.memory_budget_bytes:,} bytes leaves no room for a sequence: a step of "
            f"{workspace_tokens} tokens takes {workspace_bytes:,} bytes, prefill buffers {prefill_buffer_bytes:,} "
            f"and the shortest sequence {layout.sequence_bytes(1):,}; give engine.memory_budget more"
        )
    if config.pool_pages is not None:
        pages = min(pages, config.pool_pages)
    return Budget(
        layout,
        workspace_bytes,
        step_tokens,
        max_sequences,
        pages,
        prefill_buffer_tokens,
        num_prefill_buffers,
        overlaps,
        num_logits,
    )


def _cuts_no_chunks(config: EngineConfig) -> bool:
    """Whether the scorer looks at a chunk's queries together, so that it must be computed in one step."""
    if not config.cache.judges:
        return False
    from kvcache.scorers.registry import get_scorer

    return get_scorer(config.cache.scorer).distance is None


def _reconstruction_tokens(config: EngineConfig) -> int:
    """Return the tokens of a pass in which a chunk is repeated for its scores; it cannot be made shorter."""
    if not config.cache.judges:
        return 0
    from kvcache.scorers.registry import get_scorer

    if not get_scorer(config.cache.scorer).reconstructs:
        return 0
    return config.cache.chunk_size + len(config.repeat_token_ids)


def _prefill_buffers(
    model: ModelConfig,
    layout: CacheLayout | CompressedLayout,
    config: EngineConfig,
    step_tokens: int,
    overlaps: bool,
) -> tuple[int, int, int]:
    """Return tokens and number of prefill buffers, and their bytes: enough to fill a step, and one for a prefix."""
    cache = config.cache
    if not cache.compresses:
        return 0, 0, 0
    tokens = (
        layout.prefill_buffer_tokens + overlaps * cache.chunk_size if cache.streaming else model.max_context
    )
    wanted = -(-step_tokens // cache.chunk_size) + 1
    affordable = int(config.memory_budget_bytes * PREFILL_BUFFER_RATIO) // layout.prefill_buffer_bytes(tokens)
    num = max(2, min(wanted, affordable))
    return tokens, num, num * layout.prefill_buffer_bytes(tokens)
