"""Which known name a misspelt one means."""

import random

import pytest

from vlmserve.server.schema.spelling import Spellings, distance

NAMES = ("temperature", "top_p", "seed", "max_tokens", "conversation", "top_logprobs")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("tempature", "temperature"),
        ("emperature", "temperature"),
        ("tmprtr", None),
        ("topP", "top_p"),
        ("toppp", "top_p"),
        ("top_n", None),
        ("seeds", "seed"),
        ("sed", None),
        ("max_tokns", "max_tokens"),
        ("min_tokens", None),
        ("conversation_id", None),
        ("conversatoins", "conversation"),
        ("logprobs", None),
        ("temperature" * 10, None),
    ],
)
def test_nearest_known_name_is_meant(name, meant):
    assert Spellings({known: known for known in NAMES}).meant(name) == meant


def test_other_names_suggest_the_known_one():
    assert Spellings({"n_predict": "max_tokens"}).meant("n_perdict") == "max_tokens"


def edits(one, other):
    """Optimal string alignment, each cell computed."""
    cells = {(row, 0): row for row in range(len(one) + 1)} | {(0, column): column for column in range(len(other) + 1)}
    for row in range(1, len(one) + 1):
        for column in range(1, len(other) + 1):
            cost = one[row - 1] != other[column - 1]
            ways = [cells[row - 1, column] + 1, cells[row, column - 1] + 1, cells[row - 1, column - 1] + cost]
            if row > 1 and column > 1 and one[row - 2 : row] == other[column - 2 : column][::-1]:
                ways.append(cells[row - 2, column - 2] + 1)
            cells[row, column] = min(ways)
    return cells[len(one), len(other)]


def test_distance_matches_the_whole_table():
    rng = random.Random(0)
    for _ in range(2000):
        one, other = ("".join(rng.choices("abc", k=rng.randint(0, 8))) for _ in range(2))
        most = rng.randint(1, 2)
        if abs(len(one) - len(other)) <= most:
            assert distance(one, other, most) == min(edits(one, other), most + 1), (one, other)
