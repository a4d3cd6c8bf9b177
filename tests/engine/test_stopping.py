"""Loops are recognised, near-loops are not; text is cut where it should be and never inside a character."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.detokenizer import Detokenizer
from engine.request import SamplingParams
from engine.stopping import REPEAT_WINDOW, cut_at_stop, finish_reason, is_repeating


@pytest.mark.parametrize("period", [1, 2, 7, 32])
def test_a_cycle_is_a_repetition_only_when_it_fills_the_window(period):
    cycle = list(range(period))
    loop = [99, 98] + cycle * (REPEAT_WINDOW // period + 1)
    assert is_repeating(loop)
    assert not is_repeating(loop[: REPEAT_WINDOW - 1])
    broken = list(loop)
    broken[-40] = 77
    assert not is_repeating(broken)


def test_a_long_cycle_is_not_a_repetition():
    assert not is_repeating(list(range(33)) * 10)


def test_repetition_ends_a_row_only_where_asked():
    loop = [5] * 144
    for asked, reason in ((True, "repetition"), (False, None)):
        params = SamplingParams(max_new_tokens=500, repetition_stop=asked)
        assert finish_reason(loop, params, frozenset(), lambda ids: "") == reason


def test_text_ends_before_the_first_stop_string():
    assert cut_at_stop("one END two STOP", ("STOP", "END")) == "one "
    assert cut_at_stop("one", ("END",)) == "one"


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """Every token is one byte, but for a space and the first byte of a dash, which are one token together."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġâ"]
    vocab = {token: number for number, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "â")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("text", ["naïve", "日本", "👩‍👩‍👧 family", "\ufffd kept \ufffd", "é", "a — b —"])
def test_a_cut_splits_no_character_and_loses_none(bytes_tokenizer, text):
    ids = bytes_tokenizer.encode(text)
    decode = Detokenizer(bytes_tokenizer)
    assert decode(ids) == text
    for cut in range(len(ids) + 1):
        num_bytes = sum(len(token) for token in bytes_tokenizer.convert_ids_to_tokens(ids[:cut]))
        whole = text.encode()[:num_bytes].decode(errors="ignore")
        assert decode(ids[:cut]) == whole
