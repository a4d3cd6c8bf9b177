"""The job's template and the model's chat template, rendered once around placeholders."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbatch.errors import JobFileError
from kvbatch.job_file.sections import PromptSection
from kvbatch.job_file.template import Piece, parse_template
from kvbatch.prompts.chat_template import MARK, ChatTemplate, mark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def uses_chat(tokenizer: "PreTrainedTokenizerBase", prompt: PromptSection) -> bool:
    """Tell whether a job's prompts go into the chat template.

    Raises:
        JobFileError: They shall, and the tokenizer has none.
    """
    if prompt.chat is True and not tokenizer.chat_template:
        raise JobFileError(
            "prompt.chat is true, but the model's tokenizer has no chat template; use chat: auto"
        )
    return bool(tokenizer.chat_template) and prompt.chat is not False


def render_chat(chat: ChatTemplate, prompt: PromptSection, values: Mapping[str, str]) -> list[Piece]:
    """Render the chat template around marks, and cut it there."""
    placeholders: list[Piece] = []

    def marked(template: str) -> str:
        text = ""
        for piece in parse_template(template, values):
            if piece.is_placeholder:
                text += mark(len(placeholders))
                placeholders.append(piece)
            else:
                text += piece.text
        return text

    messages = [{"role": "system", "content": marked(prompt.system)}] if prompt.system is not None else []
    messages.append({"role": "user", "content": marked(prompt.template or "")})
    try:
        rendered = chat.render(messages)
    except (
        Exception
    ) as error:  # templates raise what they like, most often over a system turn they do not know
        hint = "drop prompt.system or " if prompt.system is not None else ""
        raise JobFileError(
            f"the model's chat template refuses the prompt ({error}); {hint}set chat: false"
        ) from error
    parts = MARK.split(rendered)  # text, index, text, index, …, text
    if [int(index) for index in parts[1::2]] != list(range(len(placeholders))):
        raise JobFileError(
            "the model's chat template does not keep the prompt in one piece; set prompt.chat: false"
        )
    pieces = []
    for index, part in enumerate(parts):
        if index % 2:
            pieces.append(placeholders[int(part)])
        elif part:
            pieces.append(Piece(part))
    return pieces
