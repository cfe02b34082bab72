"""The layout of the KV cache, and the pages and bytes of tokens in it."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vlmserve.layer_specs import MAX_UNUSED, AttentionSpec, CacheBytes, CacheLayout

FIVE_OF_SIX = [*[512] * 5, None]


def layer(window: int | None = None, kv_heads: int = 2) -> AttentionSpec:
    return AttentionSpec(4, kv_heads, 16, 0.25, window)


@pytest.mark.parametrize(
    ("windows", "slots", "columns"),
    [
        ([None] * 16, 16, (None,)),
        ([8] * 5, 5, (8,)),
        ([*FIVE_OF_SIX * 4, 512, 512], 4, (None, *[512] * 6)),
        ([*FIVE_OF_SIX * 5, *[512] * 4], 6, (None, *[512] * 5)),
        ([8, None] * 13, 13, (None, 8)),
        ([8, 30, None], 1, (None, 30, 8)),
    ],
)
def test_layouts_waste_few_slots(windows: list[int | None], slots: int, columns: tuple[int | None, ...]) -> None:
    layout = CacheLayout.of([*map(layer, windows)])
    assert (layout.num_slots, layout.windows) == (slots, columns)


def test_layers_of_other_heads_share_no_tensor() -> None:
    layout = CacheLayout.of([layer(8), layer(30, kv_heads=1), layer(8)])
    assert layout.windows == (30,)
    assert [place.slot for place in layout.places] == [0, 1, 2]
    assert CacheLayout.of([layer(8), layer(None, kv_heads=1)]).windows == (None,)


def test_sharing_layers_take_no_memory() -> None:
    own = [layer(8), layer(None, kv_heads=1)]
    shared = [replace(own[1], shares_with=1), replace(own[0], shares_with=0)]
    places = CacheLayout.of(own + shared).places
    assert places == (*CacheLayout.of(own).places, places[1], places[0])
    of_own, of_all = (CacheBytes.of(layers, 16, lambda spec: 32 * spec.num_kv_heads) for layers in (own, own + shared))
    assert of_all.block == of_own.block == 96


@given(st.lists(st.sampled_from([None, 4, 9]), min_size=1, max_size=70))
def test_layers_have_slots_of_their_window(windows: list[int | None]) -> None:
    layout = CacheLayout.of([*map(layer, windows)])
    assert len(set(layout.places)) == len(windows)
    assert [layout.windows[place.column] for place in layout.places] == windows
    slots = len(layout.windows) * layout.num_slots
    assert slots - len(windows) <= MAX_UNUSED * slots
    assert set(layout.windows) == set(windows)


@given(
    st.integers(1, 5),
    st.integers(1, 60),
    st.integers(1, 30),
    st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=4),
    st.data(),
)
def test_pages_are_enough_for_any_chunks(
    block_size: int, length: int, max_chunk: int, windows: list[int | None], data: st.DataObject
) -> None:
    """A count of the blocks that each step of a sequence needs, by column."""
    sizes = CacheBytes.of([*map(layer, windows)], block_size, lambda spec: 100)
    computed = data.draw(st.integers(0, length - 1))
    end = min(length, computed + data.draw(st.integers(1, max_chunk)))
    pages = 0
    for window in sizes.windows:
        first = 0 if window is None else max(0, computed - window + 1)
        pages += len({token // block_size for token in range(first, end)})
    assert pages <= sizes.pages(length, max_chunk)
    fitting = sizes.fitting(sizes.pages(length, max_chunk), max_chunk, 100)
    assert length <= fitting <= 100
    assert sizes.pages(fitting, max_chunk) <= sizes.pages(length, max_chunk)
    assert fitting == 100 or sizes.pages(fitting + 1, max_chunk) > sizes.pages(length, max_chunk)


@given(st.integers(1, 5), st.integers(0, 60), st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=4))
def test_read_bytes_equal_a_count_by_token(block_size: int, length: int, windows: list[int | None]) -> None:
    token_bytes = 2 * 2 * 16
    sizes = CacheBytes.of([*map(layer, windows)], block_size, lambda spec: block_size * token_bytes)
    seen = [token for window in windows for token in range(length) if window is None or token > length - 1 - window]
    assert sizes.read(length) == len(seen) * token_bytes


def test_window_layers_hold_window_and_chunk() -> None:
    sizes = CacheBytes.of([*map(layer, [*FIVE_OF_SIX * 4, 512, 512])], 16, lambda spec: 100)
    assert sizes.page == 400
    assert sizes.pages(16000, 2048) == 1000 + 6 * (160 + 1)
    assert sizes.pages(160, 2048) == 70
