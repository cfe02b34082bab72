"""What workers are believed to have cached."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vlmserve.scaleout.index import CacheIndex
from vlmserve.scaleout.keys import Segment

WORKERS, NAMES = 3, 12


def prompt(*names: int) -> list[Segment]:
    """Ten tokens for each name; a digest covers all before it."""
    return [Segment(repr(names[: end + 1]).encode(), 10 * (end + 1)) for end in range(len(names))]


names = st.lists(st.integers(0, NAMES), min_size=1, max_size=6)


class IndexMachine(RuleBasedStateMachine):
    """Whatever happens, nothing grows beyond its limit, and both sides of the index say the same."""

    def __init__(self):
        super().__init__()
        self.index = CacheIndex(max_entries=60)
        for worker in range(WORKERS):
            self.index.add_worker(worker, 100)
        self.seen = set()

    @rule(worker=st.integers(0, WORKERS), names=names, image=st.binary(max_size=2))
    def insert(self, worker, names, image):
        segments = prompt(*names)
        self.seen |= {segment.digest for segment in segments}
        self.index.insert(worker, segments, [b"image" + image])
        if worker < WORKERS:
            # What was used last is there, as much of it as fits.
            assert self.index.cached_tokens(worker, segments) >= min(10, segments[-1].tokens)

    @rule(worker=st.integers(0, WORKERS), id=st.binary(max_size=2), length=st.integers(1, 500))
    def insert_history(self, worker, id, length):
        self.index.insert_history(worker, b"history" + id, length, 5)

    @rule(worker=st.integers(0, WORKERS))
    def forget(self, worker):
        self.index.forget(worker)
        assert not any(self.index.has(worker, digest) for digest in self.seen)

    @rule(worker=st.integers(0, WORKERS), believed=st.floats(0, 1), actual=st.floats(0, 1))
    def correct(self, worker, believed, actual):
        self.index.correct(worker, believed, actual)

    @invariant()
    def bounded_and_consistent(self):
        index = self.index
        assert len(index) <= 60
        for worker, cache in index.caches.items():
            assert cache.tokens == sum(cache.entries.values())
            assert cache.tokens <= cache.limit <= cache.capacity
            assert all(worker in index.holders[digest] for digest in cache.entries)
        assert sum(map(len, index.holders.values())) == len(index)
        assert index.lengths.keys() <= index.holders.keys()


TestIndex = IndexMachine.TestCase


@given(st.lists(names, min_size=1, max_size=20))
def test_best_worker_has_the_longest_prefix(prompts):
    index = CacheIndex()
    for worker, known in enumerate(prompts[1:]):
        index.add_worker(worker, 10**6)
        index.insert(worker, prompt(*known))
    wanted = prompt(*prompts[0])

    def common(known: list[int]) -> int:
        same = 0
        while same < min(len(known), len(prompts[0])) and known[same] == prompts[0][same]:
            same += 1
        return 10 * same

    lengths = {worker: common(known) for worker, known in enumerate(prompts[1:])}
    assert all(index.cached_tokens(worker, wanted) == length for worker, length in lengths.items())
    best = index.best(wanted, 1, random.Random(0))
    assert max(lengths.values(), default=0) == max(best.values(), default=0)
    assert all(lengths[worker] == tokens for worker, tokens in best.items())


def test_prompt_ends_are_evicted_before_beginnings():
    index = CacheIndex()
    index.add_worker(0, 50)
    index.insert(0, prompt(1, 2, 3))
    index.insert(0, prompt(4, 5, 6))
    assert index.cached_tokens(0, prompt(1, 2, 3)) == 20
    assert index.cached_tokens(0, prompt(4, 5, 6)) == 30


def test_trust_adapts_to_wrong_predictions_both_ways():
    index = CacheIndex()
    index.add_worker(0, 1000)
    for name in range(100):
        index.insert(0, prompt(name))
    assert index.cached_tokens(0, prompt(0)) == 10
    for _ in range(10):
        index.correct(0, 0.9, 0.0)
    assert index.cached_tokens(0, prompt(0)) == 0
    for _ in range(50):
        index.correct(0, 0.0, 0.9)
    for name in range(100):
        index.insert(0, prompt(name))
    assert index.cached_tokens(0, prompt(0)) == 10
