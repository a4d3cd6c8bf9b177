"""Take out of a text what costs tokens and tells a reader nothing; only what a job asks for by name.

ansi       terminal escape sequences (CSI, OSC and the others), and what a line held before a bare carriage
           return drew over it; tabs stay
invisible  zero-width, bidi and tag characters; joiners stay where a script or an emoji needs them, tags where
           they make a flag
blobs      data URIs, PEM blocks and runs of base64 or hex, each replaced by its length in brackets
"""

import re
from collections.abc import Callable, Iterable

from kvbatch.job_file.sections import Cleaning

ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor moves
    r"|\x1b\][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC: titles, links
    r"|\x1b[PX^_][^\x1b\x9c]*(?:\x1b\\|\x9c)"  # device control and other strings
    r"|\x1b[ -/]*[0-~]"  # all others, and the start of one that does not end
)
# A flag of a region is a black flag and tags; it is matched first and kept.
INVISIBLE = re.compile(
    "(\U0001f3f4[\U000e0020-\U000e007e]+\U000e007f)"
    "|[\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]+"
    "|(?<![\u0300-\U0010ffff])[\u200c\u200d]+"  # joiners after Latin letters, digits and spaces join nothing
)
BLOB = re.compile(
    r"data:[\w.+-]+/[\w.+-]+(?:;[\w=.+-]+)*;base64,[A-Za-z0-9+/_=-]*"
    r"|-----BEGIN ([A-Z0-9 ]+)-----[A-Za-z0-9+/=\s]*-----END \1-----"
    r"|(?<![A-Za-z0-9+/])(?:[A-Za-z0-9+/]{60,76}\r?\n){4,}[A-Za-z0-9+/]*={0,2}"  # wrapped lines
    r"|(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{256,}={0,2}"
)


def clean(text: str, kinds: Iterable[Cleaning]) -> str:
    """Return a text without these kinds of characters."""
    for kind in kinds:
        text = _CLEANERS[kind](text)
    return text


def _strip_ansi(text: str) -> str:
    text = ESCAPE.sub("", text)
    return "\n".join(map(_last_redraw, text.split("\n"))) if "\r" in text else text


def _last_redraw(line: str) -> str:
    """Drop what a line drew before its last carriage return; those at its end belong to the line's end."""
    return line[line.rstrip("\r").rfind("\r") + 1 :]


def _strip_invisible(text: str) -> str:
    return INVISIBLE.sub(lambda match: match[1] or "", text)


def _name_blobs(text: str) -> str:
    def named(match: re.Match[str]) -> str:
        has_digits = any(map(str.isdigit, match[0]))  # a ruled line has none
        return f"[{len(match[0]):,} characters of data]" if has_digits else match[0]

    return BLOB.sub(named, text)


_CLEANERS: dict[str, Callable[[str], str]] = {
    "ansi": _strip_ansi,
    "invisible": _strip_invisible,
    "blobs": _name_blobs,
}
