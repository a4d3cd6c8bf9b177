"""Compression beside the model: one thread, and on a GPU a stream of its own.

On a CPU it wants a core that the model does not use, and saves at most what compression takes, 4 % of prefill:
benchmarks/compression.md has the figures. The GPU's part has never been run.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvcache.compress.compressor import TierShare


class BackgroundCompressor:
    """Compress chunks one after the other while the model goes on.

    On a GPU the thread is needed too: judging a chunk waits for the device several times (how many tokens a tier
    got), and so would the one that launches the model's kernels.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "compression")
        self._thread.submit(_take_one_core).result()
        # That was for its own thread, but one that starts takes over the number set last: it is set again.
        torch.set_num_threads(torch.get_num_threads())

    def submit(self, compress: Callable[..., list[TierShare]], *arguments) -> "Future[list[TierShare]]":
        """Compress what the device has finished by now; the arguments are not to be changed meanwhile."""
        if self._stream is None:
            return self._thread.submit(_compress, compress, *arguments)
        model_stream = torch.cuda.current_stream(self._stream.device)
        return self._thread.submit(
            self._compress_on_stream, model_stream, model_stream.record_event(), compress, arguments
        )

    def _compress_on_stream(self, model_stream, ready, compress, arguments) -> list[TierShare]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            shares = _compress(compress, *arguments)
        for share in shares:
            for tensor in vars(share).values():
                if tensor.is_cuda:
                    tensor.record_stream(model_stream)  # whose reads outlive the tensor
        self._stream.synchronize()
        return shares


@torch.inference_mode()  # a thread has a mode of its own
def _compress(compress, *arguments) -> list[TierShare]:
    return compress(*arguments)


def _take_one_core() -> None:
    torch.get_num_threads()  # asked for the first time, it takes over the number set last
    torch.set_num_threads(1)
