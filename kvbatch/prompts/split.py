"""Cut a text into parts of so many tokens, between paragraphs, lines or blocks of code where that is possible.

Decides where each part ends. Builds no prompts. The parts joined without their overlap are the text.
"""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Boundary = Literal["code", "paragraph", "line"]

# Each match ends where a part may begin: a line keeps its indentation.
_PARAGRAPH = re.compile(r"\n(?:[^\S\n]*\n)+")
_PLACES: dict[str, re.Pattern[str]] = {
    # a line that begins at the margin, after an empty one, and closes nothing; the end of a fenced block
    "code": re.compile(r"\n(?:[^\S\n]*\n)+(?=[^\s)\]}])|^(?:```|~~~)[^\S\n]*\n", re.MULTILINE),
    "paragraph": _PARAGRAPH,
    "line": re.compile(r"\n"),
    "sentence": re.compile(r"[.!?。！？][\"'”’)\]]*\s+"),
    "word": re.compile(r"\s+"),
}
_FENCED = re.compile(r"^(```|~~~)[^\n]*\n.*?(?:^\1[^\S\n]*$|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Part:
    """`text[start:end]` is new in this part; it is read from `overlap_start` on."""

    overlap_start: int
    start: int
    end: int


def split_text(
    text: str,
    token_ends: Sequence[int],
    count: Callable[[str], int],
    *,
    room: int,
    overlap: int,
    boundary: Boundary,
) -> list[Part] | None:
    """Return the parts of a text, about equally long.

    Args:
        token_ends: where each token of the text ends, ascending, in characters.
        count: tokens of a piece of the text on its own; a cut inside a token may make some more.
        room: the most tokens of a part.
        overlap: of these, about so many repeat the end of the part before; none where the room does not hold a
            character beside them.
        boundary: the kind of place to cut at; where a part has none in its second half, the next finer kind is taken.

    Returns:
        The parts, or None where the room does not hold a character.
    """
    fences = [match.span() for match in _FENCED.finditer(text)] if boundary == "code" else []
    document = _Document(text, token_ends, count, room, boundary, fences)
    parts: list[Part] = []
    start = 0
    while start < len(text):
        back = start
        first = bisect_right(token_ends, start)
        if parts and overlap:
            back = _unjoined(text, token_ends[first - overlap - 1] if first > overlap else 0)
        end = document.part_end(back, start)
        if end is None and back < start:  # an emoji of several takes many tokens, and is repeated whole
            back = start
            end = document.part_end(back, start)
        if end is None:
            return None
        parts.append(Part(back, start, end))
        start = end
    return parts


@dataclass(frozen=True)
class _Document:
    """A text and how it is split: the arguments of `split_text`, and its fenced code, where no part ends."""

    text: str
    token_ends: Sequence[int]
    count: Callable[[str], int]
    room: int
    boundary: Boundary
    fences: Sequence[tuple[int, int]]

    def part_end(self, back: int, start: int) -> int | None:
        """Return where the part ends that is read from `back` and new from `start`; None: it holds no character."""
        first = bisect_right(self.token_ends, start)
        own = self.room - (first - bisect_right(self.token_ends, back))
        left = len(self.token_ends) - first
        while own > 0:
            if left <= own:
                end = len(self.text)
            else:
                aim = -(-left // -(-left // own))  # as long as the parts after it
                low, wanted, high = (self.token_ends[first + n - 1] for n in (max(1, aim // 2), aim, own))
                end = self._best_place(max(low, start + 1), wanted, max(high, start + 1))
            excess = self.count(self.text[back:end]) - self.room
            if excess <= 0:
                return end
            own = min(own, left) - excess
        return None

    def _best_place(self, low: int, wanted: int, high: int) -> int:
        """Return the place of the coarsest kind within `[low, high]`, of these the one nearest to `wanted`."""
        kinds = list(_PLACES)
        for kind in kinds[kinds.index(self.boundary) :]:
            places = [place for place in _places(self.text, kind, low, high) if not self._is_fenced(place)]
            if places:
                return min(places, key=lambda place: abs(place - wanted))
        place = _unjoined(self.text, wanted)
        return place if place >= low else wanted

    def _is_fenced(self, place: int) -> bool:
        before = bisect_left(self.fences, (place,))  # the fences, in order, that begin before the place
        return before > 0 and place < self.fences[before - 1][1]


def _places(text: str, kind: str, low: int, high: int) -> Iterator[int]:
    # from the line before `low` on: a match that ends in the window begins before it
    begin = max(0, text.rfind("\n", 0, max(0, low - 1)))
    for match in _PLACES[kind].finditer(text, begin, min(len(text), high + 1)):
        if low <= match.end() <= high:
            yield match.end()


def _unjoined(text: str, place: int) -> int:
    """Move a place to the left until it is not inside of what is seen as one character."""
    while 0 < place < len(text) and _joins(text[place - 1], text[place]):
        place -= 1
    return place


def _joins(before: str, after: str) -> bool:
    is_mark = (
        unicodedata.category(after)[0] == "M" or after == "\u200d" or "\U0001f3fb" <= after <= "\U0001f3ff"
    )
    return is_mark or before == "\u200d" or (before, after) == ("\r", "\n")
