"""What several of the engine's tests need."""

import pytest
import torch

from kvcache.pages.block_pool import PageStore
from kvcache.sizes.page_format import UNIT_BYTES


@pytest.fixture
def poisoned(monkeypatch):
    """Overwrite released pages with what is NaN in every float format: reading one shows."""
    release = PageStore.release

    def poison(store, page_format, addresses):
        release(store, page_format, addresses)
        nothing = torch.full((addresses.numel(), page_format.page_units * UNIT_BYTES), 255, dtype=torch.uint8)
        store.pool.write(addresses.flatten(), nothing)

    monkeypatch.setattr(PageStore, "release", poison)
