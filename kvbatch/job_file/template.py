"""Placeholders of a prompt: `{text}`, `{id}`, `{choices}` and `{column}`; `{{` and `}}` are braces.

A template is cut into pieces once; documents are put between the pieces and never parsed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter

CHOICES = "choices"  # filled by the job itself where it has `generation.choices`


@dataclass(frozen=True)
class Piece:
    """A static text, or the name of what stands in its place."""

    text: str
    is_placeholder: bool = False


def parse_template(template: str, values: Mapping[str, str] | None = None) -> list[Piece]:
    """Cut a template into static texts and placeholders.

    Args:
        values: of placeholders that are the same for every row, and so static text.

    Raises:
        ValueError: A brace stands alone, or a placeholder is more than a name.
    """
    pieces: list[Piece] = []

    def add(text: str) -> None:
        if text and pieces and not pieces[-1].is_placeholder:
            pieces[-1] = Piece(pieces[-1].text + text)  # the parser ends a text at every doubled brace
        elif text:
            pieces.append(Piece(text))

    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}; write {{{{ and }}}} for braces that are meant literally") from error
    values = values or {}
    for text, name, spec, conversion in parsed:
        add(text)
        if name is None:
            continue
        if not name or spec or conversion:
            shown = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ValueError(
                f"{{{shown}}} is not a placeholder; write {{text}}, {{id}} or {{column}}, "
                "and double the braces that are meant literally"
            )
        if name in values:
            add(values[name])
        else:
            pieces.append(Piece(name, is_placeholder=True))
    return pieces


def check_question(template: str, *, has_choices: bool = True) -> None:
    """Prove that `{question}` is the last placeholder of a template and stands in it once.

    Args:
        has_choices: `{choices}` is the job's own, which may stand anywhere.

    Raises:
        ValueError: It does not: the document could not be read before the question is known.
    """
    own = {CHOICES} if has_choices else set()
    names = [p.text for p in parse_template(template) if p.is_placeholder and p.text not in own]
    if names[-1:] != ["question"] or names.count("question") > 1:
        raise ValueError(
            "with prompt.questions, {question} must stand once, after {text} and all other placeholders, "
            "so that a document is read once for all questions"
        )


def check_template(template: str, num_texts: int) -> None:
    """Prove that a template parses and holds `{text}` exactly `num_texts` times.

    Raises:
        ValueError: It does not.
    """
    found = sum(piece.is_placeholder and piece.text == "text" for piece in parse_template(template))
    if found != num_texts:
        where = "exactly once" if num_texts else "only in prompt.template"
        raise ValueError(f"{{text}} must stand {where}, not {found} times; it is where the document goes")


def column_names(template: str) -> list[str]:
    """Return the columns that a template needs beside the text and the id."""
    names = [piece.text for piece in parse_template(template) if piece.is_placeholder]
    return [name for name in dict.fromkeys(names) if name not in ("text", "id")]
