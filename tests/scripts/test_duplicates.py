"""What counts as code that stands twice."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "duplicates.py"
BODY = [f"x{n} = f({n})" for n in range(6)]


def load():
    spec = importlib.util.spec_from_file_location("duplicates", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_six_lines_count_whatever_their_indentation_and_comments():
    module = load()
    one = module.python_lines("def a():\n" + "".join(f"    {line}\n" for line in BODY))
    text = "class B:\n    def b(self):\n" + "".join(f"        {line}  # {line}\n\n" for line in BODY)
    found = list(module.duplicates({Path("one"): one, Path("two"): module.python_lines(text)}))
    assert found == [((Path("two"), 3), (Path("one"), 2))]
    assert not list(module.duplicates({Path("one"): one[:-1], Path("two"): module.python_lines(text)}))
    cpp = [module.cpp_lines("\n".join(f"{line};  // {n}" for line in BODY)) for n in range(2)]
    assert list(module.duplicates(dict(zip((Path("a"), Path("b")), cpp, strict=True))))


def test_imports_tables_docstrings_and_signatures_do_not_count():
    names = [f"a{n}" for n in range(6)]
    imports = "".join(f"import {name}\n" for name in names)
    table = "TABLE = {\n" + "".join(f"    '{name}': 1,\n" for name in names) + "}\n"
    signature = "def f(\n" + "".join(f"    {name}: int,\n" for name in names) + ") -> None:\n"
    text = imports + table + signature + '    """' + "\n    ".join(names) + '\n    """\n'
    assert not load().python_lines(text)
