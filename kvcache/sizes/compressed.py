"""The blocks that a compressed sequence takes: the counterpart of `CacheLayout` for compressing policies.

Pure integers. Counts are upper bounds that hold whatever the scores say: a lane's last page of each list may be
partly filled, and a tier of fewer bits holds up to 63 tokens whole in every lane until their page is full.
"""

from dataclasses import dataclass
from functools import cached_property
from math import lcm

from kvcache.config import KVCacheConfig
from kvcache.sizes.chunk_schedule import ChunkSchedule
from kvcache.sizes.full import CacheLayout, LayerGroups
from kvcache.sizes.page_format import UNIT_BYTES, PageFormat

TIER_PAGE_TOKENS = 64
WHOLE_PAGE_TOKENS = 16
# Blocks are large against every page format, small against a sequence.
MIN_BLOCK_UNITS, MAX_BLOCK_UNITS = 64, 512
LONG_PROMPT_TOKENS = 1024
# Of what is kept of a prompt: measured at 0.3 and 0.42 of 4,000 tokens, 0.35 to 0.5 were best, at 0.1 less.
TAIL_RATIO = 0.45


@dataclass(frozen=True)
class CompressedLayout(LayerGroups):
    """How a model's keys and values are kept under a compressing policy.

    Args:
        element_bytes: bytes of one element at the model's precision.
        whole_bytes: bytes of one element of a token kept whole.
        config: the policy.
    """

    element_bytes: int
    whole_bytes: int
    config: KVCacheConfig

    @cached_property
    def chunks(self) -> ChunkSchedule:
        """The schedule of a prompt's chunks."""
        return ChunkSchedule.of(self.config)

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
            else PageFormat(
                tier.key_bits,
                tier.value_bits,
                TIER_PAGE_TOKENS,
                self.head_dim,
                self.whole_bytes,
            )
            for tier in self.config.resolved_tiers
        )

    @property
    def uncompressed(self) -> CacheLayout:
        """The same model's layout where nothing is compressed."""
        return CacheLayout(self.groups, self.element_bytes, self.config.page_tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes of a block, the unit that sequences are counted in: pages of every format fill it without a rest."""
        units = lcm(*(page_format.page_units for page_format in (self.whole, *self.tiers)))
        if units > MAX_BLOCK_UNITS:
            units = MAX_BLOCK_UNITS
        return units * -(-MIN_BLOCK_UNITS // units) * UNIT_BYTES

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all lanes at the model's precision."""
        return 2 * self.num_lanes * self.head_dim * self.element_bytes

    def prefill_buffer_bytes(self, num_tokens: int) -> int:
        """Bytes of a prefill buffer of that many tokens, scores and the queries' moments included."""
        second_moment_bytes = 4 * self.num_lanes * self.head_dim**2 if self.config.compensates else 0
        return num_tokens * (self.token_bytes + 4 * self.num_lanes) + second_moment_bytes

    def sequence_pages(
        self, num_tokens: int, shared_tokens: int = 0, new_tokens: int = 0, streamed_tokens: int = 0
    ) -> int:
        """Return the most blocks that a sequence ever holds.

        Args:
            num_tokens: of prompt and answer.
            shared_tokens: of these, those cached elsewhere. They were compressed before it was known how long the
                prompt is. Their full quantized pages are shared and never evicted; the rest is copied.
            new_tokens: of these, those of the answer, which add no pages where tokens are dropped.
            streamed_tokens: of a longer prompt, of which no more is kept (`thinning`), though in more chunks.
        """
        config = self.config
        prompt_tokens = num_tokens - new_tokens
        scored, tail = self._scored_tokens(prompt_tokens), self.tail_tokens(prompt_tokens)
        scale = self.chunk_scale(prompt_tokens)
        better_ratio = sum(tier.ratio for tier in config.resolved_tiers[:-1])
        last = len(self.tiers) - 1
        whole_pages = self._whole_lane_pages(prompt_tokens, new_tokens) * self.num_lanes
        blocks = 0
        for number, (tier, page_format) in enumerate(zip(config.resolved_tiers, self.tiers, strict=True)):
            kept = tier.ratio * (scale * (scored - tail) + (1 - scale) * shared_tokens)
            kept += (tier.ratio if number < last else 1 - better_ratio) * tail
            if number < last or config.drops:  # filled up at the prompt's end
                kept += TIER_PAGE_TOKENS
            if number == 0 and not config.drops:
                kept += new_tokens
            read_tokens = max(prompt_tokens, streamed_tokens)
            kept_tokens = int(kept * self.num_lanes) + self._rounding_tokens(read_tokens)
            if page_format != self.whole:
                kept_tokens -= self._shared_page_tokens(tier.ratio, shared_tokens, new_tokens)
            most_tokens = self.num_lanes * (read_tokens + new_tokens)
            full_pages = min(kept_tokens, most_tokens) // page_format.page_tokens
            if page_format == self.whole:
                whole_pages += full_pages + self.num_lanes
            else:
                blocks += self._blocks(full_pages, page_format)
        return blocks + self._blocks(whole_pages, self.whole)

    def _shared_page_tokens(self, ratio: float, shared_tokens: int, new_tokens: int) -> int:
        """Return the fewest tokens of a tier, in all lanes, whose pages a sequence has from its prefix for good."""
        config = self.config
        # one chunk less than without overlap
        scored = self.chunks.compressed_tokens(shared_tokens - config.chunk_size)
        if not scored:
            return 0
        kept = int(ratio * max(0, scored - config.warmup_tokens)) * self.num_lanes
        in_decode = new_tokens if config.drops else 0  # pages that would have made room
        unsure = (TIER_PAGE_TOKENS + in_decode) * self.num_lanes + self._rounding_tokens(scored)
        return max(0, kept - unsure)

    def sequence_bytes(self, num_tokens: int) -> int:
        """Return the bytes of `sequence_pages`."""
        return self.sequence_pages(num_tokens) * self.page_bytes

    def pages_in(self, num_bytes: int) -> int:
        """Return how many whole blocks fit into `num_bytes`."""
        return num_bytes // self.page_bytes

    def tail_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens before the recent window are all kept at a prompt's end, where most heads attend."""
        config = self.config
        scored = self._scored_tokens(prompt_tokens)
        share = TAIL_RATIO * sum(tier.ratio for tier in config.resolved_tiers) if config.drops else 1
        in_prefill_buffer = (
            config.delay * config.chunk_size - config.recent_tokens if config.streaming else scored
        )
        return max(0, min(config.tail_tokens, in_prefill_buffer, int(share * scored)))

    def chunk_scale(self, prompt_tokens: int) -> float:
        """Return the factor of the tiers' ratios in a prompt's chunks; with the tail, the whole meets the ratios."""
        scored, tail = self._scored_tokens(prompt_tokens), self.tail_tokens(prompt_tokens)
        if not self.config.drops or scored <= tail:
            return 1.0
        ratio = sum(tier.ratio for tier in self.config.resolved_tiers)
        return (ratio * scored - tail) / (scored - tail) / ratio

    def thinning(self, streamed_tokens: int, prompt_tokens: int) -> float:
        """Return the factor by which a long prompt's chunks keep less, to take no more than `prompt_tokens` would."""
        tail = self.tail_tokens(prompt_tokens)
        scored = self._scored_tokens(max(streamed_tokens, prompt_tokens)) - tail
        return (self._scored_tokens(prompt_tokens) - tail) / scored if scored > 0 else 1.0

    def _scored_tokens(self, prompt_tokens: int) -> int:
        """Return the tokens of a prompt that are neither sinks nor, as far as the buffer holds it, recent window."""
        config = self.config
        recent = config.recent_tokens
        if config.streaming:
            recent = min(recent, config.delay * config.chunk_size)
        return max(0, prompt_tokens - config.warmup_tokens - recent)

    def fills_pages(self, prompt_tokens: int) -> bool:
        """Whether tokens that fill no page are evicted at a prompt's end: few in a long one, and costly to keep."""
        quantized = self.tiers[-1] != self.whole
        return quantized and self.config.drops and prompt_tokens >= LONG_PROMPT_TOKENS

    def _whole_lane_pages(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return the most pages of a lane that hold sinks, pending and recent tokens."""
        config = self.config
        num_tiers = sum(tier != self.whole for tier in self.tiers)
        sinks = -(-config.warmup_tokens // WHOLE_PAGE_TOKENS)
        open_tokens = min(new_tokens, TIER_PAGE_TOKENS)  # of the answer, before they close a page
        recent = -(-(config.recent_tokens + open_tokens) // WHOLE_PAGE_TOKENS)
        pending = TIER_PAGE_TOKENS // WHOLE_PAGE_TOKENS
        in_prefill, in_decode = sinks + num_tiers * pending, sinks + recent + num_tiers * pending
        tail = self.tail_tokens(prompt_tokens)  # it fills up all tiers but the last, if there is enough of it
        if tail >= (num_tiers - 1) * (TIER_PAGE_TOKENS - 1):
            in_decode -= max(0, num_tiers - 1) * pending
        if self.fills_pages(prompt_tokens) and tail:
            in_decode -= pending
        return max(in_prefill, in_decode)

    def _rounding_tokens(self, prompt_tokens: int) -> int:
        """Return the most tokens of all lanes that a tier takes beyond its ratio."""
        config = self.config
        # Shares are rounded in every chunk, for all lanes at once, for a layer's or for each lane.
        apart = {"calibrated": 1, "global": 1, "per_head": self.num_layers}.get(config.budget, self.num_lanes)
        num_chunks = -(-prompt_tokens // min(config.chunk_size, TIER_PAGE_TOKENS)) + 1
        return num_chunks * apart

    def _blocks(self, num_pages: int, page_format: PageFormat) -> int:
        return -(-num_pages // (self.page_bytes // page_format.page_bytes))
