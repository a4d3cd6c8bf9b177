"""The project's Markdown pages, and what they quote."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL_PAGES = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md"))]

_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)


def name(page: Path) -> str:
    """Return a page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    return [text for found, text in _FENCE.findall(page.read_text()) if found == language]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def quoted(page: Path) -> list[str]:
    """Return the inline code of a page, each on one line."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(page))]
