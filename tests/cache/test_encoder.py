import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmserve.cache.encoder import EncoderCache


def key(number: int) -> bytes:
    return bytes([number]) * 32


def test_the_least_recently_used_idle_image_goes_first():
    cache = EncoderCache(30)
    for number in range(3):
        cache.add(key(number), 10)
    cache.pin(key(0), "request")
    cache.unpin(key(0), "request")
    assert cache.make_room(10) == [key(1)]
    assert key(0) in cache
    assert key(1) not in cache


def test_a_pinned_image_stays_until_all_unpinned():
    cache = EncoderCache(10)
    cache.add(key(0), 10)
    cache.pin(key(0), "a")
    cache.pin(key(0), "b")
    cache.unpin(key(0), "a")
    cache.unpin(key(0), "a")
    assert not cache.fits({key(1): 1})
    assert cache.fits({key(0): 10}), "it is pinned already"
    cache.unpin(key(0), "b")
    assert cache.make_room(1) == [key(0)]


def test_an_image_without_room_is_refused():
    cache = EncoderCache(10)
    with pytest.raises(ValueError, match="does not fit"):
        cache.add(key(0), 11)


@given(
    st.integers(5, 40),
    st.lists(st.tuples(st.sampled_from(["need", "pin", "unpin"]), st.integers(0, 7), st.integers(0, 2)), max_size=80),
)
def test_encoder_cache_stays_within_its_bytes(capacity, operations):
    cache = EncoderCache(capacity)
    pins: dict[bytes, set[str]] = {}
    for operation, number, holder in operations:
        name, size, request = key(number), number + 3, f"request {holder}"
        if operation == "need" and name not in cache:
            pinned = {one for one, holders in pins.items() if holders}
            fits = cache.fits({name: size})
            assert fits == (sum(one[0] + 3 for one in pinned) + size <= capacity)
            if fits:
                assert not pinned & {*cache.make_room(size)}
                cache.add(name, size)
        elif operation == "pin" and name in cache:
            cache.pin(name, request)
            pins.setdefault(name, set()).add(request)
        elif operation == "unpin":
            cache.unpin(name, request)
            pins.get(name, set()).discard(request)
        assert cache.used_bytes <= capacity
        assert all(pinned in cache for pinned, holders in pins.items() if holders)
        assert cache.num_pinned == sum(bool(holders) for holders in pins.values())
