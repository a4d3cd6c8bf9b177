"""A policy that contradicts itself is refused with the reason; presets can be overridden key by key."""

import pytest

from kvcache.config import PRESETS, KVCacheConfig, Tier


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"compress_method": "zip"}, "not known"),
        ({"compress_method": "quant", "keep_ratio": 0.5, "quant_bits": 4}, "drops tokens"),
        ({"compress_method": "sparse", "quant_bits": 4}, "needs a method with quant"),
        ({"compress_method": "quant", "quant_bits": 2}, "2 bits ruin"),
        ({"compress_method": "quant", "quant_bits": [4, 8]}, "fewer than 8 for values"),
        ({"compress_method": "sparse+quant", "tiers": [[0.6, 4, 4], [0.6, 3, 3]]}, "add up to 1.2"),
        ({"preset": "default", "tiers": [[0.6, 4, 4]], "keep_ratio": 0.3}, "same thing twice"),
        ({"tiers": [[0.6, 4, 4]]}, "other than none"),
        ({"preset": "logs", "recent_tokens": 50}, "multiple of 16"),
        ({"preset": "logs", "budget": "layered"}, "go together"),
        ({"preset": "logs", "budget": "layered", "layer_budget": [1, -1]}, "weights of 0 and more"),
        ({"preset": "logs", "budget": "fair"}, "calibrated, global"),
        ({"preset": "logs", "scorer": "best"}, "attention_max, mix"),
        ({"compress_method": "quant", "tiers": [[0.3, 4, 4]]}, "keeps all"),
        ({"compress_method": "sparse", "tiers": [[0.3, 4, 4]]}, "method with quant"),
        ({"compress_method": "sparse", "tiers": [[0.3, 16]]}, "share, key bits, value bits"),
        ({"preset": "small"}, "aggressive"),
        ({"preset": "logs", "keep": 0.3}, "keep_ratio"),
    ],
)
def test_contradictions_are_refused_with_the_reason(values, reason):
    with pytest.raises(ValueError, match=reason):
        KVCacheConfig.from_dict(values)


def test_presets_are_policies_and_change_key_by_key():
    assert set(PRESETS) == {"none", "dialogue", "logs", "extract", "default", "aggressive"}
    logs = KVCacheConfig.from_dict({"preset": "logs", "warmup_tokens": 4})
    assert logs.resolved_tiers == (Tier(0.08, 4, 4), Tier(0.3, 3, 2)) and logs.warmup_tokens == 4
    changed = KVCacheConfig.from_dict({"preset": "default", "keep_ratio": 0.4, "quant_bits": [8, 4]})
    assert changed.resolved_tiers == (Tier(0.4, 8, 4),)
