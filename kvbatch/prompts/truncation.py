"""Truncate a document that is too long: which of its tokens stay."""

from collections.abc import Sequence

from kvbatch.prompts.prompt import TruncationSide


def truncate(
    token_ids: Sequence[int], may_cut: Sequence[int], room_tokens: int, side: TruncationSide
) -> list[int]:
    """Return at most `room_tokens` of a document's tokens, none of which is half a character.

    Args:
        token_ids: of the whole document, which has more.
        may_cut: of each token, whether a character ends with it.
        side: the end of the document, or its middle, that is left out.
    """
    if room_tokens < 1:
        return []
    num_first = {"right": room_tokens, "left": 0, "middle": room_tokens - room_tokens // 2}[side]
    # kept: [0, num_first) and [start_of_rest, end)
    start_of_rest = len(token_ids) - (room_tokens - num_first)
    while num_first and not may_cut[num_first - 1]:
        num_first -= 1
    while start_of_rest < len(token_ids) and not may_cut[start_of_rest - 1]:
        start_of_rest += 1
    return [*token_ids[:num_first], *token_ids[start_of_rest:]]
