"""Divide one byte budget into page pool, prefill buffers and step workspace, for planner and engine. No torch.

The workspace holds a step's activations. It takes at most a tenth of the budget, so a small budget means shorter
steps (and so smaller chunks), never a step that outgrows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import BudgetError
from engine.prompt_lookup import STEP_TOKENS
from engine.request_pages import request_pages
from engine.scheduler import ALONE_DECODES
from kvcache.sizes.full import CacheLayout, LayerGroup

if TYPE_CHECKING:
    from engine.models.config import ModelConfig  # imports transformers, which a planner may not need yet
    from kvcache.sizes.compressed import CompressedLayout

MIN_STEP_TOKENS = 16
WORKSPACE_RATIO = 0.1
PREFILL_BUFFER_RATIO = 0.25


@dataclass(frozen=True)
class Budget:
    """The parts of a byte budget.

    Attributes:
        layout: how the model's keys and values are cut into pages.
        workspace_bytes: bytes of a step's activations and logits.
        step_tokens: the most tokens of a step.
        max_sequences: the most sequences running at once.
        capacity_pages: pages that all sequences may hold together.
        prefill_buffer_tokens: tokens of one prefill buffer; 0 where nothing is compressed.
        num_prefill_buffers: the most sequences in prefill at once; 0 where nothing is compressed.
        overlaps_compression: chunks are compressed in the background, and prefill buffers hold one chunk more.
        num_logits: the most tokens of a step whose logits are computed.
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
        if isinstance(self.layout, CacheLayout):
            return 0
        return self.num_prefill_buffers * self.layout.prefill_buffer_bytes(self.prefill_buffer_tokens)


def cache_layout(
    model: ModelConfig, config: EngineConfig, element_bytes: int
) -> CacheLayout | CompressedLayout:
    """Return the page layout of a model under a cache policy.

    Raises:
        ValueError: The policy does not suit the model.
    """
    groups = (LayerGroup(model.num_layers, model.num_kv_heads, model.head_dim),)
    whole_bytes = 2 if config.cache.dtype == "bfloat16" else element_bytes
    if not config.cache.compresses:
        return CacheLayout(groups, whole_bytes, config.cache.page_tokens)
    from kvcache.sizes.compressed import CompressedLayout

    if model.head_dim % 16:
        raise ValueError(
            f"a compressed cache needs heads of a multiple of 16, not {model.head_dim}; use preset none"
        )
    weights = config.cache.layer_budget
    if weights and len(weights) != model.num_layers:
        raise ValueError(f"layer_budget has {len(weights)} weights, but the model {model.num_layers} layers")
    return CompressedLayout(groups, element_bytes, whole_bytes, config.cache)


def divide_budget(
    model: ModelConfig, config: EngineConfig, element_bytes: int, device: str = "cpu"
) -> Budget:
    """Divide `config.memory_budget_bytes` between step workspace, prefill buffers and page pool.

    Args:
        element_bytes: bytes of one element of weights, activations and cache.
        device: where the memory lies.

    Raises:
        BudgetError: The budget does not hold the smallest step and one page of every lane.
        ValueError: The cache policy does not suit the model.
    """
    layout = cache_layout(model, config, element_bytes)
    if config.cache.compresses and device != "cpu":
        raise ValueError(f"a compressed cache runs on a CPU, not on {device}; use preset none")
    # The hidden states, their norm and a layer's output; queries, keys, values, the attention's output and two of its
    # partial results; gate, up and their product.
    token_elements = (
        3 * model.hidden_size
        + (4 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        + 3 * model.intermediate_size
    )
    token_bytes = token_elements * element_bytes
    limit = int(config.memory_budget_bytes * WORKSPACE_RATIO)
    step_tokens = max(MIN_STEP_TOKENS, min(config.step_tokens, limit // token_bytes))
    # Logits are float32, one row for each sequence in decode. A quarter of the step stays free for prefill.
    most_logits = max(1, limit // (4 * model.vocab_size))
    max_sequences = max(1, min(config.max_sequences, step_tokens // 4 * 3, most_logits))
    workspace_tokens = max(step_tokens, _reconstruction_tokens(config))
    num_logits = max_sequences
    if config.deterministic:
        num_logits = max(num_logits, ALONE_DECODES)
    elif config.prompt_lookup:
        num_logits = max(num_logits, min(STEP_TOKENS, most_logits))
    workspace_bytes = workspace_tokens * token_bytes + num_logits * 4 * model.vocab_size
    overlaps = bool(config.cache.overlap) and layout.chunks.streaming
    if layout.chunks.whole_chunks and step_tokens < config.cache.chunk_size:
        raise BudgetError(
            f"scorer {config.cache.scorer} needs whole chunks of {config.cache.chunk_size} tokens, but a step has "
            f"{step_tokens}",
            increase=("memory_budget_bytes", "step_tokens"),
            decrease=("cache.chunk_size",),
        )
    prefill_buffer_tokens = num_prefill_buffers = prefill_buffer_bytes = 0
    if not isinstance(layout, CacheLayout):
        prefill_buffer_tokens = model.max_context
        if layout.chunks.streaming:
            prefill_buffer_tokens = layout.chunks.buffer_tokens(overlaps=overlaps)
        buffer_bytes = layout.prefill_buffer_bytes(prefill_buffer_tokens)
        wanted = -(-step_tokens // config.cache.chunk_size) + 1  # enough to fill a step, and one for a prefix
        affordable = int(config.memory_budget_bytes * PREFILL_BUFFER_RATIO) // buffer_bytes
        num_prefill_buffers = max(2, min(wanted, affordable))
        prefill_buffer_bytes = num_prefill_buffers * buffer_bytes
    pages = layout.pages_in(config.memory_budget_bytes - workspace_bytes - prefill_buffer_bytes)
    fewest_pages = request_pages(layout, 1, 0)
    if pages < fewest_pages:
        raise BudgetError(
            f"a memory budget of {config.memory_budget_bytes:,} bytes leaves no room for a sequence: a step of "
            f"{workspace_tokens} tokens takes {workspace_bytes:,} bytes, prefill buffers {prefill_buffer_bytes:,} "
            f"and the shortest sequence {fewest_pages * layout.page_bytes:,}",
            increase=("memory_budget_bytes",),
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


def _reconstruction_tokens(config: EngineConfig) -> int:
    """Return the tokens of a pass in which the model repeats a chunk for its scores; 0 if the scorer needs none."""
    if not config.cache.needs_scores:
        return 0
    from kvcache.scorers.registry import get_scorer

    if not get_scorer(config.cache.scorer).reconstructs:
        return 0
    return config.cache.chunk_size + len(config.repeat_token_ids)
