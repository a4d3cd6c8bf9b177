"""How long the texts of a corpus are, in characters, and a few of them to tell characters from tokens."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

SAMPLED_TEXTS = 8
SAMPLED_CHARS = 20_000  # of one text
CHARS_A_TOKEN = 4.0  # of English, where no tokenizer is at hand


@dataclass
class TextLengths:
    """Collect the lengths of texts over a pass: 8 bytes a text.

    The sampled texts are those at 0, 1, 3, 7, …, so that a file's beginning is not all that is seen.
    """

    chars: "array[int]" = field(default_factory=lambda: array("q"))
    sample: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Take one text into account."""
        number = len(self.chars) + 1
        if number & (number - 1) == 0:
            self.sample = [*self.sample, text[:SAMPLED_CHARS]][-SAMPLED_TEXTS:]
        self.chars.append(len(text))

    def tokens(self, count: Callable[[str], int] | None = None) -> Sequence[int]:
        """Estimate the tokens of each text.

        Args:
            count: returns the tokens of a text; without it, a token is `CHARS_A_TOKEN` characters.
        """
        num_chars = sum(map(len, self.sample))
        num_tokens = sum(map(count, self.sample)) if count else 0
        ratio = num_chars / num_tokens if num_tokens else CHARS_A_TOKEN
        return [max(1, round(chars / ratio)) for chars in self.chars]
