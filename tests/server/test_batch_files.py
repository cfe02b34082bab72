"""Input files of batches as programs write them."""

from __future__ import annotations

import codecs

import msgspec
import pytest

from vlmserve.server.batches.requests import WrongInputError, read_requests

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m"}}


def test_rows_of_each_model_stay_together():
    bodies = [{"model": "b"}, {"model": "a"}, {}, {"model": "b"}, {"model": "a"}, {"model": "b"}]
    data = b"\n".join(
        msgspec.json.encode(LINE | {"custom_id": f"{row}", "body": body}) for row, body in enumerate(bodies)
    )
    requests = read_requests(data, "/v1/chat/completions", 10, several_models=True)
    assert requests.by_model() == [0, 3, 5, 1, 4, 2]
    assert requests.model is None
    with pytest.raises(WrongInputError, match="mismatched_model"):
        read_requests(data, "/v1/chat/completions", 10)


def test_a_byte_order_mark_belongs_to_no_request():
    data = msgspec.json.encode(LINE) + b"\r\n\r\n" + msgspec.json.encode(LINE | {"custom_id": "b"})
    for file in (data, codecs.BOM_UTF8 + data):
        requests = read_requests(file, "/v1/chat/completions", 10)
        assert [requests[row].custom_id for row in range(len(requests))] == ["a", "b"]
