"""The house: which package and which room may import which; how long a file and how wide a function may be.

kvbatch → engine → kvcache → torch, never back; and within each package a straight stack of rooms. Every import counts,
wherever in a module it stands, those for type checkers included.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.user_cache import user_cache

ROOT = Path(__file__).parent.parent
BELOW = "every package below it"

# Rooms and root modules from bottom to top, each with what it may import of this project. A package's own `__init__`
# is no room: it is the door, and lies above all of them.
HOUSE: dict[str, dict[str, str]] = {
    "kvcache": {
        "user_cache": "",
        "scorers": "",
        "config": BELOW,
        "promises": BELOW,
        "sizes": "scorers, config",
        "quantize": "sizes",
        "kernels": "user_cache, sizes, quantize",
        "pages": "sizes, quantize, kernels",
        "compress": "config, sizes, quantize, kernels, pages",
        "sequence": "sizes, kernels, pages, compress",
    },
    "engine": {
        "errors": BELOW,
        "config": BELOW,
        "constraint": BELOW,
        "request": BELOW,
        "sampling": BELOW,
        "stopping": BELOW,
        "detokenizer": BELOW,
        "sequence": BELOW,
        "scheduler": BELOW,
        "prompt_lookup": BELOW,
        "packing": BELOW,
        "position_rebasing": BELOW,
        "control_groups": BELOW,
        "memory": BELOW,
        "model_files": BELOW,
        "kernels": "kvcache",
        "models": "errors, model_files, kernels, kvcache",
        "product_speed": BELOW,
        "calibration": BELOW,
        "head_calibration": BELOW,
        "key_basis": BELOW,
        "check_texts": "",
        "request_pages": BELOW,
        "memory_division": BELOW,
        "attention": "models, kvcache",
        "cache": BELOW,
        "forecast": BELOW,
        "monitoring": BELOW,
        "runner": BELOW,
        "prefix_cache": BELOW,
        "engine_core": BELOW,
        "teacher_forcing": BELOW,
        "cache_loss": BELOW,
        "promise": BELOW,
        "kept_policies": BELOW,
        "llm": BELOW,
    },
    "kvbatch": {
        "errors": "",
        "text": "",
        "atomic_file": BELOW,
        "signals": BELOW,
        "progress": "errors, text",
        "corpus": "errors, text",
        "job_file": "errors, corpus, engine, kvcache",
        "model": "errors, text, atomic_file, job_file, engine, kvcache",
        "cache_folder": "errors, text, model, kvcache",
        "run_dir": "errors, text, atomic_file, corpus, job_file, model, engine, kvcache",
        "prompts": "errors, corpus, job_file, model, engine, kvcache",
        "plan": "errors, text, atomic_file, corpus, job_file, model, run_dir, prompts, engine, kvcache",
        "opened_job": BELOW,
        "planning": BELOW,
        "estimate": BELOW,
        "report": "errors, text, atomic_file, corpus, job_file, run_dir",
        "run": BELOW,
        "commands": BELOW,
        "cli": BELOW,
        "__main__": BELOW,
    },
}
PACKAGES = tuple(HOUSE)  # from bottom to top

# A binding takes what its C function takes.
C_INTERFACES = {"engine/kernels/ops.py", "kvcache/kernels/cpu/ops.py"}
MAX_LINES, MAX_PARAMETERS = 350, 8

LIBRARIES = {"kvcache": {"torch"}, "engine": {"torch", "transformers", "safetensors"}}
FORBIDDEN = {"triton", "tests"}


def files_of(package: str, *suffixes: str) -> list[Path]:
    files = [file for file in sorted((ROOT / package).rglob("*")) if file.suffix in suffixes]
    assert files
    return files


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(file: Path) -> Iterator[str]:
    """Yield the dotted names that a module imports."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name_of(file)}: relative import; write the package's name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(file: Path) -> str:
    """Return the room or root module that a file belongs to, `__init__` for the package's own."""
    package_file = file.relative_to(ROOT).parts[1:]
    return package_file[0].removesuffix(".py")


def may_import(package: str, room: str) -> list[str]:
    """Return the rooms of its package, and the other packages, that a room may import."""
    below = list(HOUSE[package])[: list(HOUSE[package]).index(room)]
    packages = list(PACKAGES[: PACKAGES.index(package)])
    listed = HOUSE[package][room]
    if listed == BELOW:
        return below + packages
    names = [name for name in listed.split(", ") if name]
    assert not set(names) - {*below, *packages}, f"{package}/{room} may import only what lies below it"
    return names


def arrows() -> Iterator[tuple[str, str, str, str]]:
    """Yield every import from a room of this project: its file, package and room, and what it reaches.

    That is another room of the package, another package, or `""` for the package's own `__init__`.
    """
    for package in PACKAGES:
        for file in files_of(package, ".py"):
            room = room_of(file)
            if room == "__init__":
                continue
            for name in imports(file):
                top, _, rest = name.partition(".")
                target = rest.partition(".")[0]
                if top == package:
                    target = target if target in HOUSE[package] else ""
                    if target != room:
                        yield name_of(file), package, room, target
                elif top in PACKAGES:
                    yield name_of(file), package, room, top


def test_every_module_has_its_place_in_the_house():
    for package in PACKAGES:
        found = {room_of(file) for file in files_of(package, ".py")} - {"__init__"}
        assert found == set(HOUSE[package]), f"{package}: the table HOUSE names other rooms than there are"
        for room in HOUSE[package]:
            may_import(package, room)


def test_no_arrow_leads_upwards():
    wrong = set()
    for file, package, room, target in arrows():
        # Those inside read the version from `kvbatch`; the doors of engine and kvcache are for others.
        if target == "" and package == "kvbatch":
            continue
        if target not in may_import(package, room):
            wrong.add(f"{file} → {target if target in PACKAGES else f'{package}/{target}'}")
    assert not wrong, f"imports that the table HOUSE does not allow: {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_says_what_it_holds_and_imports(package):
    for room, listed in HOUSE[package].items():
        door = ROOT / package / room / "__init__.py"
        if not door.parent.is_dir():
            continue
        line = (ast.get_docstring(tree_of(door)) or "").partition("\n")[0]
        holds, _, wanted = line.partition(" Imports: ")
        assert holds.endswith("."), f"{name_of(door)} does not begin with a sentence on what the room holds"
        assert wanted == f"{listed or 'nothing'}.", f"{name_of(door)} names other imports than the table"


def test_no_library_is_imported_where_it_is_not_wanted():
    for package in PACKAGES:
        for file in files_of(package, ".py"):
            names = {name.partition(".")[0] for name in imports(file)} - {*sys.stdlib_module_names, *PACKAGES}
            wrong = names - LIBRARIES[package] if package in LIBRARIES else names & FORBIDDEN
            assert not wrong, f"{name_of(file)} imports {', '.join(sorted(wrong))}"


def test_no_file_is_long():
    files = [file for package in PACKAGES for file in files_of(package, ".py", ".h", ".cpp")]
    assert not {name_of(file) for file in files if file.read_text().count("\n") > MAX_LINES}


def test_no_function_takes_many_parameters():
    wide = set()
    for file in (file for package in PACKAGES for file in files_of(package, ".py")):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                names += [each.arg for each in (given.vararg, given.kwarg) if each]
                if len(set(names) - {"self", "cls"}) > MAX_PARAMETERS and name_of(file) not in C_INTERFACES:
                    wide.add(f"{name_of(file)}: {node.name}")
    assert not wide


def test_tests_share_helpers_and_not_one_another():
    for file in files_of("tests", ".py"):
        shared = [name for name in imports(file) if name.startswith("tests.")]
        wrong = [name for name in shared if re.search(r"\.(test_\w+|conftest)(\.|$)", name)]
        assert not wrong, f"{name_of(file)} imports {', '.join(wrong)}; move it to a helpers.py"


def test_the_users_cache_is_not_written(own_cache):
    assert user_cache() == own_cache and not (own_cache / "hashes").is_symlink()
