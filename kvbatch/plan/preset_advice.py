"""Whether a cache preset saves memory on a corpus: its bytes per prompt against the full cache and other presets."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbatch.errors import JobFileError
from kvbatch.job_file.sections import CacheSection, Job
from kvbatch.plan.memory_plan import plan_memory
from kvbatch.plan.row_memory import row_need
from kvbatch.prompts.row_shape import RowShape
from kvbatch.text import counted, format_bytes

if TYPE_CHECKING:
    from kvbatch.model.handle import ModelHandle
    from kvbatch.prompts.chat import AnyPromptBuilder

WORTH_RATIO = 0.9  # of the full cache's bytes; what saves less is not worth its loss
_GENTLE = "default"


@dataclass(frozen=True)
class PresetCost:
    """What the sequences that run together take at once.

    Args:
        num_sequences: how many they are: the longest ones of the corpus.
        pages_bytes: of their keys and values.
        prefill_buffer_bytes: of the buffers that a compressing cache reads prompts through.
        full_bytes: what the full cache would take for the same sequences.
    """

    num_sequences: int
    pages_bytes: int
    prefill_buffer_bytes: int
    full_bytes: int

    @property
    def num_bytes(self) -> int:
        """Pages and prefill buffers together."""
        return self.pages_bytes + self.prefill_buffer_bytes

    @property
    def is_worth_it(self) -> bool:
        """Whether clearly less is taken than by the full cache."""
        return self.num_bytes < WORTH_RATIO * self.full_bytes


def preset_cost(
    job: Job,
    model: "ModelHandle",
    builder: "AnyPromptBuilder",
    prompt_tokens: Iterable[int],
    memory_bytes: int | None = None,
) -> PresetCost:
    """Return what a job's cache takes for prompts of these lengths, were there memory for all that run together.

    Args:
        prompt_tokens: of each row; of a document that is split, of all its parts.
        memory_bytes: the memory budget; by default as the job says.

    Raises:
        JobFileError: The budget holds no step and no row, or the cache policy does not suit the model.
    """
    budget = plan_memory(job, model, builder, known_bytes=memory_bytes).budget
    new_tokens, context = job.generation.max_new_tokens, model.config.max_context
    most = max(1, context - new_tokens)
    longest = heapq.nlargest(budget.max_sequences, prompt_tokens)
    prefix = len(builder.prefix_ids)
    needs = [
        row_need(
            RowShape((max(prefix + 1, min(tokens, most)),), (), new_tokens, prefix, "job", 0, False, most),
            budget,
        )
        for tokens in longest
    ]
    return PresetCost(
        len(needs),
        sum(need.num_pages for need in needs) * budget.layout.page_bytes,
        budget.prefill_buffer_bytes,
        sum(need.full_bytes for need in needs),
    )


def preset_advice(
    job: Job,
    model: "ModelHandle",
    builder: "AnyPromptBuilder",
    prompt_tokens: Iterable[int],
    memory_bytes: int | None = None,
) -> str | None:
    """Say in one line that a job's preset costs quality and saves no memory, and what to set instead.

    Args: as `preset_cost`.

    Returns:
        None if the preset is worth it, if the job compresses nothing, or if it streams, for which it must compress.
    """
    if not job.cache.policy.compresses or job.long_document.on_too_long == "stream":
        return None
    lengths = list(prompt_tokens)
    try:
        cost = preset_cost(job, model, builder, lengths, memory_bytes)
    except JobFileError:  # said where the memory is checked
        return None
    if cost.is_worth_it or not cost.num_sequences:
        return None
    remedy = "none"
    gentle = job.model_copy(update={"cache": CacheSection(preset=_GENTLE)})
    if preset_cost(gentle, model, builder, lengths, memory_bytes).is_worth_it:
        remedy = f"{_GENTLE} or none"
    buffers = format_bytes(cost.prefill_buffer_bytes)
    return (
        f"cache.preset {job.cache.preset} is not worth its loss for these documents: the longest "
        f"{counted(cost.num_sequences, 'sequence')} together take {format_bytes(cost.num_bytes)}, {buffers} of it "
        f"prefill buffers, and {format_bytes(cost.full_bytes)} in the full cache; set cache.preset: {remedy}"
    )
