"""How much memory there is, what a written budget means in bytes, and what to do when memory ran out."""

import gc
import os
import re
import resource
import sys
from pathlib import Path

from engine.control_groups import memory_room
from engine.errors import BudgetError

_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}b": size for unit, size in _UNITS.items() if unit not in ("", "b")}
_UNITS |= {"kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4}


def parse_budget(value: str | float | int) -> float | int:
    """Read a budget as written: an int is bytes, a float in (0, 1) a fraction; `"60%"`, `"4GiB"`, `"512MB"`.

    Raises:
        BudgetError: It is none of these, or not positive.
    """
    problem = BudgetError(
        f"memory_budget {value!r} is neither a fraction such as 0.6 or 60% nor a size such as 4GiB or 512MB"
    )
    if isinstance(value, bool):
        raise problem
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|[a-zA-Z]*)\s*", value)
        if not match:
            raise problem
        number, unit = float(match[1]), match[2].lower()
        if unit == "%":
            value = number / 100
        elif unit == "" and "." in match[1]:
            value = number
        elif unit in _UNITS:
            value = int(number * _UNITS[unit])
        else:
            raise problem
    if (isinstance(value, float) and not 0 < value < 1) or value <= 0:
        raise problem
    return value


def resolve_budget(value: str | float | int, device: str = "cpu", *, reserved_bytes: int = 0) -> int:
    """Return a written budget in bytes; a fraction is of the memory that is free now, less `reserved_bytes`.

    Raises:
        BudgetError: The value cannot be read, or a size exceeds the memory there is.
    """
    budget = parse_budget(value)
    available = available_bytes(device) - reserved_bytes
    if isinstance(budget, float):
        return max(1, int(available * budget))
    if budget > available:
        raise BudgetError(
            f"memory_budget {value!r} is {budget:,} bytes, but only {max(0, available):,} are free on {device}"
        )
    return budget


def available_bytes(device: str = "cpu") -> int:
    """Return the bytes a process may still take: of the GPU, or of this machine within its control groups."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    # macOS tells only how much memory there is
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    available = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    room = memory_room()
    return available if room is None else min(available, room)


def resident_bytes() -> int:
    """Return the bytes of physical memory that this process holds; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Return the most bytes of physical memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception says that memory could not be had, on a GPU or on this machine."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's own
        return True
    signs = ("DefaultCPUAllocator", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def release_memory() -> None:
    """Give memory back that nothing uses any more; call it when no exception is held, since that holds tensors."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
