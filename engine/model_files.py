"""List the files of a model directory, and detect placeholders. Reads no weights and imports no torch."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from engine.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_config.json"

# Files besides the weights: configuration, tokenizer, chat templates and code.
_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")
_TEMPLATES = "additional_chat_templates/*.jinja"  # where transformers stores the other chat templates
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_WEB_PAGE = (b"<!doctype html", b"<html")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelError: missing, unreadable or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; is {path.parent} a model directory?") from None
    except (OSError, ValueError) as error:
        stand_in = described_stand_in(path)
        raise ModelError(
            stand_in or f"{path} cannot be read ({error}); correct it, or fetch it again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; take the file that belongs to the model")
    return value


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a model directory: the single one, else those that the index lists.

    Raises:
        ModelError: there are none, or the index is unreadable or names a file outside the directory.
    """
    if (path / SINGLE_FILE).exists():
        return [path / SINGLE_FILE]
    index = path / INDEX_FILE
    if not index.exists():
        raise ModelError(
            f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors weights are read, "
            "so save the model as safetensors"
        )
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{index} has no weight_map; save the model again")
    for name in names.values():
        if (
            not isinstance(name, str)
            or PurePosixPath(name).is_absolute()
            or ".." in PurePosixPath(name).parts
        ):
            raise ModelError(
                f"{index} names {name!r}, which is no file of the directory; copy the weights into {path} "
                "and name them relative to it"
            )
    return [path / name for name in sorted(set(names.values()))]


def model_files(path: Path) -> list[Path]:
    """Return the existing files of a model directory that affect its answers, sorted.

    Raises:
        ModelError: the index of the weights is unreadable or names a file outside the directory.
    """
    small = [file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file()]
    weights = weight_files(path) if holds_weights(path) else []
    return sorted({*small, *path.glob(_TEMPLATES), *(file for file in weights if file.is_file())})


def holds_weights(path: Path) -> bool:
    """Return whether a directory has any weights, even if the index lists more files; raises as `weight_files`."""
    has_list = (path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists()
    return has_list and any(file.exists() for file in weight_files(path))


def described_stand_in(path: Path) -> str | None:
    """Return an error message if a file is a Git LFS pointer or a web page instead of model data, else None."""
    try:
        with path.open("rb") as stream:
            head = stream.read(256)
    except OSError:
        return None
    if head.startswith(_LFS_POINTER):
        return (
            f"{path} is a Git LFS pointer, a few lines of text in place of the file; "
            f"install git-lfs and run `git lfs pull` in {path.parent}"
        )
    if head.lstrip().lower().startswith(_WEB_PAGE):
        return f"{path} is a web page; download the file itself, not the page that shows it"
    return None
