"""Retry rows when memory runs out although the plan fits into it: another process took some, or the engine needs more.

The rows that ran at that moment are run again in up to three steps, until they fit: fewer tokens at once, half as many
rows, one row alone. A row that does not fit alone becomes a dead letter. The rows after it run at full size again.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from engine import Request, Result
from engine.memory import is_out_of_memory, release_memory
from kvbatch.errors import KvbatchError

if TYPE_CHECKING:
    from engine import EngineCore

STEPS = ("smaller_chunk", "smaller_bin", "row_alone")
DEAD_LETTER = "dead_letter"
_STEP_RATIO = 0.25


class OomRetry:
    """Generate answers, and take the retry steps when memory runs out.

    Args:
        on_step: called with each step that is taken, and its rows.
    """

    def __init__(self, llm: "EngineCore", on_step: Callable[[str, Sequence[Request]], None]):
        self._llm, self._on_step = llm, on_step

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[Result, tuple[str, ...]]]:
        """Yield every result with the steps that were taken for it. Requests are passed on to the engine."""
        running: dict[Hashable, Request] = {}
        source = _noted(requests, running)
        while True:
            problem = None
            try:
                for result in self._llm.generate(source):
                    del running[result.request_id]
                    yield result, ()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = str(error)
            if problem is None:
                return
            # not in the except block: there the exception's frames still hold tensors
            yield from self._redo(list(running.values()), 0, problem)
            running.clear()

    def _redo(
        self, requests: list[Request], step: int, problem: str
    ) -> Iterator[tuple[Result, tuple[str, ...]]]:
        """Run rows with the limits of a step. Rows that still do not fit go on to the next step."""
        if step == len(STEPS):
            for request in requests:
                self._on_step(DEAD_LETTER, [request])
                reason = problem.partition("\n")[0] or "no details"
                result = Result.failed(request, f"memory ran out though the row ran alone: {reason}")
                yield result, (*STEPS, DEAD_LETTER)
            return
        is_last = step == len(STEPS) - 1
        max_sequences = (len(requests), max(1, len(requests) // 2), 1)[step]
        for group in [[request] for request in requests] if is_last else [requests]:
            release_memory()
            self._on_step(STEPS[step], group)
            left = {request.request_id: request for request in group}
            message: str | None = None
            try:
                with self._llm.limited(_STEP_RATIO, max_sequences):
                    for result in self._llm.generate(group):
                        del left[result.request_id]
                        yield result, STEPS[: step + 1]
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                message = str(error)
            if message is not None:
                yield from self._redo(list(left.values()), step + 1, message)


def _noted(requests: Iterable[Request | None], running: dict[Hashable, Request]) -> Iterator[Request | None]:
    """Yield requests, and record each one in `running`.

    Raises:
        KvbatchError: Memory does not hold the documents themselves. No retry step of the engine frees enough.
    """
    try:
        for request in requests:
            if request is not None:
                running[request.request_id] = request
            yield request
    except MemoryError as error:
        raise KvbatchError(
            "there is not enough memory to read the documents; give engine.memory_budget or output.shard_rows less"
        ) from error
