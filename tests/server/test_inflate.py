"""Compressed bodies."""

from __future__ import annotations

import gzip
import json
import zlib

import httpx
import pytest

from tests.server.live import QUESTION
from tests.waiting import wait_until

BODY = json.dumps({"model": "tiny", "messages": QUESTION, "max_tokens": 2}).encode()


def post(url: str, content: bytes, encoding: str, path: str = "/v1/chat/completions") -> httpx.Response:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    return httpx.post(f"{url}{path}", content=content, headers=headers, timeout=30)


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("GZIP", gzip.compress(BODY, mtime=0)),
        ("x-gzip", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", zlib.compress(BODY, wbits=-15)),
        ("identity", BODY),
        ("gzip", gzip.compress(b"\xef\xbb\xbf" + BODY, mtime=0)),
        ("", b"\xef\xbb\xbf" + BODY),
    ],
)
def test_compressed_bodies_are_read(live, encoding, content):
    response = post(live.url, content, encoding)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress"])
def test_other_encodings_are_415(live, encoding, path):
    response = post(live.url, b"x" * 1000, encoding, path)
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, deflate"
    message = response.json()["error"]["message"]
    assert encoding in message
    assert "gzip or deflate" in message


PACKED = gzip.compress(BODY, mtime=0)  # the same in every process of the tests


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (BODY, "corrupt"),
        (b"", "truncated"),
        (PACKED[:-1], "truncated"),
        (PACKED[:20], "truncated"),
        (PACKED[:-8] + bytes(8), "corrupt"),
        (PACKED + PACKED, "bytes after its end"),
        (PACKED + b"x" * 100_000, "bytes after its end"),
    ],
)
def test_broken_compression_is_400(live, content, why):
    response = post(live.url, content, "gzip")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_content_encoding")
    assert why in response.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_inflated_bodies_have_the_usual_limit(live, encoding):
    # This server allows 200,000 bytes.
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    fits = json.dumps({"model": "tiny", "messages": QUESTION, "max_tokens": 1, "user": "x" * 190_000}).encode()
    assert post(live.url, pack(fits), encoding).status_code == 200
    response = post(live.url, pack(b" " * 200_001), encoding)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    wait_until(lambda: live.service.bodies.used == 0)
