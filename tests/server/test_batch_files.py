"""Input files of batches as programs write them."""

from __future__ import annotations

import codecs

import msgspec

from vlmserve.server.batches.requests import read_requests

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m"}}


def test_a_byte_order_mark_belongs_to_no_request():
    data = msgspec.json.encode(LINE) + b"\r\n\r\n" + msgspec.json.encode(LINE | {"custom_id": "b"})
    for file in (data, codecs.BOM_UTF8 + data):
        requests = read_requests(file, "/v1/chat/completions", 10)
        assert [requests[row].custom_id for row in range(len(requests))] == ["a", "b"]
