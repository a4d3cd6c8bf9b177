"""From a document to the token ids of its prompt.

The template and the model's chat template are rendered once, around placeholders, and tokenized once.
Documents and column values are tokenized apart, as plain text, and put between. What precedes the first
placeholder is the same for every row, so its keys and values can be too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvbatch.job_file.sections import LongDocumentSection, PromptSection
from kvbatch.job_file.template import Piece, parse_template
from kvbatch.prompts.chat_pieces import render_chat, uses_chat
from kvbatch.prompts.chat_template import ChatTemplate
from kvbatch.prompts.cleaning import clean
from kvbatch.prompts.prompt import Outcome, Prompt, PromptDocument
from kvbatch.prompts.tokenizer import PieceTokenizer
from kvbatch.prompts.truncation import truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PROBE_TOKENS = 64  # probes cost their share of every chunk of 256

REPEAT = "\n\nRepeat the previous text exactly:\n"


class PromptBuilder:
    """Build the prompts of a job.

    Args:
        tokenizer: the model's, from transformers.
        prompt: the job file's section. Where it has several questions, a document is read once for all of them.
        tokens: made of the tokenizer earlier, which takes a second.
        chat: the model's chat template, as the job renders it; by default at this time.
        values: of placeholders that are the same for every row.

    Attributes:
        prefix_ids: tokens that begin every prompt.
        tokens: of texts.

    Raises:
        JobFileError: The section and the model's chat template do not go together.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        prompt: PromptSection,
        tokens: PieceTokenizer | None = None,
        chat: ChatTemplate | None = None,
        values: Mapping[str, str] | None = None,
    ):
        self._tokenizer, self._section = tokenizer, prompt
        self.tokens = tokens or PieceTokenizer(tokenizer)
        self._clean, self._values = prompt.clean, values or {}
        is_chat = uses_chat(tokenizer, prompt)
        self._chat = (chat or ChatTemplate(tokenizer)) if is_chat else None
        pieces = render_chat(self._chat, prompt, self._values) if self._chat else self._parse(prompt)
        head = ""
        if pieces and not pieces[0].is_placeholder:
            head = pieces.pop(0).text
        self.prefix_ids: list[int] = self.tokens.head(head, add_bos=not is_chat)
        # static token ids, or the name of what stands there
        self._rest = [
            piece.text if piece.is_placeholder else self.tokens.markup(piece.text) for piece in pieces
        ]
        questions = self.tokens.documents(prompt.questions) if prompt.questions else []
        self._tails: list[list[int]] = []
        if questions:
            place = self._rest.index("question")
            after = [token for part in self._rest[place + 1 :] if isinstance(part, list) for token in part]
            self._tails = [[*question, *after] for question in questions]
            del self._rest[place:]
        if len(questions) == 1:  # nothing to share
            self._rest.append(self._tails.pop())
        written = parse_template(prompt.template or "", self._values)
        asks_after = questions or (not written[-1].is_placeholder and written[-1].text.strip())
        before = "" if asks_after or written[0].is_placeholder else written[0].text.strip()
        self._question_before: list[int] = self.tokens.markup(before) if before else []

    @property
    def num_static_tokens(self) -> int:
        """Tokens of a prompt before anything is put into it, with the longest question."""
        static = sum(len(part) for part in self._rest if isinstance(part, list))
        return len(self.prefix_ids) + static + max(map(len, self._tails), default=0)

    @property
    def probe_ids(self) -> list[int]:
        """The question's own tokens, by whose attention a compressed cache scores a document's tokens while it is read.

        What follows the document, down to the head of the answer; where the question stands before the document,
        that, and then what follows. At most `MAX_PROBE_TOKENS`, the last ones. None for several questions: what a
        document keeps must serve each of them.
        """
        if self._tails:
            return []
        tail = self._rest[-1] if self._rest and isinstance(self._rest[-1], list) else []
        return (self._question_before + tail)[-MAX_PROBE_TOKENS:]

    def markup(self, text: str) -> list[int]:
        """Return the token ids of a text of our own, its control tokens parsed."""
        return self.tokens.markup(text)

    def with_template(self, template: str, *, questions: bool = True) -> "PromptBuilder":
        """Return a builder for another template, whose texts are clean.

        Args:
            questions: ask the section's questions; otherwise `{question}` is a column.
        """
        changes = {"template": template, "clean": ()} | ({} if questions else {"questions": ()})
        section = self._section.model_copy(update=changes)
        return PromptBuilder(self._tokenizer, section, self.tokens, self._chat, self._values)

    def _parse(self, prompt: PromptSection) -> list[Piece]:
        system = f"{prompt.system}\n\n" if prompt.system else ""
        return parse_template(system + (prompt.template or ""), self._values)

    @property
    def tail_tokens(self) -> tuple[int, ...]:
        """Tokens of several questions, each with what follows it."""
        return tuple(map(len, self._tails))

    def clean(self, document: PromptDocument) -> str:
        """Return a document's text as prompts have it."""
        return clean(document.text or "", self._clean)

    def count(self, text: str) -> int:
        """Return the tokens of a foreign text."""
        return len(self.encode(text))

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a foreign text."""
        return self.tokens.documents([text])[0]

    def token_ends(self, text: str) -> Sequence[int]:
        """Return where each token of a foreign text ends, in characters."""
        return self.tokens.document_ends(text)

    def num_frame_tokens(self, document: PromptDocument) -> int:
        """Return the tokens of a prompt without the document's text."""
        values = (_value(document, part) for part in self._rest if isinstance(part, str) and part != "text")
        return self.num_static_tokens + sum(self.count(value) for value in values if value)

    def build_around(self, document: PromptDocument, text_ids: Sequence[int]) -> Prompt:
        """Build a prompt with these tokens in the place of the document's text, without a limit."""
        filled: list[Sequence[int]] = []
        for name in (part for part in self._rest if isinstance(part, str)):
            value = "" if name == "text" else _value(document, name)
            if value is None:
                return self._missing(name)
            filled.append(text_ids if name == "text" else self.encode(value))
        return self._fill(filled)

    def build(self, document: PromptDocument, max_prompt_tokens: int, policy: LongDocumentSection) -> Prompt:
        """Build the prompt of one document; see `build_batch`."""
        return self.build_batch([document], max_prompt_tokens, policy)[0]

    def build_batch(
        self, documents: Sequence[PromptDocument], max_prompt_tokens: int, policy: LongDocumentSection
    ) -> list[Prompt]:
        """Build the prompts of several documents, which is faster than one by one.

        Args:
            documents: each with a text.
            max_prompt_tokens: what the model's context leaves to a prompt.
            policy: what to do with a document that exceeds it.
        """
        names = [part for part in self._rest if isinstance(part, str)]
        texts = [clean(document.text or "", self._clean) for document in documents]
        values = [
            [text if name == "text" else _value(document, name) for name in names]
            for document, text in zip(documents, texts, strict=True)
        ]
        found = iter(self.tokens.documents([value for row in values for value in row if value is not None]))
        prompts = []
        for document, text, row in zip(documents, texts, values, strict=True):
            filled = [next(found) if value is not None else None for value in row]
            missing = [name for name, ids in zip(names, filled, strict=True) if ids is None]
            if missing:
                prompt = self._missing(missing[0])
            elif not text.strip() and self._clean:
                prompt = self._refusal("empty_prompt", "prompt.clean leaves nothing of the text")
            else:
                prompt = self._assemble(text, filled, max_prompt_tokens, policy)
            removed = len(document.text or "") - len(text)
            prompts.append(replace(prompt, removed_chars=removed) if removed else prompt)
        return prompts

    def _assemble(
        self, text: str, filled: list[Any], max_prompt_tokens: int, policy: LongDocumentSection
    ) -> Prompt:
        total = self.num_static_tokens + sum(map(len, filled))
        side = None
        dropped = 0
        place = [part for part in self._rest if isinstance(part, str)].index("text")
        most = policy.part_tokens if policy.on_too_long == "split" else None
        if total > max_prompt_tokens or (most and len(filled[place]) > most):
            room = max_prompt_tokens - (total - len(filled[place]))
            kept = self._truncated(text, room, policy)
            if not kept:
                message = (
                    f"the prompt has {total} tokens, the model's context leaves {max_prompt_tokens} to it"
                )
                if policy.on_too_long == "truncate":
                    message += f", of which {total - len(filled[place])} are taken by all but the document"
                return self._refusal("too_long", message, total)
            dropped = len(filled[place]) - len(kept)
            filled[place] = kept
            side = policy.truncation_side
        prompt = self._fill(filled)
        if prompt.num_tokens == len(self.prefix_ids):  # nothing that the engine could continue from
            return self._refusal("empty_prompt", "the text has no tokens", prompt.num_tokens)
        if side:
            return replace(prompt, dropped_tokens=dropped, truncation_side=side, outcome="truncated")
        return prompt

    def _fill(self, filled: Iterable[Sequence[int]]) -> Prompt:
        ids = list(self.prefix_ids)
        values = iter(filled)
        for part in self._rest:
            ids += part if isinstance(part, list) else next(values)
        num_tokens = sum(len(ids) + len(tail) for tail in self._tails or [[]])
        return Prompt(ids, num_tokens, len(self.prefix_ids), probe_ids=self.probe_ids, tails=self._tails)

    def _truncated(self, text: str, room_tokens: int, policy: LongDocumentSection) -> list[int]:
        """Return what truncation leaves of a text; nothing if the job does not truncate."""
        if policy.on_too_long != "truncate":
            return []
        return truncate(*self.tokens.document_with_ends(text), room_tokens, policy.truncation_side)

    def _missing(self, name: str) -> Prompt:
        return self._refusal(
            "missing_column", f"the prompt needs column {name!r}, which this row does not have"
        )

    def _refusal(self, outcome: Outcome, message: str, num_tokens: int = 0) -> Prompt:
        return Prompt([], num_tokens, len(self.prefix_ids), outcome=outcome, message=message)


def _value(document: PromptDocument, name: str) -> str | None:
    if name == "id":
        return str(document.row_id)
    return document.columns.get(name)
