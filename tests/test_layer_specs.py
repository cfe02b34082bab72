"""Cache groups of layers."""

from __future__ import annotations

from vlmserve.layer_specs import FULL, AttentionSpec, CacheGroup, cache_groups


def layer(window: int | None = None, shares_with: int | None = None) -> AttentionSpec:
    return AttentionSpec(4, 2, 16, 0.25, window, shares_with=shares_with)


def test_layers_of_equal_windows_share_a_group() -> None:
    assert cache_groups([layer(8), layer(), layer(8), layer(16)]) == (
        CacheGroup("window", 8), FULL, CacheGroup("window", 16),
    )  # fmt: skip


def test_layers_that_read_another_cache_add_no_group() -> None:
    assert cache_groups([layer(), layer(), layer(8, shares_with=1)]) == (FULL,)
