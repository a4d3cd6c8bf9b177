"""Where a row's numbers depend on nothing beside it."""

import pytest

from engine.kernels import ops

rows_are_alike = pytest.mark.skipif(
    ops.library() is None or not ops.float_panel(),
    reason="torch multiplies here: its sums depend on how many rows there are",
)
