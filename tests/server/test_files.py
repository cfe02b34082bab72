"""/v1/files through the real openai client."""

from __future__ import annotations

import base64
import io

import httpx
import openai
import pytest
from PIL import Image

from tests.media.test_videos import COLOURS, video_file
from tests.server.live import IN_BOTH_KINDS, LiveServer
from tests.server.test_chat import about, data_url


def png(color: str, size: tuple[int, int] = (40, 30)) -> bytes:
    return base64.b64decode(data_url(color, size).partition(",")[2])


def upload(server: LiveServer, data: bytes, name: str = "a.png", **fields):
    return server.openai.files.create(file=(name, data), purpose="vision", **fields)


def post(server: LiveServer, **form) -> tuple[int, dict]:
    response = httpx.post(f"{server.url}/v1/files", timeout=30, **form)
    return response.status_code, response.json().get("error")


@IN_BOTH_KINDS
def test_a_file_is_uploaded_listed_read_and_deleted(keeping):
    files = keeping.openai.files
    file = upload(keeping, png("red"), "Bäume & more.png")
    assert file.id.startswith("file-")
    assert (file.filename, file.bytes, file.purpose) == ("Bäume & more.png", len(png("red")), "vision")
    assert (file.object, file.status, file.expires_at) == ("file", "processed", None)
    assert files.retrieve(file.id) == file
    content = files.content(file.id)
    assert content.read() == png("red")
    assert content.response.headers["content-type"] == "image/png"
    assert content.response.headers["content-disposition"].startswith("attachment")
    assert next(iter(files.list())) == file
    assert files.delete(file.id).deleted
    for method in (files.retrieve, files.content, files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            method(file.id)
        assert caught.value.body["message"] == f"No such File object: {file.id}"
    assert keeping.service.bodies.used == 0


@IN_BOTH_KINDS
def test_lists_are_paged_and_chosen_by_purpose(keeping):
    files = keeping.openai.files
    mine = [files.create(file=("a.png", png("blue")), purpose="user_data").id for _ in range(5)]
    listed = [file.id for file in files.list(purpose="user_data", limit=2, order="asc")]
    assert listed == sorted(mine, key=listed.index)
    assert set(listed) == set(mine)
    assert [file.id for file in files.list(purpose="assistants")] == []
    with pytest.raises(openai.BadRequestError, match="after"):
        files.list(after="file-none")


def test_shown_file_answers_like_its_image(keeping):
    file = upload(keeping, png("green"))
    by_url = keeping.openai.chat.completions.create(model="tiny", messages=about(data_url("green")))
    parts = [{"type": "file", "file": {"file_id": file.id}}, {"type": "text", "text": "What is in the picture?"}]
    by_id = keeping.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}])
    assert by_id.choices[0].message.content == by_url.choices[0].message.content
    for kind in ("input_image", "input_file"):
        content = [{"type": kind, "file_id": file.id}, {"type": "input_text", "text": "What is in the picture?"}]
        response = keeping.openai.responses.create(model="tiny", input=[{"role": "user", "content": content}])
        assert response.output_text == by_url.choices[0].message.content
        assert response.usage.input_tokens == by_url.usage.prompt_tokens
    keeping.openai.files.delete(file.id)
    with pytest.raises(openai.NotFoundError) as caught:
        keeping.openai.responses.create(model="tiny", input="And now?", previous_response_id=response.id)
    assert "an earlier turn" not in caught.value.body["message"]
    assert file.id in caught.value.body["message"]
    with pytest.raises(openai.NotFoundError) as caught:
        keeping.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}])
    assert caught.value.body["param"] == "messages[0].content[0].file_id"


def test_token_count_includes_shown_files(keeping):
    file = upload(keeping, png("green"))
    part = {"type": "file", "file": {"file_id": file.id}}
    bodies = [
        {"messages": [{"role": "user", "content": [shown]}]}
        for shown in (part, about(data_url("green"))[0]["content"][0])
    ]
    by_id, by_url = (httpx.post(f"{keeping.url}/tokenize", json=body, timeout=30).json() for body in bodies)
    assert by_id["tokens"] == by_url["tokens"]


@IN_BOTH_KINDS
def test_files_expire_when_they_were_asked_to(keeping):
    file = upload(keeping, png("red"), expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(openai.BadRequestError, match="3600"):
        upload(keeping, png("red"), expires_after={"anchor": "created_at", "seconds": 1})


def test_neither_image_nor_video_is_rejected(keeping):
    broken = png("red")[:20]
    for data in (b"hello", b"", broken, b"<svg xmlns='http://www.w3.org/2000/svg'/>"):
        status, error = post(keeping, files={"file": ("a.png", data)}, data={"purpose": "vision"})
        assert (status, error["code"], error["param"]) == (400, "invalid_image", "file")


def test_video_is_shown_as_images_of_frames(keeping):
    file = upload(keeping, video_file(COLOURS), "a.mp4")
    part, question = {"type": "file", "file": {"file_id": file.id}}, {"type": "text", "text": "What moves?"}
    answer = keeping.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": [part, question]}]
    )
    assert [(size["width"], size["frames"]) for size in answer.image_sizes] == [(64, None)] * 4
    content = [{"type": "input_file", "file_id": file.id}, {"type": "input_text", "text": "What moves?"}]
    response = keeping.openai.responses.create(model="tiny", input=[{"role": "user", "content": content}])
    assert response.output_text == answer.choices[0].message.content
    assert response.usage.input_tokens == answer.usage.prompt_tokens


def test_a_model_that_cannot_see_videos_takes_none(keeping, monkeypatch):
    monkeypatch.setattr(type(keeping.service.preparation), "supports_videos", False)
    video = b"\0\0\0\x18ftypmp42" + b"\0" * 100
    status, error = post(keeping, files={"file": ("a.mp4", video)}, data={"purpose": "vision"})
    assert (status, error["code"]) == (400, "invalid_video")


def test_only_images_of_allowed_sizes_are_kept(keeping):
    noise = io.BytesIO()
    Image.effect_noise((400, 400), 100).save(noise, "PNG")
    assert len(noise.getvalue()) > 100_000
    status, error = post(keeping, files={"file": ("a.png", noise.getvalue())}, data={"purpose": "vision"})
    assert (status, error["param"]) == (400, "file")
    status, error = post(keeping, files={"file": ("a.png", b"\0" * 500_000)}, data={"purpose": "vision"})
    assert (status, error["code"]) == (413, "body_too_large")
    assert keeping.service.bodies.used == 0


def test_wrong_forms_are_refused_kindly(keeping):
    file = {"file": ("a.png", png("red"))}
    for status, param, form in (
        (400, "purpose", {"files": file}),
        (400, "purpose", {"files": file, "data": {"purpose": "fine-tune"}}),
        (400, "purposes", {"files": file, "data": {"purpose": "vision", "purposes": "red"}}),
        (400, "file", {"files": {"image": ("a.png", png("red"))}, "data": {"purpose": "vision"}}),
        (400, "file", {"files": {"purpose": (None, "vision")}}),
        (400, None, {"files": [("file", ("a.png", b"x")), ("file", ("b.png", b"y"))], "data": {"purpose": "vision"}}),
        (415, None, {"json": {"purpose": "vision"}}),
        (400, None, {"content": b"nonsense", "headers": {"content-type": "multipart/form-data"}}),
        (400, None, {"content": b"nonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}}),
        *(
            (400, None, {"content": b"--x--", "headers": {"content-type": f"multipart/form-data; boundary=x; {codec}"}})
            for codec in ("charset=unicode_escape", "charset=base64", "charset=utf-16", "charset=nonsense")
        ),
    ):
        found, error = post(keeping, **form)
        assert (found, error["param"]) == (status, param), error
    assert upload(keeping, png("red")).id
