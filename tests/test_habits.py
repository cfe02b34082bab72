"""The check of habits counts what it should; `make lint` runs it."""

from __future__ import annotations

import pytest

from tests.ci_scripts import load

HABITS = load("habits")


@pytest.mark.parametrize(
    ("text", "habit"),
    [
        ("time.sleep(0.1)", "sleep"),
        ("async def wait(): await asyncio.sleep(pause)", "sleep"),
        ("def test_one_two_three_four_five_six_seven_eight_nine(): ...", "long name"),
        ("assert engine._runner", "private attribute"),
        ("monkeypatch.setattr(Engine, '_step', None)", "private attribute"),
        ("monkeypatch.setattr('vlmserve.engine._step', None)", "private attribute"),
        ("from vlmserve.engine import _step", "private attribute"),
        ("assert attrgetter('runner._step')(engine)", "private attribute"),
        ("mock.patch.object(engine, '_step')", "private attribute"),
        ("assert vars(engine)['_step']", "private attribute"),
        ("assert engine.__dict__['_step']", "private attribute"),
        ("assert engine._Engine__step", "private attribute"),
        ("assert engine.__step", "private attribute"),
        ("class Fake(Engine):\n    def step(self):\n        return self._step", "private attribute"),
        ("class Fake(Engine):\n    def _step(self):\n        return super()._step", "private attribute"),
    ],
)
def test_each_habit_is_counted(text: str, habit: str) -> None:
    assert HABITS["habits"](text) == {habit: 1}


@pytest.mark.parametrize(
    "text",
    [
        "async def wait(): await asyncio.sleep(0)",
        "def test_one_two_three_four_five_six_seven_eight(): ...",
        "class Fake:\n    def __init__(self):\n        self._count = 0\nassert Fake()._count == 0",
        "result._replace(name='other')",
        "assert value.__class__",
    ],
)
def test_other_code_counts_as_none(text: str) -> None:
    assert HABITS["habits"](text) == {}
