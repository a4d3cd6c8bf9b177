"""Prompts of rows that bring their own conversation (`kvbatch.corpus.openai_batch`).

The model's chat template is rendered around marks, once for each sequence of roles; what the messages say is put
between as plain text, so no message can end its turn.
"""

from collections.abc import Sequence
from typing import Any

from kvbatch.corpus.openai_batch import parse_body
from kvbatch.errors import JobFileError
from kvbatch.job import GenerationSection, Job, LongDocumentSection
from kvbatch.prompt import MARK, Prompt, PromptBuilder, PromptDocument
from kvbatch.tokens import PieceTokenizer


def prompt_builder(tokenizer: Any, job: Job) -> "PromptBuilder | ChatPromptBuilder":
    """Return what makes a job's prompts; raises as the two."""
    if job.input.format == "openai-batch":
        return ChatPromptBuilder(tokenizer, job.generation)
    return PromptBuilder(tokenizer, job.prompt)


class ChatPromptBuilder:
    """Build the prompts of conversations; see `PromptBuilder`, whose place it takes.

    Attributes:
        prefix_ids: none, as two rows need not begin alike.
        probe_ids: none, as every row has a question of its own.

    Raises:
        JobFileError: The model has no chat template.
    """

    prefix_ids: Sequence[int] = ()
    probe_ids: Sequence[int] = ()
    tail_tokens: Sequence[int] = ()
    num_static_tokens = 0

    def __init__(self, tokenizer: Any, generation: GenerationSection):
        if not tokenizer.chat_template:
            raise JobFileError("input.format is openai-batch, but the model's tokenizer has no chat template")
        self._tokenizer, self._tokens = tokenizer, PieceTokenizer(tokenizer)
        self._max_new_tokens = generation.max_new_tokens
        self._frames: dict[tuple[str, ...], list[list[int] | int] | str] = {}

    def markup(self, text: str) -> list[int]:
        """See `PromptBuilder.markup`."""
        return self._tokens.markup(text)

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
        found = iter(self._tokens.documents(texts))
        prompts = []
        for request in requests:
            contents = [next(found) for _ in request.messages]
            frame = self._frame(tuple(role for role, _ in request.messages))
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

    def _frame(self, roles: tuple[str, ...]) -> list[list[int] | int] | str:
        """Return the chat template's own tokens, and the message that stands between them; or why there are none."""
        if roles not in self._frames:
            self._frames[roles] = self._render(roles)
        return self._frames[roles]

    def _render(self, roles: tuple[str, ...]) -> list[list[int] | int] | str:
        messages = [{"role": role, "content": f"\ue000kvb{i}\ue000"} for i, role in enumerate(roles)]
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like, most often over an order of turns
            return f"the model's chat template refuses {', '.join(roles)}: {error}"
        parts = MARK.split(text)  # text, index, text, index, …, text
        if [int(index) for index in parts[1::2]] != list(range(len(roles))):
            return f"the model's chat template does not keep {', '.join(roles)} in order"
        frame: list[list[int] | int] = [self._tokens.head(parts[0], add_bos=False)]
        for index, part in zip(parts[1::2], parts[2::2], strict=True):
            frame += [int(index), self._tokens.markup(part)]
        return frame
