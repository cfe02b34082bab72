"""What a worker measures of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.clock import Clock
from vlmserve.scaleout.pace import Pace


def request(tokens: int) -> Any:
    return cast(
        Any,
        SimpleNamespace(usage=SimpleNamespace(prompt_tokens=tokens, prompt_tokens_details=SimpleNamespace(images=0))),
    )


def test_the_average_counts_how_long_requests_waited():
    clock = Clock()
    pace = Pace(clock)
    pace.token_seconds = 0.01
    pace.wait("one", request(100))
    clock.now += 1
    pace.wait("two", request(200))
    assert pace.queued_seconds == pytest.approx(3)
    clock.now += 1
    pace.leave("one")
    pace.leave("two")
    clock.now += 8
    assert pace.queued_seconds == 0
    assert pace.mean_queued_seconds() == pytest.approx(0.4)
    assert pace.mean_queued_seconds() == 0
    clock.now += 10
    assert pace.mean_queued_seconds() == 0
