"""What members of a cluster tell each other of adapters comes out the same, in whatever order they hear it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from vlmserve.scaleout import changes as changes_module
from vlmserve.scaleout.changes import Change, Changes

some = st.lists(
    st.builds(
        Change,
        st.integers(1, 20),
        st.sampled_from(("a", "b")),
        st.sampled_from(("one", "two")),
        st.sampled_from((None, "here", "there")),
        st.sampled_from(("", "mixed", "one")),
    ),
    unique_by=lambda change: change.order,
    max_size=12,
)


@given(some, st.randoms(use_true_random=False))
def test_change_order_makes_no_difference(every: list[Change], draw: random.Random):
    shuffled = draw.sample(every, len(every))
    assert list(Changes(every)) == list(Changes(shuffled))
    assert list(Changes([*shuffled, *every])) == list(Changes(every))


@given(some, st.lists(st.sampled_from(((True, False), (False, True), (True, True))), min_size=12))
def test_two_peers_exchange_what_is_missing(every: list[Change], knowing: list[tuple[bool, bool]]):
    one, two = (
        Changes([change for change, known in zip(every, knowing, strict=False) if known[peer]]) for peer in (0, 1)
    )
    missing = one.missing_in(two)
    for change in two.missing_in(one):
        one.add(change)
    for change in missing:
        two.add(change)
    assert not one.missing_in(two)
    assert not two.missing_in(one)
    assert one.loaded == two.loaded


@given(some)
def test_a_new_change_is_later_than_all(every: list[Change]):
    known = Changes(every)
    new = Change(known.time_after(5), "a", "one", "here")
    assert known.is_news(new)
    known.add(new)
    assert "one" in known.loaded
    assert [change for change in known if change.adapter == "one"] == [new]


def test_reloaded_checkpoint_mixes_its_own():
    out, back, whole = (
        Change(1, "g", "0", None, "mixed"),
        Change(3, "g", "1", "b", "mixed"),
        Change(2, "g", "mixed", "m"),
    )
    assert list(Changes([out, back])) == [out, back]
    assert list(Changes([out, back, whole])) == [whole, back]
    assert list(Changes([Change(4, "g", "mixed"), out, back, whole])) == [Change(4, "g", "mixed")]


def test_the_oldest_of_many_unloaded_adapters_are_forgotten(monkeypatch):
    monkeypatch.setattr(changes_module, "MAX_UNLOADED", 3)
    loaded = Change(0, "g", "kept", "here")
    known = Changes([loaded, *(Change(number, "g", f"adapter-{number}") for number in range(1, 8))])
    assert [change.name for change in known] == ["kept", "adapter-5", "adapter-6", "adapter-7"]
