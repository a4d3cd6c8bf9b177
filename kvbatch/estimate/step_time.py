"""How fast a model runs here under a policy, kept in the user's cache: what a plan's estimate of time rests on."""

import contextlib
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbatch.atomic_file import write_json
from kvbatch.errors import OutputError
from kvbatch.text import digest
from kvcache.user_cache import user_cache

if TYPE_CHECKING:
    from engine import EngineConfig
    from engine.forecast import SpeedFit
    from kvbatch.opened_job import OpenedJob

MIN_STEPS = 20  # of a run: fewer tell too little of five coefficients


@dataclass(frozen=True)
class Speed:
    """Seconds of a step's parts (`engine.forecast`), and what a job takes beside its steps, as a factor."""

    coefficients: tuple[float, ...]
    overhead: float
    num_steps: int


def keep_speed(
    opened: "OpenedJob",
    config: "EngineConfig",
    fit: "SpeedFit",
    running_s: float,
    min_steps: int = MIN_STEPS,
) -> None:
    """Keep what steps tell of the speed, unless there were too few of them.

    A cache that cannot be written costs an estimate, nothing else.
    """
    if fit.num_steps < min_steps:
        return
    speed = Speed(fit.coefficients(), max(1.0, running_s / fit.steps_s), fit.num_steps)
    with contextlib.suppress(OutputError, FileNotFoundError):
        write_json(_path(opened, config), asdict(speed))


def known_speed(opened: "OpenedJob", config: "EngineConfig") -> Speed | None:
    """Return what is known of the speed of this model, here, under an engine's configuration."""
    try:
        found = json.loads(_path(opened, config).read_text(encoding="utf-8"))
        return Speed(tuple(found["coefficients"]), found["overhead"], found["num_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(opened: "OpenedJob", config: "EngineConfig") -> Path:
    import torch

    what = {
        "model": opened.model.files.revision,
        "dtype": str(opened.model.dtype),
        "weight_quant": opened.job.model.weight_quant,
        "device": opened.model.device,
        "machine": f"{platform.node()} {platform.processor()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "cache": asdict(config.cache),
        "step_tokens": config.step_tokens,
        "deterministic": config.deterministic,
    }
    return user_cache() / "speed" / f"{digest(what)[:20]}.json"
