"""The user's cache folder as lines of a terminal and as plain values."""

from collections.abc import Collection, Iterator
from typing import Any

from kvbatch.cache_folder.contents import KINDS, CacheFolder, Entry
from kvbatch.text import escaped, format_bytes

_NUM_SHOWN = 10  # of what is not counted
_NOTES = {"busy": "a process is making it", "unfinished": "left by a killed process"}
_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def to_json(found: CacheFolder) -> dict[str, Any]:
    """Return the folder as plain values; sizes in bytes, ages in seconds."""
    kinds = {}
    for kind in KINDS:
        entries = [entry for entry in found.entries if entry.kind == kind.name]
        about = {"content": kind.content, "loss": kind.loss}
        kinds[kind.name] = about | _totals(entries) | {"entries": [_plain(entry) for entry in entries]}
    return {
        "path": str(found.path),
        "exists": found.is_there,
        **_totals(found.entries),
        "kinds": kinds,
        "not_counted": [{"path": str(each.path), "reason": each.reason} for each in found.strangers],
    }


def render(found: CacheFolder) -> Iterator[str]:
    """Yield the folder as lines: where it is, what is in it kind by kind, what is not counted."""
    total = total_text(found.entries) if found.is_there else "not there, nothing is cached"
    yield line("cache", f"{found.path}: {total}")
    yield from render_kinds(found.entries)
    yield from _strangers("not counted", found)


def render_kinds(entries: Collection[Entry]) -> Iterator[str]:
    """Yield entries as lines: their number, bytes and ages by kind, and those that say what they are for."""
    for kind in KINDS:
        own = [entry for entry in entries if entry.kind == kind.name]
        if own:
            yield line(kind.name, f"{total_text(own)}, {_ages(own)}: {kind.content}; if lost, {kind.loss}")
        for entry in own:
            if kind.has_titles or entry.state != "whole":
                yield line("", f"{_title(entry)}, {format_bytes(entry.num_bytes)}, {_ages([entry])}")


def render_left_alone(found: CacheFolder) -> Iterator[str]:
    """Yield what is not removed, and why, as lines."""
    for entry in found.entries:
        if entry.state == "busy":
            yield line("left alone", f"{entry.path.relative_to(found.path)}: {_NOTES['busy']}")
    yield from _strangers("left alone", found)


def total_text(entries: Collection[Entry]) -> str:
    """Say how many entries there are, and their bytes."""
    totals = _totals(entries)
    noun = "entry" if len(entries) == 1 else "entries"
    return f"{totals['num_entries']:,} {noun}, {format_bytes(totals['num_bytes'])}"


def line(name: str, text: str) -> str:
    """Return a line that any terminal shows as one."""
    return f"{name:<12} {escaped(text)}"


def _totals(entries: Collection[Entry]) -> dict[str, int]:
    return {"num_entries": len(entries), "num_bytes": sum(entry.num_bytes for entry in entries)}


def _strangers(name: str, found: CacheFolder) -> Iterator[str]:
    for each in found.strangers[:_NUM_SHOWN]:
        yield line(name, f"{each.path.relative_to(found.path)}: {each.reason}")
    if len(found.strangers) > _NUM_SHOWN:
        yield line(name, f"{len(found.strangers) - _NUM_SHOWN:,} more")


def _plain(entry: Entry) -> dict[str, Any]:
    values = {"name": entry.path.name, "num_bytes": entry.num_bytes, "age_s": round(entry.age_s)}
    return values | {"state": entry.state} | ({"policy": entry.policy} if entry.kind == "policies" else {})


def _title(entry: Entry) -> str:
    if entry.state != "whole":
        return f"{entry.path.name} ({_NOTES[entry.state]})"
    if entry.kind != "policies":
        return entry.path.name
    if entry.policy is None:
        return f"{entry.path.name} (no policy that can be read)"
    policy = entry.policy
    where = ", ".join(policy[name] for name in ("dtype", "device") if name in policy)
    loss = f"KL {policy['kl']:.4f}" if "kl" in policy else f"NLL of the answer {policy['nll']:+.4f}"
    of = f"{policy['preset']} for model {policy['model']}" + (f" ({where})" if where else "")
    return f"{of}: {policy['kv_ratio']:.1%} of the bytes, {loss}"


def _ages(entries: Collection[Entry]) -> str:
    """Say how old entries are, in the notation of `--older-than`."""
    ages = [_age(pick(entry.age_s for entry in entries)) for pick in (min, max)]
    return f"{' to '.join(dict.fromkeys(ages))} old"


def _age(seconds: float) -> str:
    unit = next((unit for unit, size_s in _UNITS_S.items() if seconds >= size_s), "s")
    return f"{int(seconds // _UNITS_S[unit])}{unit}"
