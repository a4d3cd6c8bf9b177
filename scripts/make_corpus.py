"""Build three real corpora from what this machine has: code, legal texts and logs. Downloads nothing.

    code   the standard library's sources                                    code.jsonl.zst
    legal  licence texts of the system and of installed packages             legal.parquet
    logs   this machine's logs, and the import traces of its own Python      logs.jsonl.gz

Documents keep their raw text; long ones are cut into windows at line ends. The order and the ids depend on
the paths alone, and a text that was seen before is left out.
"""

import argparse
import gzip
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median

import pyarrow as pa
import pyarrow.parquet as pq

FILES = {"code": "code.jsonl.zst", "legal": "legal.parquet", "logs": "logs.jsonl.gz"}
LICENCE_ROOTS = ("/usr/share/common-licenses", "/usr/share/licenses", "/usr/share/doc")
LICENCE_WORDS = ("license", "licence", "copying", "copyright", "notice")
MODULES = (
    "json",
    "asyncio",
    "email.message",
    "xml.dom.minidom",
    "http.server",
    "sqlite3",
    "unittest",
    "tarfile",
)
SKIPPED_CODE = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Size:
    """How many documents, how long they may be, and how many windows one text may give."""

    min_chars: int
    max_chars: int
    max_documents: int
    max_windows: int


SIZES = {"small": Size(1_500, 8_000, 4, 4), "full": Size(1_000, 24_000, 400, 8)}


@dataclass(frozen=True)
class Text:
    """One document. `source` says where its kind of text comes from."""

    path: str
    title: str
    source: str
    text: str


def read_text(path: Path) -> str | None:
    """Read a file as UTF-8; None for what is no plain file, no text or may not be read."""
    try:
        if not path.is_file():
            return None
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read(4_000_000)
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\0" in text else text


def code_texts() -> Iterator[Text]:
    """Yield the sources of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not SKIPPED_CODE.intersection(name.parts) and (text := read_text(path)):
            yield Text(name.as_posix(), name.stem, "standard library", text)


def legal_texts() -> Iterator[Text]:
    """Yield licence texts: the interpreter's, the system's, those of installed packages."""
    own = Path(sysconfig.get_path("stdlib"), "LICENSE.txt")
    if text := read_text(own):
        yield Text("python/LICENSE.txt", "Python", "python", text)
    for root in map(Path, LICENCE_ROOTS):
        for path in sorted(root.glob("*/copyright") if root.name == "doc" else root.rglob("*")):
            if path.suffix != ".gz" and (text := read_text(path)):
                name = path.relative_to(root)
                title = name.parts[0] if root.name == "doc" else name.as_posix()
                yield Text(f"{root.name}/{name.as_posix()}", title, "system", text)
    packages = {package.name: package for package in metadata.distributions() if package.name}
    for name, package in sorted(packages.items(), key=lambda item: item[0].lower()):
        for file in sorted(package.files or (), key=str):
            is_licence = any(word in file.name.lower() for word in LICENCE_WORDS) and ".dist-info" in str(
                file
            )
            if is_licence and (text := read_text(Path(str(package.locate_file(file))))):
                yield Text(f"{name}/{file.name}", f"{name} {package.version}", "python package", text)


def log_texts() -> Iterator[Text]:
    """Yield the logs under /var/log, then import traces of this Python, which every machine can make."""
    for path in sorted(Path("/var/log").rglob("*")):
        if not path.is_symlink() and (text := read_text(path)):
            yield Text(str(path), path.name, "system log", text)
    python = [sys.executable, "-I"]
    commands = [
        ("importtime", [*python, "-X", "importtime", "-c", f"import {', '.join(MODULES)}"]),
        *((f"verbose-{name}", [*python, "-v", "-c", f"import {name}"]) for name in MODULES),
        ("pip-debug", [*python, "-m", "pip", "debug", "--verbose"]),
    ]
    for name, command in commands:
        try:
            done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        text = (done.stderr + done.stdout).decode("utf-8", "replace")
        yield Text(f"command/{name}.log", name, " ".join(command[1:]), text)


def windows(path: str, text: str, size: Size) -> Iterator[str]:
    """Yield a text whole if it is short enough, else windows of it, cut at line ends.

    The windows' lengths spread evenly, on a logarithmic scale, over the lengths allowed: uneven lengths are
    what a scheduler has to cope with.
    """
    if len(text) <= size.max_chars:
        yield text
        return
    start = position = number = 0
    goal = window_chars(path, number, size)
    for line in text.splitlines(keepends=True):
        if position > start and position - start + len(line) > goal:
            yield text[start:position]
            start, number = position, number + 1
            if number == size.max_windows:
                return
            goal = window_chars(path, number, size)
        position += len(line)


def window_chars(path: str, number: int, size: Size) -> int:
    """Choose the length of a window from its name alone."""
    digest = hashlib.sha256(f"{path}#{number}".encode()).digest()
    share = int.from_bytes(digest[:4], "big") / 2**32
    shortest = 1.5 * size.min_chars
    return int(shortest * (size.max_chars / shortest) ** share)


def documents(texts: Iterable[Text], size: Size) -> Iterator[tuple[Text, str]]:
    """Yield documents of the right length with their ids, each content once (white space aside)."""
    seen: set[bytes] = set()
    for text in texts:
        for number, piece in enumerate(windows(text.path, text.text, size), 1):
            digest = hashlib.sha256(" ".join(piece.split()).encode()).digest()
            if size.min_chars <= len(piece) <= size.max_chars and digest not in seen:
                seen.add(digest)
                name = text.path if piece is text.text else f"{text.path}#{number}"
                yield Text(text.path, text.title, text.source, piece), name


def spread(items: list, count: int) -> list:
    """Choose items at even distances, so that a small corpus is not all of one directory."""
    return items if len(items) <= count else [items[len(items) * n // count] for n in range(count)]


def write_jsonl(path: Path, rows: list[tuple[Text, str]]) -> None:
    """Write rows as JSON Lines, gzip or zstd by the name."""
    lines = (
        json.dumps(
            {"id": name, "path": row.path, "n_chars": len(row.text), "text": row.text}, ensure_ascii=False
        )
        for row, name in rows
    )
    data = "".join(line + "\n" for line in lines).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data, mtime=0))
    else:
        with pa.output_stream(str(path), compression="zstd") as stream:
            stream.write(data)


def write_parquet(path: Path, rows: list[tuple[Text, str]]) -> None:
    """Write rows as Parquet with id, title, source and text."""
    columns = {
        "id": [name for _, name in rows],
        "title": [row.title for row, _ in rows],
        "source": [row.source for row, _ in rows],
        "text": [row.text for row, _ in rows],
    }
    schema = pa.schema([(name, pa.string()) for name in columns])
    pq.write_table(
        pa.table(columns, schema), path, compression="zstd", row_group_size=64, write_page_checksum=True
    )


def build(kind: str, out: Path, size: Size) -> str:
    """Build one corpus and say what it holds.

    Raises:
        SystemExit: this machine has no text of the kind.
    """
    path = out / FILES[kind]
    texts = {"code": code_texts, "legal": legal_texts, "logs": log_texts}[kind]()
    rows = spread(list(documents(texts, size)), size.max_documents)
    if not rows:
        raise SystemExit(
            f"make_corpus: this machine has no {kind} texts of {size.min_chars:,} characters and more"
        )
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    (write_parquet if kind == "legal" else write_jsonl)(temporary, rows)
    temporary.replace(path)
    lengths = sorted(len(row.text) for row, _ in rows)
    span = f"{lengths[0]:,} to {lengths[-1]:,} characters, median {median(lengths):,.0f}"
    return f"{path}: {len(rows)} documents of {span}"


def main() -> None:
    """Parse the command line and build the corpora asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"one of {', '.join(FILES)}; default all")
    parser.add_argument("--out", type=Path, default=Path("corpus"), help="directory to write to (corpus/)")
    parser.add_argument(
        "--size", choices=SIZES, default="full", help="small: four short documents of each kind"
    )
    parser.add_argument("--keep", action="store_true", help="leave a corpus that is there already as it is")
    options = parser.parse_args()
    unknown = set(options.kinds) - set(FILES)
    if unknown:
        parser.error(f"unknown kind {sorted(unknown)[0]!r}: use {', '.join(FILES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for kind in options.kinds or FILES:
        if options.keep and (options.out / FILES[kind]).exists():
            print(f"{options.out / FILES[kind]}: kept")
        else:
            print(build(kind, options.out, SIZES[options.size]))


if __name__ == "__main__":
    main()
