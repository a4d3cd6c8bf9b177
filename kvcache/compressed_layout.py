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

    def sequence_pages(self, num_tokens: int, shared_tokens: int = 0) -> int:
        """Return the most frames that a sequence of `num_tokens` ever holds; a shared prefix saves none of them."""
        config = self.config
        whole_pages = self.num_lanes * (
            -(-config.warmup_tokens // WHOLE_PAGE_TOKENS)
            + -(-(config.recent_tokens + TIER_PAGE_TOKENS) // WHOLE_PAGE_TOKENS)
        )
        frames = 0
        for tier, page_format in zip(config.resolved_tiers, self.tiers, strict=True):
            # rounding gives a chunk at most one token more than its share
            num_chunks = -(-num_tokens // min(config.chunk_size, TIER_PAGE_TOKENS)) + 1
            kept = min(
                num_tokens * self.num_lanes, int(tier.ratio * num_tokens * self.num_lanes) + num_chunks
            )
            if page_format == self.whole:
                whole_pages += kept // WHOLE_PAGE_TOKENS + self.num_lanes
            else:
                whole_pages += self.num_lanes * (TIER_PAGE_TOKENS // WHOLE_PAGE_TOKENS)
                frames += self._frames(kept // TIER_PAGE_TOKENS, page_format)
        return frames + self._frames(whole_pages, self.whole)

    def sequence_bytes(self, num_tokens: int, shared_tokens: int = 0) -> int:
        """Return the bytes of `sequence_pages`."""
        return self.sequence_pages(num_tokens, shared_tokens) * self.page_bytes

    def pages_in(self, num_bytes: int) -> int:
        """Return how many whole frames fit into `num_bytes`."""
        return num_bytes // self.page_bytes

    def _frames(self, num_pages: int, page_format: PageFormat) -> int:
        return -(-num_pages // (self.page_bytes // page_format.page_bytes))
