"""Small helpers to write an input and to read it back."""

import json
from pathlib import Path

import pytest

from kvbatch.corpus import Corpus, Document, InputSpec


@pytest.fixture
def write_jsonl(tmp_path):
    """Return a function that writes records (or raw bytes) as a file below tmp_path and gives its path."""

    def write(name: str, *lines: dict | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        encoded = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        path.write_bytes(b"".join(line + b"\n" for line in encoded))
        return path

    return write


@pytest.fixture
def read():
    """Return a function that reads paths into a list of documents."""

    def read_all(*paths: Path, **options) -> list[Document]:
        return list(Corpus(InputSpec(tuple(map(str, paths)), **options)).documents())

    return read_all
