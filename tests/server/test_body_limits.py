"""How much JSON is counted before it is read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from vlmserve.errors import InvalidRequestError
from vlmserve.server.schema import base
from vlmserve.server.schema.base import BodyLimits, RequestModel, parse_body


class Anything(RequestModel):
    value: object = None
    messages: list[dict[str, object]] = Field(default_factory=list)


TEXTS = st.text(st.sampled_from('\\",[{é x'), max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def count(value: object) -> int:
    """Commas and brackets that JSON has for a value."""
    if isinstance(value, dict):
        return 1 + max(len(value) - 1, 0) + sum(map(count, value.values()))
    if isinstance(value, list):
        return 1 + max(len(value) - 1, 0) + sum(map(count, value))
    return 0


@settings(deadline=None, max_examples=100)
@given(value=VALUES, window=st.integers(1, 40))
def test_values_outside_strings_count_across_windows(value: object, window: int) -> None:
    body = json.dumps({"value": value}).encode()
    number = count({"value": value})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "WINDOW", window)
        parse_body(Anything, body, BodyLimits(number, 100))
        with pytest.raises(InvalidRequestError, match="--max-body-values"):
            parse_body(Anything, body, BodyLimits(number - 1, 100))


def test_messages_are_counted_with_their_parts() -> None:
    body = json.dumps({"messages": [{"content": [1, 2, 3]}, {"content": "text"}]}).encode()
    parse_body(Anything, body, BodyLimits(100, 5))
    with pytest.raises(InvalidRequestError, match="--max-messages") as caught:
        parse_body(Anything, body, BodyLimits(100, 4))
    assert caught.value.param == "messages"
