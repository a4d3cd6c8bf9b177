"""What holds for every test."""

import os
from unittest.mock import patch

import pytest

from kvcache.user_cache import user_cache


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Give the tests a cache of their own, with links to the user's compiled kernels and converted models."""
    cache = tmp_path_factory.mktemp("cache")
    for name in ("kernels", "models"):
        try:
            (user_cache() / name).mkdir(parents=True, exist_ok=True)
            (cache / name).symlink_to(user_cache() / name)
        except OSError:  # this user has no home, or one that cannot be written
            continue
    with patch.dict(os.environ, {"KVBATCH_CACHE": str(cache)}):
        yield cache
