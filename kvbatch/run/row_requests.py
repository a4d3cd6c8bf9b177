"""One row on its way through the engine: a request, or one for every part and question, and those that follow.

What is known beforehand comes from `LongDocuments.build_batch`; a request over partial answers is made when the last
of them is there. It makes the requests of a row and sums their results; `shard_loop` has shards and the engine's loop.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine import Result
from kvbatch.job_file.sections import Job
from kvbatch.prompts.long_document import LongDocuments
from kvbatch.prompts.prompt import Prompt, PromptDocument, PromptRequest
from kvbatch.run.oom_retry import DEAD_LETTER

_WORST_FIRST = ("error", "repetition", "length", "stop")


@dataclass(frozen=True, order=True)
class RequestKey:
    """Identify a request of a job.

    Args:
        row: index of the row in the corpus.
        level: 0 reads the document, n reads answers of level n - 1.
        part: place of the request in its level.
        question: place of its question among the job's.
    """

    row: int
    level: int = 0
    part: int = 0
    question: int = 0


class RowRequests:
    """Hold the answers of a row's requests until the last request has ended.

    Args:
        row: index of the row in the corpus.
        document: the row, as prompts see it.
        prompt: of the row, with its parts and questions.
        prompts: makes the prompts over partial answers.
    """

    def __init__(self, row: int, document: PromptDocument, prompt: Prompt, job: Job, prompts: LongDocuments):
        self._row, self._document, self._prompt, self._prompts = row, document, prompt, prompts
        self.questions = job.prompt.questions
        self._keeps_parts = job.long_document.keep_parts
        self._num_questions = len(self.questions) or 1
        self._num_parts = len(prompt.parts) or 1
        self._results: dict[RequestKey, Result] = {}
        self._oom_steps: tuple[str, ...] = ()
        self._level = [0] * self._num_questions
        # by question, what each place of the level says; None where it is awaited
        self._answers: list[list[str | None]] = [[None] * self._num_parts for _ in range(self._num_questions)]
        self._num_open = self._num_questions * self._num_parts

    @property
    def is_done(self) -> bool:
        """Whether every request has ended."""
        return not self._num_open

    def first(self) -> list[tuple[RequestKey, PromptRequest]]:
        """Return the requests that need no answers, part by part."""
        keys = (
            RequestKey(self._row, 0, part, question)
            for part in range(self._num_parts)
            for question in range(self._num_questions)
        )
        return list(zip(keys, self._prompt.requests, strict=True))

    def take(
        self, key: RequestKey, result: Result, oom_steps: Sequence[str] = ()
    ) -> list[tuple[RequestKey, PromptRequest]]:
        """Take the result of a request; return the requests that it makes possible."""
        assert key not in self._results, "a request ends once"
        self._results[key] = result
        self._oom_steps = max(self._oom_steps, tuple(oom_steps), key=len)
        self._num_open -= 1
        answers = self._answers[key.question]
        if result.finish_reason != "error":
            answers[key.part] = result.text
        if len(answers) == 1 or None in answers:
            return []
        followers = self._next_level(key.question)
        self._num_open += len(followers)
        return followers

    def _next_level(self, question: int) -> list[tuple[RequestKey, PromptRequest]]:
        """Put the answers to a question together, as many at once as there is room for."""
        before = [answer for answer in self._answers[question] if answer is not None]  # all are there
        prompts = self._prompts.reduce(self._document, question, before)
        self._level[question] += 1
        # groups are taken in order, and a group of one is the last
        self._answers[question] = [None if prompt else before[-1] for prompt in prompts]
        return [
            (RequestKey(self._row, self._level[question], part, question), prompt.requests[0])
            for part, prompt in enumerate(prompts)
            if prompt
        ]

    def ordinal(self, key: RequestKey) -> int:
        """Return the place of a request among all that its row may have, from 0: each has a seed of its own."""
        return (key.level * self._num_parts + key.part) * self._num_questions + key.question

    @property
    def sampling(self) -> Mapping[str, Any]:
        """What the row sets for itself."""
        return self._prompt.sampling

    @property
    def oom_steps(self) -> tuple[str, ...]:
        """What was done because memory ran out, for the request that needed most of it."""
        return self._oom_steps

    @property
    def error_code(self) -> str:
        """What a failure of the row is called."""
        return "out_of_memory" if DEAD_LETTER in self._oom_steps else "engine"

    def result(self) -> Result:
        """Return the row's answer and what all its requests took together.

        It ended as the worst of them, answers of parts included. Bytes are those of the largest request: requests
        of one row need not be in memory together.
        """
        results = list(self._results.values())
        finals = [self._final(question) for question in range(self._num_questions)]
        worst = min(finals, key=_badness)
        sums = {
            name: sum(getattr(result, name) for result in results)
            for name in (
                "prompt_tokens",
                "completion_tokens",
                "cached_prompt_tokens",
                "num_chunks",
                "prefill_s",
                "decode_s",
                "wait_s",
            )
        }
        largest = max(results, key=lambda result: result.kv_peak_bytes)
        sums |= {name: getattr(largest, name) for name in ("kv_full_bytes", "kv_kept_bytes", "kv_peak_bytes")}
        reason = min(results, key=_badness).finish_reason
        return replace(worst, text=finals[0].text, finish_reason=reason, **sums)

    def _final(self, question: int) -> Result:
        """Return the result that answers a question: the last one, or the first that failed."""
        own = {key: result for key, result in self._results.items() if key.question == question}
        failed = [key for key, result in own.items() if result.finish_reason == "error"]
        if not failed:
            return own[max(own)]
        key = min(failed)
        if self._num_parts == 1:
            return own[key]
        where = f"part {key.part + 1} of {self._num_parts}"
        if key.level:
            where = f"level {key.level} over the parts' answers"
        return replace(own[key], error_message=f"{where}: {own[key].error_message}")

    def columns(self) -> dict[str, Any]:
        """Return the output columns that count answers, and those that only rows of several parts have."""
        ends = Counter(result.finish_reason for result in self._results.values())
        num_cut = ends["length"] + ends["repetition"]
        counts = {"kvb_n_answers": ends["stop"] + num_cut, "kvb_n_cut": num_cut}
        if self._num_parts == 1:
            return counts
        kept = [self._part(key) for key, _ in self.first()] if self._keeps_parts else None
        return counts | {"kvb_n_levels": max(self._level), "kvb_parts": kept}

    def _part(self, key: RequestKey) -> dict[str, Any]:
        result = self._results[key]
        return {
            "part": key.part,
            "question": key.question if self.questions else None,
            "output": None if result.finish_reason == "error" else result.text,
            "finish_reason": result.finish_reason,
        }

    def answers(self) -> list[dict[str, Any]]:
        """Return what became of each of several questions."""
        finals = [self._final(number) for number in range(len(self.questions))]
        failed = [final.finish_reason == "error" for final in finals]
        return [
            {
                "question": question,
                "output": None if is_failed else final.text,
                "status": "error" if is_failed else "ok",
                "finish_reason": final.finish_reason,
                "error_code": self.error_code if is_failed else None,
                "error_message": final.error_message,
            }
            for question, final, is_failed in zip(self.questions, finals, failed, strict=True)
        ]


def _badness(result: Result) -> int:
    return _WORST_FIRST.index(result.finish_reason)
