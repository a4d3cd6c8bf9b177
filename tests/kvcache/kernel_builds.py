"""The compiled kernels as other machines get them."""

import functools
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from kvcache.kernels.cpu import build, ops
from kvcache.kernels.cpu.page_functions import PAGE_KERNELS

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)) or build.library() is None, reason="no C++ compiler"
)
ON_X86 = platform.machine() in ("x86_64", "AMD64")

# Flags by name: this machine's own; with products of bfloat16 pairs, emulated where the CPU has none, but none of
# integers; without any vector extension, and products of integers all the same.
BUILDS = {"native": (), "pairs": ("-DKVBATCH_BF16", "-DKVBATCH_INTEGERS=0")}
if ON_X86:
    BUILDS["plain"] = ("-march=x86-64", "-DKVBATCH_INTEGERS=1")
each_build = pytest.mark.parametrize("build_name", list(BUILDS))

_compiled = functools.cache(
    lambda name: PAGE_KERNELS.declared(
        build.compile_and_load(build.find_compiler(), build.cache_folder(), BUILDS[name])
    )
)


@contextmanager
def built(name: str) -> Iterator[None]:
    """Let `ops` call that build's kernels."""
    with patch.object(ops, "library", lambda: _compiled(name)):
        yield
