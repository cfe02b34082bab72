"""A few of the requests of `tests.draft_fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.draft_fuzz import FAMILIES, Tally, fuzz


@pytest.mark.parametrize("family", ["llama with adapters", "two ranks", "lfm2"])
def test_random_answers_are_those_without_drafts(tmp_path: Path, family: str) -> None:
    tally = Tally()
    fuzz(FAMILIES[family](tmp_path), 20, 3, tally, ranks=2 if family == "two ranks" else 1)
    assert tally.different == []
    assert bool(tally.accepted) == (family != "lfm2"), "layers with states check one token in a step"
