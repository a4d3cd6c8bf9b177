"""An engine without a model."""

from types import SimpleNamespace

from engine import EngineStats, Result
from engine.forecast import SpeedFit
from kvbatch.run.row_requests import RequestKey


def name(key):
    """Return a request's key in short: the row alone for its first request."""
    return str(key.row) if key == RequestKey(key.row) else f"{key.row}{key.level}{key.part:x}{key.question}"


class Backwards:
    """An engine that answers rows in the opposite order, after pulling some of them.

    Args:
        fail: names of requests that end by an error.
    """

    def __init__(self, fail=(), num_held=3):
        self.requests, self.fail = [], fail
        self.num_held, self.num_answers = num_held, 0
        self.monitor = SimpleNamespace(samples=[], lanes=None, speed=SpeedFit())

    def generate(self, requests):
        held = []
        for request in requests:
            if request is not None:
                self.requests.append(request)
                held.append(request)
            if request is None or len(held) == self.num_held:
                yield from self._answers(held)
                held = []
        yield from self._answers(held)

    def _answers(self, held):
        for request in reversed(held):
            self.num_answers += 1
            bad = name(request.request_id) in map(str, self.fail)
            yield Result(
                request_id=request.request_id,
                token_ids=[5],
                text=f"answer {name(request.request_id)}",
                finish_reason="error" if bad else "stop",
                error_message="it broke" if bad else None,
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=1,
                cached_prompt_tokens=request.prefix_tokens,
                num_chunks=1,
                kv_full_bytes=100,
                kv_kept_bytes=50,
                kv_peak_bytes=100,
                prefill_s=0.1,
                decode_s=0.1,
                wait_s=0.1,
            )

    def stats(self):
        return EngineStats(len(self.requests), 1, 0, 0, 0, 1, 1, 1, 1, 1)


class Stopping(Backwards):
    """An engine that fails after some answers."""

    def __init__(self, after: int, error: BaseException | None = None):
        super().__init__()
        self.after, self.error = after, error or KeyboardInterrupt()

    def generate(self, requests):
        for number, result in enumerate(super().generate(requests)):
            if number == self.after:
                raise self.error
            yield result
