"""What is done when memory runs out though the plan said it would not: another process took it, or a step needs more.

The rows that ran at that moment are redone, on one rung after the other, until they fit: a step of fewer tokens, half
as many rows, one row alone. A row that does not fit alone becomes a dead letter; rows after it start at full size.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from engine import Request, Result
from engine.memory import is_out_of_memory, release_memory
from kvbatch.errors import KvbatchError

if TYPE_CHECKING:
    from engine import EngineCore

RUNGS = ("smaller_chunk", "smaller_bin", "row_alone")
DEAD_LETTER = "dead_letter"
_STEP_RATIO = 0.25


class OomRetry:
    """Generate, and climb the rungs where memory runs out.

    Args:
        on_step: called with each step taken and its rows.
    """

    def __init__(self, llm: "EngineCore", on_step: Callable[[str, Sequence[Request]], None]):
        self._llm, self._on_step = llm, on_step

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[Result, tuple[str, ...]]]:
        """Yield every result with what was done before because memory ran out; takes what the engine takes."""
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
            # only here, as the exception is gone now, and with it the tensors that its frames held
            yield from self._redo(list(running.values()), 0, problem)
            running.clear()

    def _redo(
        self, requests: list[Request], rung: int, problem: str
    ) -> Iterator[tuple[Result, tuple[str, ...]]]:
        """Run rows on a rung, and those that still do not fit on the next."""
        if rung == len(RUNGS):
            for request in requests:
                self._on_step(DEAD_LETTER, [request])
                reason = problem.partition("\n")[0] or "no details"
                result = Result.failed(request, f"memory ran out though the row ran alone: {reason}")
                yield result, (*RUNGS, DEAD_LETTER)
            return
        is_last = rung == len(RUNGS) - 1
        max_sequences = (len(requests), max(1, len(requests) // 2), 1)[rung]
        for group in [[request] for request in requests] if is_last else [requests]:
            release_memory()
            self._on_step(RUNGS[rung], group)
            left = {request.request_id: request for request in group}
            message: str | None = None
            try:
                with self._llm.limited(_STEP_RATIO, max_sequences):
                    for result in self._llm.generate(group):
                        del left[result.request_id]
                        yield result, RUNGS[: rung + 1]
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                message = str(error)
            if message is not None:
                yield from self._redo(list(left.values()), rung + 1, message)


def _noted(requests: Iterable[Request | None], running: dict[Hashable, Request]) -> Iterator[Request | None]:
    """Pass requests on and note them.

    Raises:
        KvbatchError: There is no memory for the documents themselves: no rung of the engine's helps there.
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
