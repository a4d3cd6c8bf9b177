"""Prompts of rows that bring their own conversation (`kvbatch.corpus.openai_batch`).

The model's chat template is rendered around marks, once for each sequence of roles and the row's arguments; what the
messages say is put between as plain text, so no message can end its turn.
"""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from kvbatch.corpus.openai_batch import ChatRequest, parse_body
from kvbatch.errors import JobFileError
from kvbatch.job_file.sections import GenerationSection, Job, LongDocumentSection
from kvbatch.prompts.chat_pieces import uses_chat
from kvbatch.prompts.chat_template import MARK, ChatTemplate, mark
from kvbatch.prompts.prompt import Prompt, PromptDocument
from kvbatch.prompts.rendering import PromptBuilder
from kvbatch.prompts.sampling import StopTokens
from kvbatch.prompts.tokenizer import PieceTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_FRAMES = 256  # that are kept: rows may differ in what they tell the template


def prompt_builder(
    tokenizer: "PreTrainedTokenizerBase",
    job: Job,
    chat: ChatTemplate | None,
    tokens: PieceTokenizer | None = None,
) -> "AnyPromptBuilder":
    """Return what makes a job's prompts; `chat` is its `chat_template`, raises as the two."""
    if job.input.format == "openai-batch":
        return ChatPromptBuilder(tokenizer, job.generation, chat, tokens)
    return PromptBuilder(tokenizer, job.prompt, tokens, chat, job.prompt_values)


def chat_template(
    tokenizer: "PreTrainedTokenizerBase", job: Job, time: datetime | None = None
) -> ChatTemplate | None:
    """Return the chat template of a job's prompts, or None where they need none.

    Args:
        time: see `ChatTemplate`.

    Raises:
        JobFileError: They need one, and the tokenizer has none.
    """
    arguments = job.generation.chat_template_kwargs
    if job.input.format == "openai-batch":
        if not tokenizer.chat_template:
            raise JobFileError("input.format is openai-batch, but the model's tokenizer has no chat template")
    elif not uses_chat(tokenizer, job.prompt):
        if arguments:
            raise JobFileError("generation.chat_template_kwargs: the model's tokenizer has no chat template")
        return None
    return ChatTemplate(tokenizer, time, arguments)


class ChatPromptBuilder:
    """Build the prompts of conversations; see `PromptBuilder`, whose place it takes.

    Attributes:
        prefix_ids: none, as two rows need not begin alike.
        probe_ids: none, as every row has a question of its own.
        tokens: of texts.
    """

    prefix_ids: Sequence[int] = ()
    probe_ids: Sequence[int] = ()
    tail_tokens: Sequence[int] = ()
    num_static_tokens = 0

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        generation: GenerationSection,
        chat: ChatTemplate | None = None,
        tokens: PieceTokenizer | None = None,
    ):
        self.tokens = tokens or PieceTokenizer(tokenizer)
        self._chat = chat or ChatTemplate(tokenizer, arguments=generation.chat_template_kwargs)
        self._max_new_tokens, self._stops = generation.max_new_tokens, StopTokens(tokenizer)
        self._frame = lru_cache(NUM_FRAMES)(self._render)
        # no row may write a control token or one of our marks; half a surrogate pair is no text
        foreign = (*map(re.escape, self.tokens.control_names), "[\ue000\ud800-\udfff]")
        self._foreign = re.compile("|".join(foreign))

    def markup(self, text: str) -> list[int]:
        """See `PromptBuilder.markup`."""
        return self.tokens.markup(text)

    def build(self, document: PromptDocument, max_prompt_tokens: int, policy: LongDocumentSection) -> Prompt:
        """Build the prompt of one row; see `build_batch`."""
        return self.build_batch([document], max_prompt_tokens, policy)[0]

    def build_batch(
        self, documents: Sequence[PromptDocument], max_prompt_tokens: int, policy: LongDocumentSection
    ) -> list[Prompt]:
        """Build the prompts of several rows.

        Args:
            documents: each with the body of a request.
            max_prompt_tokens: what the model's context leaves to a prompt whose answer is as long as the job says.
            policy: not asked, since the job may not choose one: nothing says which message could be cut.
        """
        requests = [parse_body(document.text or "") for document in documents]
        texts = [text for request in requests for _, text in request.messages]
        found = iter(self.tokens.documents(texts))
        prompts = []
        for request in requests:
            contents = [next(found) for _ in request.messages]
            roles = tuple(role for role, _ in request.messages)
            frame = self._problem(request) or self._frame(roles, json.dumps(request.template_arguments))
            if isinstance(frame, str):
                prompts.append(Prompt([], 0, 0, outcome="bad_request", message=frame))
                continue
            ids = [i for part in frame for i in (contents[part] if isinstance(part, int) else part)]
            new_tokens = request.sampling.get("max_new_tokens", self._max_new_tokens)
            room = max_prompt_tokens + self._max_new_tokens - new_tokens
            if len(ids) > room:
                message = f"the prompt has {len(ids)} tokens, the model's context leaves {max(room, 0)} to it"
                prompts.append(Prompt([], len(ids), 0, outcome="too_long", message=message))
            else:
                prompts.append(Prompt(ids, len(ids), 0, sampling=request.sampling))
        return prompts

    def _problem(self, request: ChatRequest) -> str | None:
        """Return why a row cannot be obeyed with this model."""
        found = self._foreign.search(json.dumps(request.template_arguments, ensure_ascii=False))
        if found:
            return f"body.chat_template_kwargs holds {ascii(found[0])}, which only the model's template may write"
        try:
            self._stops.ids(request.sampling.get("stop", ()))
        except ValueError as error:
            return f"body.{error}"
        return None

    def _render(self, roles: tuple[str, ...], arguments: str) -> list[list[int] | int] | str:
        """Return the chat template's own tokens, and the message that stands between them; or why there are none."""
        messages = [{"role": role, "content": mark(i)} for i, role in enumerate(roles)]
        try:
            text = self._chat.render(messages, json.loads(arguments))
        except Exception as error:  # templates raise what they like, most often over an order of turns
            return f"the model's chat template refuses {', '.join(roles)}: {error}"
        parts = MARK.split(text)  # text, index, text, index, …, text
        if [int(index) for index in parts[1::2]] != list(range(len(roles))):
            return f"the model's chat template does not keep {', '.join(roles)} in order"
        frame: list[list[int] | int] = [self.tokens.head(parts[0], add_bos=False)]
        for index, part in zip(parts[1::2], parts[2::2], strict=True):
            frame += [int(index), self.tokens.markup(part)]
        return frame


AnyPromptBuilder = PromptBuilder | ChatPromptBuilder
