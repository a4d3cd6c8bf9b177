"""Choose the precision that a job computes in: the configured one, that of its earlier rows, or the faster one.

A CPU's flags do not predict its speed in bfloat16: some CPUs with the instructions take twice as long as in float32.
Both precisions are therefore timed once, and the rates are stored in the user's cache.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbatch import __version__
from kvbatch.atomic_file import write_json
from kvbatch.errors import OutputError
from kvbatch.text import digest
from kvcache.user_cache import user_cache

NAMES = ("bfloat16", "float32")
WORTH_RATIO = 0.9  # bfloat16 is chosen from this share of the float32 rate on, since it takes half the memory

Measure = Callable[[str | None], Mapping[str, float]]


@dataclass(frozen=True)
class Precision:
    """The name of a dtype, the reason for the choice, and the measured GFLOP/s of both dtypes if they decided it."""

    dtype: str
    reason: str
    gflops: Mapping[str, float] | None = None

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate:,.0f} GFLOP/s" for name, rate in (self.gflops or {}).items())
        return f"{self.dtype}: {self.reason}{f' ({rates})' if rates else ''}"


@dataclass(frozen=True)
class KeptPrecision:
    """The precision and the device of an earlier run."""

    device: str
    precision: Precision


def choose_precision(
    wanted: str,
    device: str,
    weight_quant: str | None = None,
    *,
    kept: KeptPrecision | None = None,
    measure: Measure | None = None,
) -> Precision:
    """Return the precision of a job.

    Args:
        wanted: `model.dtype`.
        kept: precision of the run whose rows are continued or reused; used if the device is the same.
        measure: function that times a layer in both precisions.
    """
    if wanted != "auto":
        return Precision(wanted, "model.dtype")
    if kept and kept.device == device:
        return kept.precision
    if device != "cpu":
        return Precision("bfloat16", f"model.dtype auto on {device}")
    try:
        gflops = _known_or(measure or _measure, weight_quant)
    except OSError as error:  # temporary files cannot be written
        return Precision("float32", f"nothing could be measured ({error})")
    if gflops["bfloat16"] > gflops["float32"]:
        return Precision("bfloat16", "measured here, faster", gflops)
    if gflops["bfloat16"] >= WORTH_RATIO * gflops["float32"]:
        return Precision("bfloat16", "measured here, nearly as fast at half the memory", gflops)
    return Precision("float32", "measured here, faster", gflops)


def _known_or(measure: Measure, weight_quant: str | None) -> dict[str, float]:
    """Return rates from the user's cache, or measure and store them. Without a cache, they are measured each time."""
    what = _machine() | {"weight_quant": weight_quant}
    path = None
    with contextlib.suppress(OSError):
        path = user_cache() / "precision" / f"{digest(what)[:20]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if path:
            found = json.loads(path.read_text(encoding="utf-8"))["gflops"]
            rates = {name: float(found[name]) for name in NAMES}
            if all(0 < rate < float("inf") for rate in rates.values()):
                return rates
    measured = measure(weight_quant)
    gflops = {name: round(measured[name], 1) for name in NAMES}
    if path:
        with contextlib.suppress(OutputError):
            write_json(path, what | {"gflops": gflops})
    return gflops


def _machine() -> dict[str, Any]:
    """Return what a rate depends on: the CPU, its threads, and the matrix multiplication in use."""
    import torch

    from engine.kernels.ops import library
    from kvcache.kernels.cpu.build import cpu_identity

    return {
        "cpu": cpu_identity(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kvbatch": __version__,
        "kernels": library() is not None,
    }


def _measure(weight_quant: str | None) -> dict[str, float]:
    import torch

    from engine.product_speed import product_speeds

    speeds = product_speeds((torch.bfloat16, torch.float32), weight_quant)
    return {str(dtype).removeprefix("torch."): speed for dtype, speed in speeds.items()}
