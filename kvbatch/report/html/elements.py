"""The elements that the page is made of. Every text goes through `escape` on its way."""

from collections.abc import Iterable, Sequence
from html import escape as escape_html

_MAX_ID_CHARS = 80


def escape(value: object) -> str:
    """Return a value as text that is no markup; a lone surrogate is written as its escape."""
    text = "–" if value is None else str(value)
    return escape_html(text.encode("utf-8", "backslashreplace").decode())


def section(title: str, *parts: str) -> str:
    """Return a part of the page below its heading; the parts are markup."""
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(part for part in parts if part)


def caption(text: str) -> str:
    """Return the sentence that explains a table or a group of figures."""
    return f'<p class="muted">{escape(text)}</p>'


def figure(title: str, svg: str, text: str) -> str:
    """Return a plot between its title and the text that explains it."""
    return f"<figure><h3>{escape(title)}</h3>{svg}<figcaption>{escape(text)}</figcaption></figure>\n"


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    numbers: Iterable[int] = (),
    *,
    has_head: bool = True,
) -> str:
    """Return a table.

    Args:
        numbers: the columns that are set to the right.
    """
    kinds = [' class="number"' if i in set(numbers) else ' class="ids"' for i in range(len(heads))]
    head = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(kinds, heads, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>\n"
        for row in rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if has_head else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def short(row_id: str) -> str:
    """Return a row id, shortened if it is long."""
    return row_id if len(row_id) <= _MAX_ID_CHARS else row_id[: _MAX_ID_CHARS - 1] + "…"
