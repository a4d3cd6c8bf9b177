"""The C functions of a library by name: what each parameter is called, in order, and its type.

Calls name their arguments, so that a list of twenty pointers and sizes cannot be given in the wrong order.
"""

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcache.kernels.cpu import build

INT, LONG, FLOAT, POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
Parameters = dict[str, type]


@dataclass(frozen=True, eq=False)
class CInterface:
    """Declare the functions of a folder's kernels that return nothing; others are called as they are.

    Args:
        functions: of each function its parameters, by name and in order.
        folder: where the C++ sources lie.
    """

    functions: Mapping[str, Parameters]
    folder: Path = build.HERE

    def library(self) -> ctypes.CDLL | None:
        """Return the kernels, or None where they cannot be compiled."""
        found = build.library(self.folder)
        return None if found is None else self.declared(found)

    @functools.cache  # noqa: B019 an interface lives as long as its module
    def declared(self, found: ctypes.CDLL) -> ctypes.CDLL:
        """Set the parameters of a library's functions."""
        for name, parameters in self.functions.items():
            signature = ctypes.CFUNCTYPE(None, *parameters.values())
            names = tuple((1, parameter) for parameter in parameters)  # 1: an argument that is given
            setattr(found, name, signature((name, found), names))
        return found
