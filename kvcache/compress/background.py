"""Compression beside the model: one thread, and on a GPU a stream of its own.

On a CPU it needs a core that the model leaves idle, and saves at most the time of compression, 4 % of prefill:
benchmarks/compression.md has the figures. The part for GPUs has never been run.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec

import torch

from kvcache.compress.compressor import TierShare

P = ParamSpec("P")
Shares = Future[list[TierShare]]
Work = Callable[[], list[TierShare]]


class BackgroundCompressor:
    """Compress chunks one after the other while the model goes on.

    On a GPU the thread is needed too: compressing a chunk waits for the device several times, to learn how many tokens
    each tier got, and must not keep the thread waiting that launches the model's kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "compression")
        self._thread.submit(_take_one_core).result()
        # A thread that starts takes over the number of threads set last, which the worker has just set to one.
        torch.set_num_threads(torch.get_num_threads())

    def submit(self, compress: Callable[P, list[TierShare]], *args: P.args, **kwargs: P.kwargs) -> Shares:
        """Compress what the device has computed by now; the caller must not change the arguments until it is done."""
        work = partial(compress, *args, **kwargs)
        if self._stream is None:
            return self._thread.submit(_compress, work)
        model_stream = torch.cuda.current_stream(self._stream.device)
        ready = model_stream.record_event()
        return self._thread.submit(_compress_on_stream, self._stream, model_stream, ready, work)


def _compress_on_stream(
    own_stream: torch.cuda.Stream, model_stream: torch.cuda.Stream, ready: torch.cuda.Event, work: Work
) -> list[TierShare]:
    with torch.cuda.stream(own_stream):
        own_stream.wait_event(ready)
        shares = _compress(work)
    for share in shares:
        for tensor in vars(share).values():
            if tensor.is_cuda:
                tensor.record_stream(model_stream)  # the model reads it after this stream is done with it
    own_stream.synchronize()
    return shares


@torch.inference_mode()  # each thread has a mode of its own
def _compress(work: Work) -> list[TierShare]:
    return work()


def _take_one_core() -> None:
    torch.get_num_threads()  # the first call in a thread takes over the number set last
    torch.set_num_threads(1)
