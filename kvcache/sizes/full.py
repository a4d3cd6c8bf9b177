"""Page arithmetic of an uncompressed cache: the one place where its bytes are counted.

A lane is one KV head of one layer; a page holds the keys and the values of `page_tokens` tokens of one lane.
Planner, pool, admission and report all use these numbers, so that prediction, allocation and report agree.
Pure integers, no torch.
"""

from dataclasses import dataclass
from typing import Literal

from kvcache.sizes.chunk_schedule import ChunkSchedule


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose lanes are cached alike.

    Args:
        num_layers: decoder layers.
        num_kv_heads: KV heads of a layer.
        head_dim: elements of one key or value.
        kind: what their tokens attend to; `attention` is to all tokens before them.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kind: Literal["attention"] = "attention"


@dataclass(frozen=True)
class LayerGroups:
    """The layers of a model, in order. There is one group so far.

    Raises:
        ValueError: There are more.
    """

    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        if len(self.groups) != 1:
            raise ValueError(f"a cache holds one group of layers, not {len(self.groups)}")

    @property
    def num_layers(self) -> int:
        return self.groups[0].num_layers

    @property
    def num_kv_heads(self) -> int:
        return self.groups[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.groups[0].head_dim

    @property
    def num_lanes(self) -> int:
        return self.num_layers * self.num_kv_heads


@dataclass(frozen=True)
class CacheLayout(LayerGroups):
    """How a model's keys and values are cut into pages.

    Args:
        element_bytes: bytes of one stored element.
        page_tokens: slots of a page.
    """

    element_bytes: int
    page_tokens: int = 64

    @property
    def uncompressed(self) -> "CacheLayout":
        """The layout where nothing is compressed: this one."""
        return self

    @property
    def chunks(self) -> ChunkSchedule:
        """The schedule of a prompt's chunks: a step may end anywhere."""
        return ChunkSchedule()

    @property
    def page_bytes(self) -> int:
        return 2 * self.page_tokens * self.head_dim * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all lanes, its share of pages alone."""
        return self.num_lanes * self.page_bytes // self.page_tokens

    def lane_pages(self, num_tokens: int, shared_tokens: int = 0) -> int:
        """Return the pages one lane needs for `num_tokens`, whose first `shared_tokens` are cached elsewhere.

        Only full pages are shared: the tokens of a prefix's last, partly filled page are copied into the lane's own.
        """
        return -(-num_tokens // self.page_tokens) - shared_tokens // self.page_tokens

    def sequence_pages(self, num_tokens: int, shared_tokens: int = 0, new_tokens: int = 0) -> int:
        """Return the pages of all lanes; arguments as in `lane_pages`; `new_tokens` changes nothing."""
        return self.num_lanes * self.lane_pages(num_tokens, shared_tokens)

    def sequence_bytes(self, num_tokens: int, shared_tokens: int = 0) -> int:
        """Return the bytes of all lanes' pages; arguments as in `lane_pages`."""
        return self.sequence_pages(num_tokens, shared_tokens) * self.page_bytes

    def pages_in(self, num_bytes: int) -> int:
        """Return how many whole pages fit into `num_bytes`."""
        return num_bytes // self.page_bytes
