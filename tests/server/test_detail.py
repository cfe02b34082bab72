"""``detail`` beside an image, with a model that cuts images into tiles, in each way to show one."""

from __future__ import annotations

import base64

import pytest

from tests.server.live import LiveServer
from tests.server.test_chat import data_url

URL = data_url("red", (90, 40))


@pytest.fixture(scope="module", params=["make_idefics3", "make_llava_next"])
def cutting(request, tmp_path_factory):
    from tests import checkpoints

    folder = getattr(checkpoints, request.param)(tmp_path_factory.mktemp("cutting"))
    with LiveServer(folder, server={"storage_url": "memory"}) as server:
        yield server


def chat(server: LiveServer, **detail: str) -> int:
    part = {"type": "image_url", "image_url": {"url": URL, **detail}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
    return server.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=1).usage.prompt_tokens


def response(server: LiveServer, **part: str) -> int:
    content = [{"type": "input_image", **part}, {"type": "input_text", "text": "What?"}]
    messages = [{"role": "user", "content": content}]
    return server.openai.responses.create(model="tiny", input=messages, max_output_tokens=1).usage.input_tokens


def test_low_detail_image_costs_one_tile(cutting):
    file = cutting.openai.files.create(file=("a.png", base64.b64decode(URL.partition(",")[2])), purpose="vision")
    whole = chat(cutting)
    low = chat(cutting, detail="low")
    assert low < whole
    assert whole == chat(cutting, detail="auto") == chat(cutting, detail="high")
    for source in ({"image_url": URL}, {"file_id": file.id}):
        assert response(cutting, detail="low", **source) == low
        assert response(cutting, **source) == response(cutting, detail="high", **source) == whole
