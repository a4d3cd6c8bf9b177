"""The files that one GGUF model consists of: itself, or all parts of a split one; found by their names."""

import re
from pathlib import Path

from kvbatch.errors import ModelUnavailable

# llama-gguf-split's names. The parts say it inside too, behind the whole vocabulary.
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def gguf_parts(path: Path) -> list[Path]:
    """Return the parts of a GGUF in order, whichever of them is named; a whole file is its only part.

    Raises:
        ModelUnavailable: A part is not there.
    """
    parts = named_parts(path)
    missing = [number for number, part in enumerate(parts, start=1) if not part.is_file()]
    if missing:
        names = ", ".join(parts[number - 1].name for number in missing)
        raise ModelUnavailable(
            f"{path.parent} lacks part {', '.join(map(str, missing))} of {len(parts)} of a split GGUF: {names}; "
            "put it beside the others, or name a file merged by llama-gguf-split --merge"
        )
    return parts


def named_parts(path: Path) -> list[Path]:
    """Return the same, parts that are not there too."""
    match = _PART.fullmatch(path.name)
    count = int(match["count"]) if match else 1
    if match is None or not 1 <= int(match["number"]) <= count or count == 1:
        return [path]
    return [
        path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)
    ]


def gguf_stem(path: Path) -> str:
    """Return the name of a model without suffix and part."""
    match = _PART.fullmatch(path.name)
    return match["stem"] if match else path.stem
