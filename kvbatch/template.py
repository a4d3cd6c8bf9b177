"""Placeholders of a prompt: `{text}`, `{id}` and `{column}`; `{{` and `}}` are braces.

A template is cut into pieces once; documents are put between the pieces and never parsed.
"""

from dataclasses import dataclass
from string import Formatter


@dataclass(frozen=True)
class Piece:
    """A static text, or the name of what stands in its place."""

    text: str
    is_placeholder: bool = False


def parse_template(template: str) -> list[Piece]:
    """Cut a template into static texts and placeholders.

    Raises:
        ValueError: A brace stands alone, or a placeholder is more than a name.
    """
    pieces = []
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}; write {{{{ and }}}} for braces that are meant literally") from error
    for text, name, spec, conversion in parsed:
        if text and pieces and not pieces[-1].is_placeholder:
            pieces[-1] = Piece(pieces[-1].text + text)  # the parser ends a text at every doubled brace
        elif text:
            pieces.append(Piece(text))
        if name is None:
            continue
        if not name or spec or conversion:
            shown = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ValueError(
                f"{{{shown}}} is not a placeholder; write {{text}}, {{id}} or {{column}}, "
                "and double the braces that are meant literally"
            )
        pieces.append(Piece(name, is_placeholder=True))
    return pieces


def check_question(template: str) -> None:
    """Prove that `{question}` is the last placeholder of a template and stands in it once.

    Raises:
        ValueError: It does not: the document could not be read before the question is known.
    """
    names = [piece.text for piece in parse_template(template) if piece.is_placeholder]
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
