"""Choose the number of CPU threads: the configured one, else at most what the CPUs and the CPU quota allow."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from engine.control_groups import cpu_quota


@dataclass(frozen=True)
class Threads:
    """A number of threads and the reason for it."""

    count: int
    reason: str


def choose_threads(wanted: int | None, available: int, root: Path = Path("/")) -> Threads:
    """Return the configured number, else the available one within the CPUs and the CPU quota of this process.

    With more threads than the quota allows, the kernel stops some threads during a step, and the others wait for them.

    Args:
        wanted: the value of `engine.threads`.
        available: torch's own choice.
        root: directory that holds `proc` and `sys`.
    """
    if wanted:
        return Threads(wanted, "engine.threads")
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else available
    count = max(1, min(available, allowed))
    quota = cpu_quota(root)
    if quota is not None and math.ceil(quota) < count:
        return Threads(max(1, math.ceil(quota)), f"a CPU quota of {quota:g}, of {count} CPUs")
    return Threads(count, "one for each CPU" if count == allowed else "torch's own choice")
