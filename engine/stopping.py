"""When a sequence ends, and why."""

from collections.abc import Callable, Sequence

from engine.request import FinishReason, SamplingParams

# A sequence repeats itself if its last 128 tokens are a cycle of at most 32 tokens: at least four rounds.
REPEAT_WINDOW = 128
REPEAT_PERIOD = 32
# A look every 16 tokens costs nothing and ends a repetition at most 16 tokens late.
_REPEAT_INTERVAL = 16


def finish_reason(
    generated: Sequence[int],
    params: SamplingParams,
    end_token_ids: frozenset[int],
    decode: Callable[[Sequence[int]], str],
) -> FinishReason | None:
    """Return why the sequence ends with the last of its `generated` tokens, or None if it goes on.

    Args:
        end_token_ids: the model's own end tokens.
        decode: token ids → text, called only where there are stop strings.
    """
    last = generated[-1]
    if last in params.stop_token_ids or (last in end_token_ids and not params.ignore_eos):
        return "stop"
    if params.stop and _ends_in_stop(generated, params.stop, decode):
        return "stop"
    if len(generated) >= params.max_new_tokens:
        return "length"
    if params.repetition_stop and len(generated) % _REPEAT_INTERVAL == 0 and is_repeating(generated):
        return "repetition"
    return None


def is_repeating(tokens: Sequence[int]) -> bool:
    """Tell whether the last `REPEAT_WINDOW` tokens repeat a cycle of at most `REPEAT_PERIOD` tokens."""
    if len(tokens) < REPEAT_WINDOW:
        return False
    tail = list(tokens[-REPEAT_WINDOW:])
    return any(tail[period:] == tail[:-period] for period in range(1, REPEAT_PERIOD + 1))


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string in it."""
    found = [at for at in (text.find(string) for string in stop) if at >= 0]
    return text[: min(found)] if found else text


def _ends_in_stop(
    generated: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> bool:
    # A token holds at least one byte, so a stop string of n bytes ends within the last n tokens; the few more
    # complete a character that the cut would split.
    tail = max(len(string.encode()) for string in stop) + 4
    text = decode(generated[-tail:])
    return any(string in text for string in stop)
