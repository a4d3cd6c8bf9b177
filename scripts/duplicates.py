"""Find code that stands twice in the packages: six lines or more, whatever their indentation.

Comments, docstrings, imports and tables do not count, and neither do signatures, which every implementation of an
interface repeats. A table is a constant of a module; an `__init__.py` is one of what its room offers. Prints both
places of each passage and exits 1 if there is one.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvcache", "engine", "kvbatch")
WINDOW = 6
Line = tuple[int, str]  # its number, and its code without what surrounds it
Place = tuple[Path, int]  # a file and the first line
_WORD = re.compile(r"\w")  # a line of brackets alone does not count


def python_lines(text: str) -> list[Line]:
    """Return the lines of a module that count."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            lines[number - 1] = lines[number - 1][:column]
    tree = ast.parse(text)
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left_out.update(range(node.lineno, node.body[0].lineno))
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_table = isinstance(node, ast.Assign | ast.AnnAssign) and node in tree.body
        if is_docstring or is_import or is_table:
            assert isinstance(node, ast.stmt) and node.end_lineno is not None
            left_out.update(range(node.lineno, node.end_lineno + 1))
    return [(n, line.strip()) for n, line in enumerate(lines, 1) if _WORD.search(line) and n not in left_out]


def cpp_lines(text: str) -> list[Line]:
    """Return the lines of a C++ file that count: without comments and directives."""
    bare = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    lines = [re.sub(r"//.*|^\s*#.*", "", line).strip() for line in bare.splitlines()]
    return [(n, line) for n, line in enumerate(lines, 1) if _WORD.search(line)]


def duplicates(files: dict[Path, list[Line]]) -> Iterator[tuple[Place, Place]]:
    """Yield where each passage that stands twice begins: its second place and its first."""
    seen: dict[tuple[str, ...], Place] = {}
    for path, lines in files.items():
        continues = False
        for start in range(len(lines) - WINDOW + 1):
            place = path, lines[start][0]
            first = seen.setdefault(tuple(code for _, code in lines[start : start + WINDOW]), place)
            if first != place and not continues:
                yield place, first
            continues = first != place


def main() -> int:
    """Look through the three packages; return the exit code."""
    files: dict[Path, list[Line]] = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*"))):
        if path.suffix == ".py" and path.name != "__init__.py":
            files[path.relative_to(ROOT)] = python_lines(path.read_text())
        elif path.suffix in (".cpp", ".h"):
            files[path.relative_to(ROOT)] = cpp_lines(path.read_text())
    found = list(duplicates(files))
    for (second, line), (first, first_line) in found:
        print(
            f"{second}:{line}: {WINDOW} lines or more stand at {first}:{first_line} already; let both call one"
        )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
