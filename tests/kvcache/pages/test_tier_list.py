"""Which page makes room, and what a sequence may take at most."""

import pytest
import torch

from kvcache.compress.allocation import assign_tiers
from kvcache.compress.lane_shares import LaneShares
from kvcache.config import KVCacheConfig
from kvcache.pages.block_pool import BlockPool, PageStore
from kvcache.pages.tier_list import TierList
from kvcache.quantize.pages import dequantize_pages, quantize_pages
from kvcache.sizes.compressed import CompressedLayout
from kvcache.sizes.full import LayerGroup
from kvcache.sizes.page_format import PageFormat

FORMATS = [PageFormat(16, 16, 16, 16, 4), PageFormat(4, 4, 64, 16, 4)]


def append(tier: TierList, lane: int, marks: list[int]) -> None:
    """Append one page of equal numbers to a lane for each mark."""
    size, dim = tier.format.page_tokens, tier.format.head_dim
    rows = torch.tensor(marks, dtype=torch.float32)[:, None, None].expand(-1, size, dim)
    lanes = torch.full((len(marks),), lane)
    if tier.format.whole:
        tier.append_tokens(lanes.repeat_interleave(size), rows.flatten(0, 1), rows.flatten(0, 1))
    else:
        tier.append_pages(lanes, quantize_pages(rows, rows, tier.format))


def marks(tier: TierList, lane: int) -> list[int]:
    """Return what is read back from each page of a lane."""
    held = tier.addresses[lane][tier.addresses[lane] >= 0]
    pages = tier._store.pool.read(held, tier.format.page_bytes)
    return dequantize_pages(pages, tier.format)[0][:, 0, 0].round().int().tolist()


def attend(tier: TierList, *places: tuple[int, int]) -> None:
    attended = torch.zeros_like(tier.addresses, dtype=torch.bool)
    for place in places:
        attended[place] = True
    tier.note_attention(attended)


@pytest.mark.parametrize("page_format", FORMATS)
def test_the_page_attended_longest_ago_makes_room_in_its_own_lane(page_format):
    pool = BlockPool(8, 8192)
    tier = TierList(PageStore(pool, 8), page_format, 3, torch.float32)
    append(tier, 0, [10, 11, 12])
    append(tier, 1, [20, 21])
    for places in [(0, 0), (0, 1), (1, 0)], [(0, 2), (1, 1)], [(0, 0), (1, 0)]:
        attend(tier, *places)  # idle for longest: 11 in lane 0, 21 in lane 1
    size = page_format.page_tokens
    tier.make_room(torch.tensor([size, 0, size]))
    append(tier, 0, [13])
    append(tier, 2, [30])  # a lane that had none
    assert [marks(tier, lane) for lane in range(3)] == [[10, 12, 13], [20, 21], [30]]
    assert tier.lengths.tolist() == [3 * size, 2 * size, size]
    used = pool.num_used
    attend(tier, (0, 1))  # 13 is the newest, 10 was attended a step before it came
    tier.make_room(torch.tensor([size, size, 0]))
    append(tier, 0, [14])
    append(tier, 1, [22])
    assert [marks(tier, lane) for lane in range(3)] == [[12, 13, 14], [20, 22], [30]]
    assert pool.num_used == used


@pytest.mark.parametrize("page_format", FORMATS)
def test_a_prefixs_pages_are_never_released(page_format):
    pool = BlockPool(8, 8192)
    store, own = PageStore(pool, 4), PageStore(pool, 4)
    prefix = TierList(store, page_format, 1, torch.float32)
    append(prefix, 0, [1, 2])
    row = prefix.clone_into(own, share=True)
    room = torch.tensor([page_format.page_tokens])
    for mark in (3, 4):
        row.make_room(room)
        append(row, 0, [mark])
    assert marks(row, 0) == [1, 2, 4], "the first page of its own is added, the second takes its place"
    assert marks(prefix, 0) == [1, 2]


def test_a_page_that_is_not_full_stays():
    tier = TierList(PageStore(BlockPool(8, 8192), 8), FORMATS[0], 1, torch.float32)
    append(tier, 0, [1, 2])
    row = torch.full((1, 16), 3.0)
    for _ in range(16 + 2):
        tier.make_room(torch.tensor([1]))
        tier.append_tokens(torch.tensor([0]), row, row)
    assert marks(tier, 0)[:1] == [3] and int(tier.lengths) == 18


@pytest.mark.parametrize("budget", ["calibrated", "global", "per_head", "uniform"])
def test_rounding_in_every_chunk_stays_within_the_reservation(budget):
    policy = KVCacheConfig(
        "sparse",
        keep_ratio=0.2,
        chunk_size=18,
        warmup_tokens=0,
        recent_tokens=0,
        tail_tokens=0,
        budget=budget,
    )
    layout = CompressedLayout((LayerGroup(8, 4, 16),), 4, 4, policy)
    shares = LaneShares.from_scores(torch.rand(8, 4, 100) * torch.rand(8, 4, 1))
    kept = torch.zeros(8, 4, dtype=torch.int64)  # 3.6 of each lane's 18 are kept
    for _ in range(160):
        kept += (assign_tiers(torch.rand(8, 4, 18), (0.2,), budget, lane_shares=shares) == 0).sum(2)
    held_pages = int((-(-kept // 16)).sum()) + 4 * layout.num_lanes  # and 64 tokens in the open pages
    assert held_pages * layout.whole.page_bytes <= layout.sequence_bytes(160 * 18)


def test_only_what_keeps_everything_reserves_for_a_long_answer():
    layout = CompressedLayout((LayerGroup(8, 4, 16),), 4, 2, KVCacheConfig.preset("logs"))
    one_page = layout.sequence_pages(4064, 0, 64)
    assert layout.sequence_pages(8000, 0, 4000) == one_page > layout.sequence_pages(4001, 0, 1)
    layout = CompressedLayout((LayerGroup(8, 4, 16),), 4, 2, KVCacheConfig.preset("default"))
    assert layout.sequence_pages(8000, 0, 4000) > 1.5 * layout.sequence_pages(4000)
