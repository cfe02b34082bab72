"""Cache groups of layers, and the bytes of tokens in them."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from vlmserve.layer_specs import FULL, AttentionSpec, CacheBytes, CacheGroup


def layer(window: int | None = None) -> AttentionSpec:
    return AttentionSpec(4, 2, 16, 0.25, window)


def test_layers_of_equal_windows_share_a_group() -> None:
    sizes = CacheBytes.of([layer(8), layer(), layer(8), layer(16)], 4, lambda spec: 100)
    assert sizes.groups == {CacheGroup(8): 200, FULL: 100, CacheGroup(16): 100}
    assert sizes.block == 400


@given(st.integers(1, 5), st.integers(0, 60), st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=4))
def test_bytes_equal_a_count_by_token_and_layer(block_size: int, length: int, windows: list[int | None]) -> None:
    token_bytes = 2 * 2 * 16
    sizes = CacheBytes.of(map(layer, windows), block_size, lambda spec: block_size * token_bytes)
    blocks = {token // block_size for token in range(length)}
    assert sizes.held(length) == len(blocks) * block_size * token_bytes * len(windows)
    assert sizes.fitting(sizes.held(length)) == len(blocks) * block_size
    seen = [token for window in windows for token in range(length) if window is None or token > length - 1 - window]
    assert sizes.read(length) == len(seen) * token_bytes
