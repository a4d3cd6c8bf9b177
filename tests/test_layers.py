"""kvbatch → engine → kvcache → torch, never back; engine and kvcache run without the job's libraries."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "kvcache": {"kvcache", "torch"},
    "engine": {"engine", "kvcache", "torch", "transformers", "safetensors"},
}
FORBIDDEN = {"kvbatch": {"triton", "tests"}}
STANDARD = frozenset(__import__("sys").stdlib_module_names)


def imported(file: Path) -> set[str]:
    """Return the top-level names a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: relative import; write the package's name"
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", ["kvcache", "engine", "kvbatch"])
def test_packages_import_only_what_lies_below_them(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        names = imported(file) - STANDARD
        wrong = names - ALLOWED[package] if package in ALLOWED else names & FORBIDDEN[package]
        assert not wrong, f"{file.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"
