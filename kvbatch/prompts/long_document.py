"""Documents beyond the model's context: into parts, and from the parts' answers to one.

It divides documents and combines partial answers level by level; requests and results are in `kvbatch.run`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from kvbatch.errors import JobFileError
from kvbatch.job_file.sections import Job, LongDocumentSection
from kvbatch.prompts.prompt import Prompt, PromptDocument
from kvbatch.prompts.rendering import MAX_PROBE_TOKENS, PromptBuilder
from kvbatch.prompts.row_shape import RowShape
from kvbatch.prompts.split import split_text

if TYPE_CHECKING:
    from kvbatch.prompts.chat import AnyPromptBuilder

SEPARATOR = "\n\n"  # between partial answers
_WHOLE = LongDocumentSection()
_LARGEST = "9" * 6  # of the numbers that a part's prompt may show


@dataclass(frozen=True)
class _Excerpt:
    """A document with another text and more columns."""

    row_id: Any
    text: str | None
    columns: Mapping[str, str]


class LongDocuments:
    """Make the prompts of a job, those of documents that are too long as well.

    Args:
        builder: of the job's own prompt.
        job: the job.
        max_prompt_tokens: what the model's context leaves to a prompt.

    Raises:
        JobFileError: The model's context holds no part, or no two partial answers, or is too short to stream.
    """

    def __init__(self, builder: "AnyPromptBuilder", job: Job, max_prompt_tokens: int):
        # A chat builder is never asked to split a document: the job file refuses that.
        self._builder = cast(PromptBuilder, builder)
        self._section = job.long_document
        self._questions = job.prompt.questions
        self._answer_tokens = job.generation.max_new_tokens
        self.max_prompt_tokens = max_prompt_tokens
        if self._section.on_too_long == "split":
            self._prepare_split(job.prompt.template or "")
        elif self._section.on_too_long == "stream":
            policy = job.cache.policy
            newest = (policy.delay + 2) * policy.chunk_size + MAX_PROBE_TOKENS
            if max_prompt_tokens < newest + policy.chunk_size:
                raise JobFileError(
                    f"long_document.on_too_long: to stream, the newest {newest:,} tokens are held whole, of "
                    f"{max_prompt_tokens:,} that the model's context leaves; lower cache.delay or cache.chunk_size"
                )

    @property
    def prefix_tokens(self) -> int:
        """Tokens that begin every prompt."""
        return len(self._builder.prefix_ids)

    def _prepare_split(self, template: str) -> None:
        section = self._section
        self._parts = self._builder.with_template(section.part_prompt or template)
        self._reduce = self._builder.with_template(section.reduce_prompt or template, questions=False)
        # a prefix of its own would be memory that nobody planned
        self._shares_prefix = self._reduce.prefix_ids == self._parts.prefix_ids and len(self._questions) < 2
        self._separator = self._reduce.encode(SEPARATOR)
        room = self._part_room(self._parts.num_static_tokens)
        if room <= 2 * section.overlap_tokens:
            raise JobFileError(
                f"long_document.overlap_tokens {section.overlap_tokens:,} is too much: parts have {room:,} tokens of "
                "a document and must be more than twice as long"
            )
        room = self._reduce_room(self._reduce.num_static_tokens)
        if room < self._two_answers:
            raise JobFileError(
                f"long_document.reduce_prompt: beside it the model's context leaves {room:,} tokens, but two partial "
                f"answers take up to {self._two_answers:,}; give generation.max_new_tokens less"
            )

    @property
    def _two_answers(self) -> int:
        """The most tokens of the fewest answers that can be put together."""
        return 2 * (self._answer_tokens + len(self._separator))

    def _part_room(self, frame_tokens: int) -> int:
        """Return the most tokens of a part beside those of its prompt."""
        return min(self.max_prompt_tokens - frame_tokens, self._section.part_tokens or self.max_prompt_tokens)

    def _reduce_room(self, frame_tokens: int) -> int:
        """Return the most tokens of answers that are put together, beside those of their prompt."""
        most = max(self._section.part_tokens or self.max_prompt_tokens, self._two_answers)
        return min(self.max_prompt_tokens - frame_tokens, most)

    def shape(
        self, outcome: str, part_tokens: Sequence[int], reduce_tokens: int, new_tokens: int
    ) -> RowShape:
        """Return what a prompt needs memory for.

        Args:
            outcome, part_tokens, reduce_tokens: see `Prompt`.
            new_tokens: the most tokens of an answer.
        """
        builder, kind = self._builder, "job"
        if outcome == "split" and self._section.part_prompt:
            builder, kind = self._parts, "part"
        tails = builder.tail_tokens
        streams = outcome == "streamed"
        return RowShape(
            part_tokens,
            tails,
            new_tokens,
            0 if tails or streams else len(builder.prefix_ids),
            kind,
            reduce_tokens,
            streams,
            self.max_prompt_tokens,
        )

    def build_batch(self, documents: Sequence[PromptDocument]) -> list[Prompt]:
        """Build the prompts of several documents; of each, all that are known before an answer is."""
        prompts = self._builder.build_batch(documents, self.max_prompt_tokens, self._section)
        make = {"split": self._split, "stream": self._stream}.get(self._section.on_too_long)
        return [
            make(document, prompt) if make and prompt.outcome == "too_long" else prompt
            for document, prompt in zip(documents, prompts, strict=True)
        ]

    def _stream(self, document: PromptDocument, refused: Prompt) -> Prompt:
        prompt = self._builder.build_around(document, self._builder.encode(self._builder.clean(document)))
        return replace(prompt, outcome="streamed", prefix_tokens=0, removed_chars=refused.removed_chars)

    def _split(self, document: PromptDocument, refused: Prompt) -> Prompt:
        """Return the prompts of a document's parts, or its refusal where there is no room for them."""
        text = self._builder.clean(document)
        room = self._part_room(self._parts.num_frame_tokens(self._part(document, text, _LARGEST, _LARGEST)))
        found = split_text(
            text,
            self._parts.token_ends(text),
            self._parts.count,
            room=room,
            overlap=self._section.overlap_tokens,
            boundary=self._section.boundary,
        )
        over = [
            self._reduce.build_around(self._asked(document, number), [])
            for number in range(len(self._questions) or 1)
        ]
        frames = [prompt.num_tokens for prompt in over]
        if not found or min(map(self._reduce_room, frames)) < self._two_answers:
            why = "two partial answers do not fit" if found else f"{max(room, 0)} tokens are left for a part"
            message = f"the prompt has {refused.num_tokens} tokens and cannot be split: {why}"
            return replace(refused, message=message)
        excerpts = [
            self._part(document, text[part.overlap_start : part.end], str(number), str(len(found)))
            for number, part in enumerate(found, 1)
        ]
        parts = self._parts.build_batch(excerpts, self.max_prompt_tokens, _WHOLE)
        for prompt in (*over, *parts):
            if not prompt.runs:  # for want of a column
                return prompt
        answers = len(parts) * (self._answer_tokens + len(self._separator))
        return replace(
            refused,
            num_tokens=sum(part.num_tokens for part in parts),
            prefix_tokens=parts[0].prefix_tokens,
            outcome="split",
            message=None,
            parts=parts,
            reduce_tokens=max(frame + min(answers, self._reduce_room(frame)) for frame in frames),
        )

    def _part(self, document: PromptDocument, text: str, number: str, num_parts: str) -> _Excerpt:
        own = {"part": number, "num_parts": num_parts} if self._section.part_prompt else {}
        return _Excerpt(document.row_id, text, {**document.columns, **own})

    def _asked(self, document: PromptDocument, question: int) -> _Excerpt:
        """Return the document as the prompt over its partial answers sees it."""
        own = {"question": self._questions[question]} if self._questions else {}
        return _Excerpt(document.row_id, None, {**document.columns, **own})

    def reduce(self, document: PromptDocument, question: int, answers: Sequence[str]) -> list[Prompt | None]:
        """Return a prompt for every group of answers that fit together; None stands for an answer left alone.

        Args:
            question: its number, 0 where there is but one.
            answers: of the parts, or of the level before, in order; more than one.
        """
        asked = self._asked(document, question)
        # what was generated may have more tokens when it is read
        pieces = [list(self._reduce.encode(answer))[: self._answer_tokens] for answer in answers]
        room = self._reduce_room(self._reduce.build_around(asked, []).num_tokens)
        return [
            self._over(asked, group) if len(group) > 1 else None
            for group in group_answers(pieces, len(self._separator), room)
        ]

    def _over(self, asked: PromptDocument, group: Sequence[list[int]]) -> Prompt:
        prompt = self._reduce.build_around(asked, self._joined(group))
        return prompt if self._shares_prefix else replace(prompt, prefix_tokens=0)

    def _joined(self, pieces: Sequence[list[int]]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            ids += self._separator if ids and piece else []
            ids += piece
        return ids


def group_answers(
    pieces: Sequence[list[int]], separator_tokens: int, room_tokens: int
) -> list[list[list[int]]]:
    """Cut a row of answers into groups that fit into the room, each as long as possible."""
    groups: list[list[list[int]]] = []
    free = 0
    for piece in pieces:
        free -= separator_tokens + len(piece)
        if free < 0 or not groups:
            groups.append([])
            free = room_tokens - len(piece)
        groups[-1].append(piece)
    return groups
