"""Every tensor that kvcache makes names its device: bookkeeping lies on the CPU, bytes where the slab lies."""

import ast
from pathlib import Path

import kvcache

MAKERS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}


def test_every_new_tensor_names_its_device():
    unnamed = []
    for file in Path(kvcache.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in {f"torch.{name}" for name in MAKERS}
                and "device" not in {keyword.arg for keyword in node.keywords}
            ):
                unnamed.append(f"{file.name}:{node.lineno}")
    assert not unnamed
