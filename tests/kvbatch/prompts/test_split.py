"""Parts: no character of a document is lost, none too many is read, and they end where a reader would pause."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbatch.prompts.split import split_text
from kvbatch.prompts.tokenizer import PieceTokenizer
from tests.kvbatch.helpers import make_tokenizer

TOKENS = PieceTokenizer(make_tokenizer())
LONGEST = "👩‍👩‍👧"  # one character to the eye, 18 tokens
TEXTS = st.lists(
    st.sampled_from(
        [
            "\n",
            "\n\n",
            " ",
            "    ",
            "\r\n",
            "```\n",
            "def f(x):\n",
            "The fox. ",
            "quick",
            "é",
            "e\u0301",
            "日本",
            LONGEST,
            "<s>",
            "0",
        ]
    )
    | st.text(max_size=5).filter(lambda text: text.isprintable()),
    max_size=120,
).map("".join)


def count(text: str) -> int:
    return len(TOKENS.documents([text])[0])


def split(text, room, overlap=0, boundary="paragraph"):
    return split_text(text, TOKENS.document_ends(text), count, room=room, overlap=overlap, boundary=boundary)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(24, 200), st.integers(0, 10), st.sampled_from(["code", "paragraph", "line"]))
@example(2 * LONGEST, 24, 8, "code")
@example(2 * LONGEST, 24, 3, "code")
def test_parts_together_are_the_document_and_each_has_room(text, room, overlap, boundary):
    parts = split(text, room, overlap, boundary)
    assert "".join(text[part.start : part.end] for part in parts) == text
    assert all(count(text[part.overlap_start : part.end]) <= room for part in parts)
    assert all(part.start < part.end and part.overlap_start <= part.start for part in parts)
    for part in parts[1:]:
        shared = count(text[part.overlap_start : part.start])
        # the edges of up to three tokens lie in a character
        is_repeated = shared >= min(overlap, count(text[: part.start])) - 3
        assert is_repeated or (not shared and room < overlap + 2 * count(LONGEST))
    if len(parts) > 1:  # equally long as far as boundaries let them be
        least = max(1, (room - overlap) // 2 - 8)
        assert len(parts) <= -(-count(text) // least)


@pytest.mark.parametrize(
    ("boundary", "text", "starts"),
    [
        ("paragraph", "one fox\ntwo foxes\n\n  three\nfour\n", ["one", "  three"]),
        ("line", "a long first line without an end\nthe other line\n", ["a", "the"]),
        ("line", "One sentence stands here. Another one there.", ["One", "Another"]),
        ("line", "word " * 12, ["word", "word"]),
        ("code", "def a():\n    x = 1\n\n    return x\n\n\ndef b():\n    y\n", ["def a", "def b"]),
        ("code", "intro words\n```\nx\n\ny\n\nz\n```\nand after it\n", ["intro", "and after"]),
    ],
)
def test_parts_end_at_the_coarsest_place_near(boundary, text, starts):
    room = count(text) * 4 // 5
    parts = split(text, room, boundary=boundary)
    assert [
        text[part.start : part.end].startswith(start) for part, start in zip(parts, starts, strict=True)
    ] == [True] * 2


def test_what_is_seen_as_one_character_stays_whole():
    text = "👩‍👩‍👧" * 9 + "e\u0301" * 40
    for room in range(30, 60):
        for part in split(text, room):
            assert text[part.start] in "👩e"


def test_a_room_below_a_character_is_refused():
    assert split("日本語", 2) is None
    assert split("日本語", 3) is not None
