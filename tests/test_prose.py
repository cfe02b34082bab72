"""The prose check counts what it should."""

from __future__ import annotations

import pytest

from tests.ci_scripts import load

PROSE = load("prose")
RULES = PROSE["RULES"] | PROSE["OF_PAGES"]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Of a long list, a part is prepared.", "opens with Of, What, Where or That"),
        ("Weights of 4 bits are small.", "bits after the noun"),
        ("A table of which rows are read.", "preposition before which or whose"),
        ("It generates 443 tokens/s.", "machine or date in a page"),
        ("We measured it on 2026-11-25.", "machine or date in a page"),
        ("word " * 31 + ".", "long sentence"),
    ],
)
def test_departures_are_counted(text: str, rule: str) -> None:
    assert PROSE["hits"](PROSE["sentences"](text), RULES) == {rule: 1}


def test_code_and_generated_tables_are_ignored() -> None:
    text = "```\nOf it.\n```\n\n<!-- results: begin -->\nOn 2026-11-25.\n<!-- results: end -->\n\nUse `of which`.\n"
    assert PROSE["hits"](PROSE["sentences"](text), RULES) == {}
