"""Whether a job, its prompt, its model and its memory go together: said before any weight is loaded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbatch.errors import JobFileError
from kvbatch.job_file.sections import Job

if TYPE_CHECKING:
    from kvbatch.prompts.chat import AnyPromptBuilder


def check_room(job: Job, builder: "AnyPromptBuilder", context: int) -> None:
    """Prove that the model's context holds more than what all prompts share and the answer, of long documents too.

    Raises:
        JobFileError: It does not.
    """
    from kvbatch.prompts.long_document import LongDocuments

    if builder.num_static_tokens + job.generation.max_new_tokens >= context:
        raise JobFileError(
            f"the prompt takes {builder.num_static_tokens:,} tokens before any document and "
            f"generation.max_new_tokens {job.generation.max_new_tokens:,}; the model's context of "
            f"{context:,} leaves no room for a document: shorten one of them"
        )
    LongDocuments(builder, job, context - job.generation.max_new_tokens)


def check_prompt_columns(job: Job, names: Sequence[str]) -> None:
    """Prove that the input has the columns that the prompt uses.

    Raises:
        JobFileError: It does not.
    """
    for key, columns in job.prompt_columns.items():
        for name in columns:
            if name not in names:
                raise JobFileError(
                    f"{key} uses {{{name}}}, which the input does not have: {', '.join(names)}"
                )
