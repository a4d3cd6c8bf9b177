"""From token ids to text without splitting a character."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_TOKENS = 4  # a UTF-8 character has at most four bytes, a token at least one


class Detokenizer:
    """Decode generated tokens with a transformers tokenizer; special tokens are left out.

    Text is always decoded from the whole list of ids, never token by token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer = tokenizer

    def __call__(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`; a character whose last bytes are missing at the end is left out."""
        ids = list(token_ids)
        text = self._decode(ids)
        if not text.endswith(_REPLACEMENT) or self._ends_in_real_replacement(ids):
            return text
        # The broken character is what the last few tokens add to a text that ends well without them.
        for cut in range(1, min(_MAX_CHARACTER_TOKENS, len(ids) + 1)):
            shorter = self._decode(ids[:-cut])
            if not shorter.endswith(_REPLACEMENT) and text.startswith(shorter):
                # the first of them may hold whole characters too, such as a space
                return shorter + text[len(shorter) :].rstrip(_REPLACEMENT)
        return text.rstrip(_REPLACEMENT)

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _ends_in_real_replacement(self, ids: list[int]) -> bool:
        """Tell whether the model wrote U+FFFD itself: its three bytes, whole, at the end."""
        own = self._tokenizer.encode(_REPLACEMENT, add_special_tokens=False)
        return ids[-len(own) :] == own
