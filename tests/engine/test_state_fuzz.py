"""A few of the requests of `tests.state_fuzz`, to each family of models with states."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.state_fuzz import FAMILIES, Tally, fuzz


@pytest.mark.parametrize("family", FAMILIES)
def test_random_requests_equal_a_quiet_engine(tmp_path: Path, family: str) -> None:
    tally = Tally()
    fuzz(FAMILIES[family](tmp_path), 15, 7, tally)
    assert tally.different == []
    assert tally.ties + tally.flips <= 1
    assert tally.found_tokens > 50, "or no state was on trial"
