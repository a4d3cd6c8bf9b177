"""Text to token ids, in two ways: our own template's pieces, and the documents between them.

Control tokens are parsed in the first and are plain text in the second, so that no document can end its turn.
"""

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from kvbatch.errors import ModelUnavailable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A tokenizer takes up to 300 bytes a character while it works (hex digits; 85 for prose), 40 GB for a row of 125 MB.
WHOLE_CHARS = 4_000_000  # of a text that is tokenized at once
PIECE_CHARS = 1_000_000  # of the pieces of a longer one
SPACE_CHARS = 1_000  # of a piece's end in which white space is looked for


class PieceTokenizer:
    """Tokenize the pieces of a prompt apart from each other.

    Args:
        tokenizer: a transformers tokenizer with a `tokenizer.json` behind it.

    Attributes:
        control_ids: tokens that documents cannot write.
        control_names: how they are spelled, the longest first.

    Raises:
        ModelUnavailable: It has none.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        from tokenizers import Tokenizer

        if not getattr(tokenizer, "is_fast", False):
            raise ModelUnavailable(
                "the model's tokenizer has no tokenizer.json; convert it with transformers (save_pretrained "
                "of the fast tokenizer) and put the file beside the weights"
            )
        self._first = tokenizer
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        chat_template = str(getattr(tokenizer, "chat_template", None) or "")
        for token in spec["added_tokens"]:
            token["special"] = token["special"] or _is_control(token["content"], chat_template)
        _continue_text(spec)
        text = json.dumps(spec)
        self._markup = Tokenizer.from_str(text)
        self._plain = Tokenizer.from_str(text)
        self._plain.encode_special_tokens = True
        for backend in (self._markup, self._plain):
            backend.no_truncation()
            backend.no_padding()
        control = {t["id"]: t["content"] for t in spec["added_tokens"] if t["special"]}
        control.pop(tokenizer.unk_token_id, None)
        self.control_ids = frozenset(control)
        names = sorted((name for name in control.values() if len(name) > 1), key=len, reverse=True)
        self.control_names = tuple(names)
        self._control_names = re.compile("|".join(map(re.escape, names))) if names else None

    def head(self, text: str, add_bos: bool) -> list[int]:
        """Tokenize the text that begins a prompt, its control tokens parsed.

        Args:
            add_bos: put the tokenizer's BOS before it, if the tokenizer is one that adds it.
        """
        ids = self._first(text, add_special_tokens=False)["input_ids"] if text else []
        if add_bos:
            start = self._first("")["input_ids"][:1]
            if start and start[0] == self._first.bos_token_id and ids[:1] != start:
                ids = start + ids
        return ids

    def markup(self, text: str) -> list[int]:
        """Tokenize one of our own later pieces, its control tokens parsed."""
        return self._markup.encode(text, add_special_tokens=False).ids

    def documents(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Tokenize foreign texts, all of them plain text whatever they spell.

        A text of more than `WHOLE_CHARS` is tokenized in pieces, to take memory of a small multiple of its own.
        """
        whole = [text for text in texts if len(text) <= WHOLE_CHARS]
        encodings = iter(self._plain.encode_batch_fast(whole, add_special_tokens=False))
        found: list[Sequence[int]] = []
        for text in texts:
            if len(text) > WHOLE_CHARS:
                found.append(
                    array("I", (token for piece in _pieces(text) for token in self.documents([piece])[0]))
                )
                continue
            ids = next(encodings).ids
            found.append(ids if self.control_ids.isdisjoint(ids) else self.document_with_ends(text)[0])
        return found

    def document_with_ends(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        """Tokenize one foreign text.

        Returns:
            ids, and for each whether the text may be cut after it without splitting a character.
        """
        if len(text) > WHOLE_CHARS:
            all_ids, all_ends = array("I"), bytearray()
            for piece in _pieces(text):
                piece_ids, ends = self.document_with_ends(piece)
                all_ids.extend(piece_ids)
                all_ends.extend(ends)
            return all_ids, all_ends
        ids, offsets = self._document(text)
        follows = [a for a, _ in offsets[1:]] + [len(text)]
        return ids, [after >= b for (_, b), after in zip(offsets, follows, strict=True)]

    def document_ends(self, text: str) -> Sequence[int]:
        """Return where each token of a foreign text ends in it, ascending, in characters."""
        ends, start = array("Q"), 0
        for piece in _pieces(text) if len(text) > WHOLE_CHARS else (text,):
            ends.extend(accumulate((start + end for _, end in self._document(piece)[1]), max))
            start += len(piece)
        return ends

    def _document(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenize one foreign text into ids, and for each the characters it stands for."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        # a unigram vocabulary finds control tokens by their spelling; break each after its first character
        marks = self._control_names.finditer(text) if self._control_names else ()
        for end in [mark.start() + 1 for mark in marks] + [len(text)]:
            encoding = self._plain.encode(text[start:end], add_special_tokens=False)
            ids += encoding.ids
            offsets += [(a + start, b + start) for a, b in encoding.offsets]
            start = end
        return ids, offsets


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text, before white space where there is some: a space goes with the word that follows it."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        last = start + PIECE_CHARS
        end = max(text.rfind(space, last - SPACE_CHARS, last) for space in " \n")
        end = end if end > start else last
        yield text[start:end]
        start = end
    yield text[start:]


def _is_control(content: str, chat_template: str) -> bool:
    """Tell whether an added token has a meaning, though it is not marked as special.

    The chat template gives one to <think> and <tool_call>, code models to <|file_sep|>. Runs of spaces have none.
    """
    is_mark = content.startswith("<|") and content.endswith("|>")
    return is_mark or (not content.isspace() and content in chat_template)


def _continue_text(spec: dict[str, Any]) -> None:
    """Let a tokenizer treat its input as the middle of a text: no space is put before it."""

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("type") == "Metaspace":
                node["prepend_scheme"] = "never"
            if node.get("type") == "ByteLevel":
                node["add_prefix_space"] = False
            if node.get("type") == "Sequence" and "normalizers" in node:
                node["normalizers"] = [n for n in node["normalizers"] if n.get("type") != "Prepend"]
            for value in node.values():
                visit(value)
        elif isinstance(node, list):
            for value in node:
                visit(value)

    visit(spec["pre_tokenizer"])
    visit(spec["normalizer"])
