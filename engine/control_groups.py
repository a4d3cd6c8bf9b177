"""What the control groups of this process leave it, of memory and of CPU time.

A service's limit stands at its own group, a container's at the group that is its root, a slice's above both: each of
them holds. Version 2 has one hierarchy, version 1 one for each controller, and a machine may have both. On a system
without control groups nothing is limited.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_NO_LIMIT_BYTES = 1 << 60  # version 1 writes the largest number of pages for none
# limits, usage, and in memory.stat what the kernel takes back from files that were read, by version
_MEMORY = {
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def memory_room(root: Path = Path("/")) -> int | None:
    """Return the bytes that the tightest group still has room for; None without a limit.

    Files that were read count as usage until their pages are wanted for something else: they are left out.

    Args:
        root: directory that holds `proc` and `sys`.
    """
    rooms = []
    for version, folder in _groups(root, "memory"):
        names, usage_name, reclaimable = _MEMORY[version]
        limits = [limit for name in names if (limit := _number(folder / name)) is not None]
        if not limits or min(limits) >= _NO_LIMIT_BYTES:
            continue
        stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat") if " " in line)
        usage = (_number(folder / usage_name) or 0) - int(stat.get(reclaimable, 0))
        rooms.append(max(0, min(limits) - max(0, usage)))
    return min(rooms, default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many CPUs' time the tightest group grants; None without a limit.

    Args:
        root: directory that holds `proc` and `sys`.
    """
    quotas = []
    for version, folder in _groups(root, "cpu"):
        if version == 2:  # "max 100000" or "150000 100000"
            words = " ".join(_lines(folder / "cpu.max")).split()
        else:  # -1 for none
            words = [line for name in ("quota", "period") for line in _lines(folder / f"cpu.cfs_{name}_us")]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield version and directory of the groups that this process is in, from its own outwards, as far as mounted."""
    own = dict(_own_groups(root, controller))
    mounts = list(_mounts(root, controller))
    mounts += [(2, "/", "/sys/fs/cgroup"), (1, "/", f"/sys/fs/cgroup/{controller}")]
    seen = set()
    for version, mounted, point in mounts:
        path = PurePosixPath(own.get(version, "/"))
        # A container may see its own group alone, mounted as the root; the name is still the host's.
        inner = path.relative_to(mounted) if path.is_relative_to(mounted) and ".." not in path.parts else None
        folder = _below(root, point)
        for group in [inner, *inner.parents] if inner is not None else [PurePosixPath()]:
            if (folder / group) not in seen and (folder / group).is_dir():
                seen.add(folder / group)
                yield version, folder / group


def _own_groups(root: Path, controller: str) -> Iterator[tuple[int, str]]:
    """Yield the paths of `/proc/self/cgroup`, `0::/path` or `4:cpu,cpuacct:/path`, by version."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            yield 2, path
        elif controller in controllers.split(","):
            yield 1, path


def _mounts(root: Path, controller: str) -> Iterator[tuple[int, str, str]]:
    """Yield version, mounted group and mount point of the hierarchies that may limit what a controller controls."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, dash, filesystem = line.partition(" - ")
        fields, kind = mount.split(), filesystem.split()
        if not dash or len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield 2, fields[3], fields[4]
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            yield 1, fields[3], fields[4]


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _number(file: Path) -> int | None:
    """Return the number that a file holds; None for `max`, -1 and what cannot be read."""
    text = "".join(_lines(file)[:1]).strip()
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return []
