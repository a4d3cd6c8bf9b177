import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "profile_job.py"))


@pytest.mark.parametrize("part", SCRIPT["PARTS"])
def test_what_a_part_is_made_of_is_there(part):
    for target in SCRIPT["PARTS"][part]:
        owner, name = SCRIPT["find"](target)
        assert callable(getattr(owner, name))
