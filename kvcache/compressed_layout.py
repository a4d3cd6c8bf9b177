"""What a compressed sequence takes, in frames: the counterpart of `CacheLayout` for compressing policies.

Pure integers. Counts are upper bounds that hold whatever the scores say: a lane's last page of each list may be
partly filled, and a tier of fewer bits holds up to 63 tokens whole in every lane until their page is full.
"""

from dataclasses import dataclass

from kvcache.config import KVCacheConfig
from kvcache.page_format import PageFormat

TIER_PAGE_TOKENS = 64
WHOLE_PAGE_TOKENS = 16
# Frames are large against every page format (7 to 21 quantised pages), small against a sequence.
FRAME_TOKENS = 256


@dataclass(frozen=True)
class CompressedLayout:
    """Describe how a model's keys and values are kept under a compressing policy.

    Args:
        num_layers, num_kv_heads, head_dim: of the model.
        element_bytes: bytes of one element at the model's precision.
        whole_bytes: bytes of one element of a token kept whole.
        config: the policy.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    whole_bytes: int
    config: KVCacheConfig

    @property
    def num_lanes(self) -> int:
        return self.num_layers * self.num_kv_heads

    @property
    def whole(self) -> PageFormat:
        """Format of tokens kept whole."""
        return PageFormat(16, 16, WHOLE_PAGE_TOKENS, self.head_dim, self.whole_bytes)

    @property
    def tiers(self) -> tuple[PageFormat, ...]:
        """Format of each tier, best first."""
        return tuple(
            self.whole
            if tier.key_bits == 16
            else PageFormat(tier.key_bits, tier.value_bits, TIER_PAGE_TOKENS, self.head_dim, self.whole_bytes)
            for tier in self.config.resolved_tiers
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of a frame, the unit that sequences are counted in."""
        return 2 * FRAME_TOKENS * self.head_dim * self.whole_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all lanes at the model's precision."""
        return 2 * self.num_lanes * self.head_dim * self.element_bytes

    @property
    def arena_tokens(self) -> int:
        """Tokens of one arena in streaming mode."""
        return (self.config.delay + 1) * self.config.chunk_size

    def arena_bytes(self, num_tokens: int) -> int:
        """Bytes of an arena of that many tokens, scores and the queries' moments included."""
        moment_bytes = 4 * self.num_lanes * self.head_dim**2 if self.config.compensates else 0
        return num_tokens * (self.token_bytes + 4 * self.num_lanes) + moment_bytes

    def sequence_pages(self, num_tokens: int, shared_tokens: int = 0, new_tokens: int = 0) -> int:
        """Return the most frames that a sequence ever holds.

        Args:
            num_tokens: of prompt and answer.
            shared_tokens: of these, those cached elsewhere; they save no frames.
            new_tokens: of these, those of the answer, which add no pages where tokens are dropped.
        """
        config = self.config
        prompt_tokens = num_tokens - new_tokens
        dropped_ratio = max(0.0, 1 - sum(tier.ratio for tier in config.resolved_tiers))
        last = len(self.tiers) - 1
        whole_pages = self._whole_lane_pages(prompt_tokens) * self.num_lanes
        frames = 0
        for number, (tier, page_format) in enumerate(zip(config.resolved_tiers, self.tiers, strict=True)):
            kept = self._kept_tokens(tier.ratio, prompt_tokens)
            if number < last:  # filled up at the prompt's end
                kept += self.num_lanes * TIER_PAGE_TOKENS
            else:  # takes what of the tail would be dropped, and in decode a first page of lanes that have none
                kept += int(dropped_ratio * min(config.tail_tokens, prompt_tokens) * self.num_lanes)
                kept += self.num_lanes * TIER_PAGE_TOKENS * config.drops
            if number == 0 and not config.drops:
                kept += self.num_lanes * new_tokens
            full_pages = min(kept, self.num_lanes * num_tokens) // page_format.page_tokens
            if page_format == self.whole:
                whole_pages += full_pages + self.num_lanes
            else:
                frames += self._frames(full_pages, page_format)
        return frames + self._frames(whole_pages, self.whole)

    def sequence_bytes(self, num_tokens: int, shared_tokens: int = 0) -> int:
        """Return the bytes of `sequence_pages`."""
        return self.sequence_pages(num_tokens, shared_tokens) * self.page_bytes

    def pages_in(self, num_bytes: int) -> int:
        """Return how many whole frames fit into `num_bytes`."""
        return num_bytes // self.page_bytes

    def _whole_lane_pages(self, prompt_tokens: int) -> int:
        """Return the most pages of a lane that hold sinks, pending and recent tokens."""
        config = self.config
        num_tiers = sum(tier != self.whole for tier in self.tiers)
        sinks = -(-config.warmup_tokens // WHOLE_PAGE_TOKENS)
        recent = -(-(config.recent_tokens + TIER_PAGE_TOKENS) // WHOLE_PAGE_TOKENS)
        pending = TIER_PAGE_TOKENS // WHOLE_PAGE_TOKENS
        in_prefill, in_decode = sinks + num_tiers * pending, sinks + recent + num_tiers * pending
        # The tail fills up all tiers but the last, if there is enough of it.
        arena_tokens = config.delay * config.chunk_size if config.streaming else prompt_tokens
        tail = min(
            config.tail_tokens, min(prompt_tokens - config.warmup_tokens, arena_tokens) - config.recent_tokens
        )
        if tail >= (num_tiers - 1) * (TIER_PAGE_TOKENS - 1):
            in_decode -= max(0, num_tiers - 1) * pending
        return max(in_prefill, in_decode)

    def _kept_tokens(self, ratio: float, num_tokens: int) -> int:
        """Return the most tokens of all lanes that a tier takes of so many in each."""
        config = self.config
        # Shares are rounded in every chunk, for all lanes at once, for a layer's or for each lane.
        rounded_apart = {"calibrated": 1, "global": 1, "per_head": self.num_layers}.get(
            config.budget, self.num_lanes
        )
        num_chunks = -(-num_tokens // min(config.chunk_size, TIER_PAGE_TOKENS)) + 1
        return min(
            num_tokens * self.num_lanes,
            int(ratio * num_tokens * self.num_lanes) + num_chunks * rounded_apart,
        )

    def _frames(self, num_pages: int, page_format: PageFormat) -> int:
        return -(-num_pages // (self.page_bytes // page_format.page_bytes))
