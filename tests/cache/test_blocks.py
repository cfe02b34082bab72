import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmserve.cache.blocks import BlockPool
from vlmserve.types import BlockMap


def test_a_block_is_free_after_all_released_it():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2


def test_taking_too_many_blocks_takes_none():
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="4 blocks wanted, 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_a_block_map_shows_holders_and_cached():
    pool = BlockPool(5)
    held, kept, let_go = pool.allocate(3)
    for block in (held, kept):
        pool.register(block, bytes([block]))
    pool.share([held])
    pool.release([kept, let_go])
    assert pool.draw_map(100) == BlockMap(5, 1, [1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [2, 0, 0, 0, 0])


@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 300))
def test_a_block_map_has_few_cells(num_blocks, max_cells, num_held):
    pool = BlockPool(num_blocks)
    pool.allocate(min(num_held, num_blocks))
    shown = pool.draw_map(max_cells)
    assert len(shown.held) == len(shown.cached) == len(shown.holders) <= max_cells
    assert len(shown.held) == -(-num_blocks // shown.blocks_per_cell)
    assert sum(shown.held) == min(num_held, num_blocks)
    assert max(shown.held) <= shown.blocks_per_cell


def test_free_blocks_cannot_be_released_or_shared():
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="free already"):
        pool.release([0])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([0])


@given(st.integers(1, 20), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10)), max_size=100))
def test_the_pool_agrees_with_plain_counts(num_blocks, operations):
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for operation, number in operations:
        if operation == 0 and number <= pool.num_free:
            taken = pool.allocate(number)
            assert not set(taken) & set(held)
            held += taken
        elif operation == 1 and held:
            block = held[number % len(held)]
            pool.share([block])
            held.append(block)
        elif operation == 2 and held:
            pool.release([held.pop(number % len(held))])
        assert all(pool.ref_count(block) == held.count(block) for block in range(num_blocks))
        assert pool.num_used == len(set(held))
        assert pool.num_free == num_blocks - len(set(held))


def key(number: int) -> bytes:
    return bytes([number]) * 32


def test_a_released_block_is_found_until_taken():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, key(1))
    pool.release([block])
    assert (pool.get(key(1)), pool.get(key(2))) == (block, None)
    assert pool.allocate(1) != [block], "a block without content goes first"
    assert pool.allocate(1) == [block]
    assert pool.get(key(1)) is None
    assert pool.num_evictions == 1


def test_the_block_released_longest_ago_is_evicted_first():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        pool.register(block, key(number))
    pool.release([blocks[1], blocks[0], blocks[2]])
    pool.share([blocks[1]])
    pool.release([blocks[1]])
    assert pool.allocate(3) == [blocks[0], blocks[2], blocks[1]]


def test_the_first_of_equal_blocks_is_found():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, key(1))
    pool.register(second, key(1))
    assert pool.get(key(1)) == first


def test_a_block_may_have_two_keys():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register(block, key(1))
    pool.register(block, key(2))
    assert (pool.get(key(1)), pool.get(key(2)), pool.num_cached) == (block, block, 1)
    pool.release([block])
    pool.allocate(1)
    assert key(1) not in pool
    assert key(2) not in pool


def test_a_free_block_cannot_be_registered():
    with pytest.raises(ValueError, match="free"):
        BlockPool(1).register(0, key(3))


def test_evictions_are_told_before_keys_go():
    heard = []
    pool = BlockPool(1, on_evict=lambda block, keys: heard.append((block, list(keys), key(1) in pool)))
    pool.register(*pool.allocate(1), key(1))
    pool.release([0])
    pool.allocate(1)
    assert heard == [(0, [key(1)], True)]


def test_unwanted_blocks_are_allocated_after_blocks_without_keys() -> None:
    evicted = []
    pool = BlockPool(4, lambda block, keys: evicted.append(block))
    for block in pool.allocate(4):
        if block < 3:
            pool.register(block, bytes([block]))
    pool.release([0])
    pool.release([1, 2], unwanted=True)
    pool.release([3], unwanted=True)
    assert pool.num_free == 4
    pool.share([2])
    pool.release([2])
    assert [pool.allocate(1) for _ in range(4)] == [[3], [1], [0], [2]]
    assert evicted == [0, 2], "what is unwanted is not saved"
