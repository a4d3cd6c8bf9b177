"""The blocks that a compressed sequence is expected to hold over time, beside `CompressedLayout`'s upper bound.

Pure arithmetic. Admission uses the bound, forecasts use the expectation. It assumes that the number of a lane's tokens
beyond its full pages is uniformly distributed from 0 to one less than a page.
"""

from math import ceil

from kvcache.sizes.compressed import TIER_PAGE_TOKENS, WHOLE_PAGE_TOKENS, CompressedLayout
from kvcache.sizes.page_format import PageFormat

# The mean of 0 to 63 tokens, and of the whole pages that so many tokens take.
_REST_TOKENS = (TIER_PAGE_TOKENS - 1) / 2
_REST_PAGES = sum(-(-rest // WHOLE_PAGE_TOKENS) for rest in range(TIER_PAGE_TOKENS)) / TIER_PAGE_TOKENS


def expected_pages(
    layout: CompressedLayout,
    prompt_tokens: int | None,
    computed_tokens: int,
    shared_tokens: int = 0,
    streamed_tokens: int = 0,
) -> int:
    """Return the blocks that a sequence holds, shared ones left out, once `computed_tokens` of its tokens are computed.

    Args:
        prompt_tokens: of the prompt as it is kept: of a streamed one, those of the longest that the context holds; None
            of a prefix, which does not end a prompt.
        computed_tokens: of prompt and answer.
        shared_tokens: of the prompt, those cached elsewhere.
        streamed_tokens: of the prompt as it is read, where that is longer.
    """
    config = layout.config
    if prompt_tokens is None:
        read_tokens, scale = computed_tokens + 1, 1.0
    else:
        read_tokens, scale = max(prompt_tokens, streamed_tokens), layout.chunk_scale(prompt_tokens)
    scored: float = _scored_in_prefill(layout, min(computed_tokens, read_tokens))
    if streamed_tokens and prompt_tokens is not None:
        scored *= layout.thinning(streamed_tokens, prompt_tokens)
    in_prefill = [tier.ratio * scale * scored for tier in config.resolved_tiers]
    sinks = -(-config.warmup_tokens // WHOLE_PAGE_TOKENS)
    full, rest = _pages(layout, in_prefill, [_REST_TOKENS] * len(in_prefill))
    whole = sinks + rest if scored else 0.0
    if prompt_tokens is not None and computed_tokens >= read_tokens:
        full, rest = _at_the_end(layout, prompt_tokens, scale, shared_tokens)
        answered = computed_tokens - read_tokens
        if not config.drops:
            full[0] += answered // TIER_PAGE_TOKENS * (TIER_PAGE_TOKENS // layout.tiers[0].page_tokens)
        recent = min(config.recent_tokens, read_tokens) + min(answered, TIER_PAGE_TOKENS)
        whole = max(whole, sinks + rest + -(-recent // WHOLE_PAGE_TOKENS))
    shared = _pages(
        layout,
        [tier.ratio * _scored_in_prefill(layout, shared_tokens) for tier in config.resolved_tiers],
        [_REST_TOKENS] * len(full),
    )[0]
    blocks = 0
    for pages, held, page_format in zip(full, shared, layout.tiers, strict=True):
        if page_format == layout.whole:
            whole += pages
        else:
            blocks += _blocks(layout, max(0.0, pages - held), page_format)
    return blocks + _blocks(layout, whole, layout.whole)


def _scored_in_prefill(layout: CompressedLayout, computed_tokens: int) -> int:
    """Return the tokens that have left the prefill buffer before the prompt's end, sinks left out."""
    return max(0, layout.chunks.compressed_tokens(computed_tokens) - layout.config.warmup_tokens)


def _at_the_end(
    layout: CompressedLayout, prompt_tokens: int, scale: float, shared_tokens: int
) -> tuple[list[float], float]:
    """Return a lane's full pages of each tier at the prompt's end, and its whole pages of what fills none."""
    config = layout.config
    recent = min(
        config.recent_tokens, config.delay * config.chunk_size if config.streaming else prompt_tokens
    )
    scored = max(0, prompt_tokens - config.warmup_tokens - recent)
    tail, tiers = layout.tail_tokens(prompt_tokens), config.resolved_tiers
    by_prefix = _scored_in_prefill(layout, shared_tokens)  # before it was known that less should be kept
    kept = [tier.ratio * (scale * (scored - tail) + (1 - scale) * by_prefix) for tier in tiers]
    better = [tier.ratio * tail for tier in tiers[:-1]]
    for number, tokens in enumerate([*better, tail - sum(better)]):
        kept[number] += tokens
    rests = [_REST_TOKENS] * len(tiers)
    for number, page_format in enumerate(layout.tiers[:-1]):
        if page_format != layout.whole and tail >= (number + 1) * TIER_PAGE_TOKENS:  # filled up from the last
            kept[number] += _REST_TOKENS
            kept[-1] = max(0.0, kept[-1] - _REST_TOKENS)
            rests[number] = 0.0
    full, rest = _pages(layout, kept, rests)
    if layout.fills_pages(prompt_tokens) and tail:
        others = [0.0] * (len(tiers) - 1)
        rest -= _pages(layout, [*others, kept[-1]], [*others, rests[-1]])[1]
    return full, rest


def _pages(
    layout: CompressedLayout, lane_tokens: list[float], rests: list[float]
) -> tuple[list[float], float]:
    """Return the full pages of each tier in a lane, and the whole pages of what fills none.

    Args:
        lane_tokens: of each tier, in one lane on average.
        rests: of these, the tokens beyond full pages.
    """
    full, whole = [], 0.0
    for tokens, rest, page_format in zip(lane_tokens, rests, layout.tiers, strict=True):
        if page_format == layout.whole:
            full.append(tokens / WHOLE_PAGE_TOKENS + 0.5 * (tokens > 0))
            continue
        rest = min(rest, tokens)
        full.append((tokens - rest) / TIER_PAGE_TOKENS)
        whole += _REST_PAGES * rest / _REST_TOKENS
    return full, whole


def _blocks(layout: CompressedLayout, lane_pages: float, page_format: PageFormat) -> int:
    return ceil(lane_pages * layout.num_lanes / (layout.page_bytes // page_format.page_bytes))
