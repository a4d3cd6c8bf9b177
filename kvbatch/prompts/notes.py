"""What is worth knowing of a job's prompts, though nothing is wrong with them."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvbatch.job_file.sections import Job
from kvbatch.job_file.template import parse_template

if TYPE_CHECKING:
    from kvbatch.prompts.chat_template import ChatTemplate


def prompt_notes(job: Job, chat: "ChatTemplate | None") -> Iterator[str]:
    """Yield choices that no prompt names, and arguments that the chat template does not know."""
    unnamed = [repr(choice) for choice in job.generation.choices if not _is_named(choice, job)]
    if unnamed and job.input.format != "openai-batch":
        names = ", ".join(unnamed)
        stands = "stands" if len(unnamed) == 1 else "stand"
        yield (
            f"generation.choices: {names} {stands} nowhere in the prompt, so the model is not told; write {{choices}} "
            "in prompt.template where they belong"
        )
    for name in chat.unused_arguments if chat else ():
        yield f"generation.chat_template_kwargs.{name}: the model's chat template does not use it"


def _is_named(choice: str, job: Job) -> bool:
    """Tell whether a choice stands, as a word, in what the job's prompts say themselves."""
    templates = (
        job.prompt.system,
        job.prompt.template,
        job.long_document.part_prompt,
        job.long_document.reduce_prompt,
    )
    texts = [
        piece.text
        for template in templates
        for piece in parse_template(template or "", job.prompt_values)
        if not piece.is_placeholder
    ]
    word = re.compile(rf"(?<!\w){re.escape(choice)}(?!\w)", re.IGNORECASE)
    return any(word.search(text) for text in (*texts, *job.prompt.questions))
