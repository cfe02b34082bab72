"""Hundreds of broken images and bodies: each is refused kindly, and none costs anybody else anything."""

from __future__ import annotations

import base64
import io
import json
import random
from collections import Counter
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.server.live import QUESTION
from tests.waiting import wait_until

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
IMAGES = 150
BODIES = 150
ERROR_FIELDS = {"message", "type", "param", "code"}


def good_files() -> Iterator[bytes]:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)
    for name in FORMATS:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, name)
        yield file.getvalue()


def broken(data: bytes, draw: random.Random) -> bytes:
    """The same, cut, with wrong bytes, without some, or with something of its own in between."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        place = draw.randrange(len(changed) + 1)
        match draw.randrange(5):
            case 0:
                del changed[place:]
            case 1:
                del changed[place : place + draw.randrange(1, 9)]
            case 2:
                changed[place:place] = draw.randbytes(draw.randrange(1, 9))
            case 3:
                changed[place : place + 4] = draw.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
            case _ if place < len(changed):
                changed[place] = draw.randrange(256)
    return bytes(changed)


def asked_about(data: bytes) -> dict[str, object]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 2}


@pytest.fixture
def client(live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60) as client:
        yield client


def check(response: httpx.Response) -> int:
    """The status, if the answer or the refusal has its form."""
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        assert response.json()["error"].keys() == ERROR_FIELDS
        assert "Traceback" not in response.text
    else:
        assert response.json()["choices"]
    return response.status_code


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_broken_images_are_answered_or_refused(live, client) -> None:
    draw = random.Random(1)
    files = list(good_files())
    statuses = Counter(
        check(client.post("/v1/chat/completions", json=asked_about(broken(draw.choice(files), draw))))
        for _ in range(IMAGES)
    )
    assert statuses[400] > IMAGES // 3
    for data in files:
        assert check(client.post("/v1/chat/completions", json=asked_about(data))) == 200
    wait_until(lambda: live.client.num_unfinished == 0)


VALUES = (None, True, -1, 0, 10**30, 1e308, "", "a", "\0", [], [[]], {}, {"a": 1}, [None], "[" * 500, -(2**63))


def changed(value: object, draw: random.Random) -> object:
    """The same with something else in one place."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        match draw.randrange(4):
            case 0:
                return {name: field for name, field in value.items() if name != key}
            case 1:
                return {
                    **value,
                    draw.choice(("x", "stop", "n", "seed", "stream", "top_p", key * 2)): draw.choice(VALUES),
                }
        return {**value, key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [*value[:place], changed(value[place], draw), *value[place + 1 :]]
    return draw.choice(VALUES)


def test_broken_bodies_are_answered_or_refused(live, client) -> None:
    draw = random.Random(2)
    good = {
        "model": "tiny", "messages": QUESTION, "max_tokens": 2, "temperature": 0.5, "stop": ["a"], "n": 2,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    statuses: Counter[int] = Counter()
    for number in range(BODIES):
        path = ("/v1/chat/completions", "/v1/completions")[number % 2]
        body = good if number % 2 == 0 else {**good, "prompt": ["a", "b"]}
        value = changed(changed(body, draw) if draw.random() < 0.3 else body, draw)
        content = json.dumps(value).encode()
        if draw.random() < 0.3:
            content = broken(content, draw)
        response = client.post(path, content=content, headers={"Content-Type": "application/json"})
        streams = response.headers["content-type"].startswith("text/event-stream")
        statuses[200 if streams else check(response)] += 1
    assert statuses[400] > BODIES // 3
    assert check(client.post("/v1/chat/completions", json=good)) == 200
    wait_until(lambda: live.client.num_unfinished == 0)
