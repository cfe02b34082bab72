"""A few of the requests of `tests.draft_fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.draft_fuzz import FAMILIES, Tally, fuzz, ranks_of


@pytest.mark.parametrize("family", ["llama with adapters", "two ranks of qwen3.5", "lfm2", "qwen3.5 with MTP"])
def test_random_answers_are_those_without_drafts(tmp_path: Path, family: str) -> None:
    tally = Tally()
    fuzz(FAMILIES[family](tmp_path), 20, 3, tally, ranks=ranks_of(family))
    assert tally.different == []
    assert tally.accepted
