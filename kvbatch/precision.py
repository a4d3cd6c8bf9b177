"""Which precision a job computes in, and why: what it says, what its rows were computed in so far, or what is faster.

Whether a CPU is fast at bfloat16 its flags do not tell: of those that have the instructions, some take twice as long as
in float32. So both are timed once, and the result is kept in the user's cache.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from kvbatch import __version__
from kvbatch.carry import Carry, last_answers
from kvbatch.errors import InputError, OutputError
from kvbatch.fingerprint import digest
from kvbatch.writer import write_json
from kvcache.user_cache import user_cache

if TYPE_CHECKING:
    from kvbatch.job import Job
    from kvbatch.manifest import RunDirectory

NAMES = ("bfloat16", "float32")
WORTH_RATIO = 0.9  # bfloat16 may be that much slower, for it takes half the memory

Measure = Callable[[str | None], Mapping[str, float]]


@dataclass(frozen=True)
class Precision:
    """A dtype by its name, why it is that, and GFLOP/s of each if they decided."""

    dtype: str
    reason: str
    gflops: Mapping[str, float] | None = None

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate:,.0f} GFLOP/s" for name, rate in (self.gflops or {}).items())
        return f"{self.dtype}: {self.reason}{f' ({rates})' if rates else ''}"

    @classmethod
    def of(cls, run: "RunDirectory", device: str) -> Self | None:
        """Return what a run computes in, if it does so on that device and its manifest can be read."""
        try:
            manifest = run.read_manifest()
            if manifest["device"] != device or manifest["model"]["dtype"] not in NAMES:
                return None
            gflops = (manifest.get("precision") or {}).get("gflops")
            return cls(manifest["model"]["dtype"], f"as in {run.run_id}", gflops)
        except (InputError, KeyError, TypeError, AttributeError):
            return None


def choose_precision(
    wanted: str,
    device: str,
    weight_quant: str | None = None,
    *,
    kept: "RunDirectory | None" = None,
    measure: Measure | None = None,
) -> Precision:
    """Return the precision of a job.

    Args:
        wanted: `model.dtype`.
        kept: the run whose rows stand beside the job's; its choice holds on.
        measure: times a layer in both precisions.
    """
    if wanted != "auto":
        return Precision(wanted, "model.dtype")
    if kept and (found := Precision.of(kept, device)):
        return found
    if device != "cpu":
        return Precision("bfloat16", f"model.dtype auto on {device}")
    try:
        gflops = _known_or(measure or _measure, weight_quant)
    except OSError as error:  # no place for temporary files
        return Precision("float32", f"nothing could be measured ({error})")
    if gflops["bfloat16"] > gflops["float32"]:
        return Precision("bfloat16", "measured here, faster", gflops)
    if gflops["bfloat16"] >= WORTH_RATIO * gflops["float32"]:
        return Precision("bfloat16", "measured here, nearly as fast at half the memory", gflops)
    return Precision("float32", "measured here, faster", gflops)


def run_to_keep_to(
    job: "Job", earlier: "RunDirectory | None", carry: Carry | None, *, new_run: bool
) -> "RunDirectory | None":
    """Return the run whose precision holds on: the one that is continued, or whose rows are carried over."""
    if earlier or new_run:
        return earlier
    if carry:
        return carry.directories[0] if carry.runs else None
    return last_answers(job) if job.input.incremental else None


def _known_or(measure: Measure, weight_quant: str | None) -> dict[str, float]:
    """Return rates from the user's cache, or measure and keep them; without a cache they are measured each time."""
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
    """Return what a rate depends on: the CPU, its threads, and what multiplies."""
    import torch

    from engine.native.ops import library
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
