from vlmserve.cache.evicted import EvictedKeys


def test_oldest_keys_are_forgotten() -> None:
    evicted = EvictedKeys(most=2)
    evicted.add([b"a", b"b"])
    evicted.add([b"a"])
    evicted.add([b"c"])
    assert evicted.get(b"b") is None
    assert None not in (evicted.get(b"a"), evicted.get(b"c"))
    evicted.discard(b"a")
    assert evicted.get(b"a") is None
