"""What the prefix cache finds, takes, saves and loads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vlmserve.cache.blocks import BlockPool
from vlmserve.cache.prefix import Chain, Column, Hit, Place, PrefixCache
from vlmserve.steps import BlockCopy

KEYS = [bytes([number]) * 32 for number in range(10)]


WHOLE = Column(0, None, 1)


def filled(num_blocks: int, num_host: int = 0, count: int = 3, **options) -> PrefixCache:
    """A cache with `count` free blocks that have the first keys."""
    cache = PrefixCache(BlockPool(num_blocks), BlockPool(num_host) if num_host else None, **options)
    for number, block in enumerate(cache.pool.allocate(count)):
        cache.pool.register(block, KEYS[number])
    cache.pool.release(range(count - 1, -1, -1))
    return cache


def find(cache: PrefixCache, keys, tail_key=None, column: Column = WHOLE) -> Hit:
    [hit], _ = cache.find([Chain(keys, tail_key)], [column])
    return hit


def take(cache: PrefixCache, hit: Hit, keys, num_new: int) -> list[int]:
    [blocks] = cache.take([hit], [keys], [num_new])
    return blocks


def test_a_run_ends_at_an_unknown_key():
    cache = filled(4)
    keys = [KEYS[0], KEYS[1], KEYS[9], KEYS[2]]
    assert find(cache, keys) == Hit(0, (Place(0, False), Place(1, False)))


def test_windows_need_visible_blocks_only():
    cache = filled(4)
    keys = [KEYS[8], KEYS[9], KEYS[1], KEYS[2], KEYS[7]]
    assert find(cache, keys, column=Column(0, 3, 1)) == Hit(2, (Place(1, False), Place(2, False)))
    assert find(cache, keys, column=Column(0, 4, 1)) == Hit()


def test_a_tail_is_found_after_full_blocks():
    cache = filled(4)
    assert find(cache, KEYS[:2], KEYS[2]).tail == Place(2, False)
    assert find(cache, [KEYS[0], KEYS[9]], KEYS[2]).tail is None


def test_a_tail_is_copied_into_a_new_block():
    cache = filled(5)
    hit = find(cache, KEYS[:2], KEYS[2])
    blocks = take(cache, hit, KEYS[:2], 2)
    assert blocks[:2] == [0, 1]
    assert cache.block_copies == [BlockCopy("copy", 2, blocks[2])]
    assert [cache.pool.ref_count(block) for block in (*blocks, 2)] == [1, 1, 1, 1, 0]


def test_an_evicted_block_is_saved_once():
    cache = filled(3, 3)
    blocks = cache.pool.allocate(3)
    assert [copy.kind for copy in cache.block_copies] == ["save"] * 3
    cache.pool.release(blocks)
    hit = find(cache, KEYS[:3])
    assert all(place.on_host for place in hit.places)
    cache.block_copies.clear()
    loaded = take(cache, hit, KEYS[:3], 0)
    assert [copy.kind for copy in cache.block_copies] == ["load"] * 3
    assert [cache.pool.get(key) for key in KEYS[:3]] == loaded
    cache.pool.release(loaded)
    cache.block_copies.clear()
    cache.pool.allocate(3)
    assert cache.block_copies == [], "what is on the host already is not saved again"
    assert cache.num_saved == 3


def test_the_host_keeps_what_was_used_last():
    cache = filled(3, 2)
    cache.pool.allocate(3)
    assert [key in cache.host for key in KEYS[:3]] == [True, True, False], "the deepest block was evicted first"


def test_blocks_to_load_are_not_evicted():
    cache = filled(2, 1, count=1)
    first = cache.pool.allocate(2)
    cache.pool.register(first[0], KEYS[5])
    cache.pool.release(first)
    hit = find(cache, KEYS[:1])
    assert hit.places == (Place(0, True),)
    cache.block_copies.clear()
    take(cache, hit, KEYS[:1], 1)
    assert [copy.kind for copy in cache.block_copies] == ["load"], "the host's only block was in use"


def test_nothing_is_saved_that_is_cheaper_to_compute():
    cache = filled(3, 3, worth_saving=lambda: False)
    cache.pool.allocate(3)
    assert cache.block_copies == []


def test_chains_find_what_all_have():
    """The second chain lacks its third block. Two blocks are free beside those that are found."""
    cache = PrefixCache(BlockPool(7))
    for key, block in zip((*KEYS[:3], *KEYS[5:7]), cache.pool.allocate(5), strict=True):
        cache.pool.register(block, key)
    cache.pool.release(range(5))
    chains = [Chain(KEYS[:3], KEYS[3]), Chain(KEYS[5:8], KEYS[8])]
    hits, reach = cache.find(chains, [WHOLE])
    assert reach == 2
    assert hits == [Hit(0, (Place(0, False), Place(1, False))), Hit(0, (Place(3, False), Place(4, False)))]
    assert cache.num_taken(hits) == 4
    tables = cache.take(hits, [KEYS[:2], KEYS[5:7]], [1, 1])
    assert [table[:2] for table in tables] == [[0, 1], [3, 4]]
    assert sorted(block for table in tables for block in table[2:]) == [5, 6]
    assert cache.pool.num_free == 1


def test_tails_are_found_in_all_chains():
    cache = filled(6)
    assert tails(cache, KEYS[0], KEYS[1]) == [Place(0, False), Place(1, False)]
    assert tails(cache, KEYS[0], KEYS[9]) == [None, None]


def tails(cache: PrefixCache, *keys: bytes) -> list[Place | None]:
    hits, _ = cache.find([Chain((), key) for key in keys], [WHOLE])
    return [hit.tail for hit in hits]


@given(
    st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 8),
    st.data(),
)
def test_hits_have_all_that_later_tokens_attend_to(
    windows: list[int | None], block_size: int, count: int, data: st.DataObject
) -> None:
    """Against trying every number of blocks."""
    columns = [Column(number, window, block_size) for number, window in enumerate(windows)]
    everything = [(column, number) for column in range(len(columns)) for number in range(count + 1)]
    cached = data.draw(st.sets(st.sampled_from(everything)))
    pool = BlockPool(len(everything))
    places = dict(zip(sorted(cached), pool.allocate(len(cached)), strict=True))
    for (column, number), block in places.items():
        pool.register(block, columns[column].key(KEYS[number]))
    pool.release(places.values())

    def needed(column: int, end: int) -> list[int]:
        window = windows[column]
        return [
            number
            for number in range(end)
            if window is None or (number + 1) * block_size > end * block_size - window + 1
        ]

    def is_usable(end: int) -> bool:
        return all((column, number) in cached for column in range(len(columns)) for number in needed(column, end))

    expected = max(end for end in range(count + 1) if is_usable(end))
    hits, reach = PrefixCache(pool).find([Chain(KEYS[:count], KEYS[count])], columns)
    whole = [column for column, window in enumerate(windows) if window is None]
    has_tail = expected == count and all((column, count) in cached for column in range(len(columns)))
    runs = [end for end in range(count + 1) if all((column, n) in cached for column in whole for n in range(end))]
    assert reach == (max(runs) if whole else expected)
    for column, hit in enumerate(hits):
        assert hit.end == expected
        assert [place.block for place in hit.places] == [places[column, n] for n in needed(column, expected)]
        assert hit.tail == (Place(places[column, count], False) if has_tail else None)


def test_forgotten_blocks_are_found_no_more():
    cache = filled(4)
    assert (cache.forget(KEYS[1]), cache.forget(KEYS[9])) == (1, None)
    assert find(cache, KEYS[:3]) == Hit(0, (Place(0, False),))
