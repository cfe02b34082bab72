"""Documents through each API, and that a hostile one costs nobody else anything."""

from __future__ import annotations

import asyncio
import base64
import io
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from PIL import Image

from tests.media.documents_for_tests import encrypted, exponential, page, pdf_file, slow, square
from tests.media.test_documents import pages_as_images
from tests.mock_checkpoint import IMAGE_TOKENS
from tests.rendering import rendering
from tests.server.live import QUESTION, LiveServer
from tests.server.test_chat import about
from tests.waiting import wait_until
from vlmserve.settings.config import MediaConfig

if TYPE_CHECKING:
    from anthropic.types import Message

LIMITS = {"page_dpi": 36, "document_timeout": 2, "num_workers": 2}
PDF = pdf_file([page(square("1 0 0")), page(square("0 0 1", 300))])
ENCODED = base64.b64encode(PDF).decode()
URL = f"data:application/pdf;base64,{ENCODED}"
TEXT = "What is in the picture?"


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("history") / "history.db"
    with LiveServer(folder, server={"storage_url": f"sqlite:///{path}"}, media=LIMITS) as running:
        yield running


def png_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def expected(server):
    """The answer about the document. The mock engine's depends on all token ids and on what each image is."""
    return server.openai.chat.completions.create(model="tiny", messages=document_messages({"file_data": URL}))


def document_messages(file: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [{"type": "file", "file": file}, {"type": "text", "text": TEXT}]}]


def asked(server: LiveServer, data: bytes, **fields: Any) -> httpx.Response:
    url = "data:application/pdf;base64," + base64.b64encode(data).decode()
    part = {"type": "file", "file": {"file_data": url, "filename": "a.pdf"}, **fields}
    return server.post({"messages": [{"role": "user", "content": [part, {"type": "text", "text": TEXT}]}]})


def test_chat_completions_answer_about_each_page(server, expected):
    urls = [png_url(image) for image in pages_as_images(PDF, MediaConfig(**LIMITS))]
    images = server.openai.chat.completions.create(model="tiny", messages=about(*urls))
    assert expected.usage.prompt_tokens == images.usage.prompt_tokens
    for file in ({"file_data": URL, "filename": "a.pdf"}, {"file_data": ENCODED}):
        answer = server.openai.chat.completions.create(model="tiny", messages=document_messages(file))
        assert answer.choices[0].message.content == expected.choices[0].message.content
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    first, second = (asked(server, PDF, pages=pages).json() for pages in ("1", "2"))
    assert second["usage"]["prompt_tokens"] == expected.usage.prompt_tokens - IMAGE_TOKENS
    assert first["choices"][0]["message"]["content"] != second["choices"][0]["message"]["content"]


def test_uploaded_document_is_shown_by_id(server, expected):
    file = server.openai.files.create(file=("a.pdf", PDF), purpose="user_data")
    assert server.openai.files.content(file.id).response.headers["content-type"] == "application/pdf"
    answer = server.openai.chat.completions.create(model="tiny", messages=document_messages({"file_id": file.id}))
    assert answer.choices[0].message.content == expected.choices[0].message.content
    image = io.BytesIO()
    Image.new("RGB", (9, 9)).save(image, "PNG")
    image_file = server.openai.files.create(file=("a.png", image.getvalue()), purpose="user_data")
    part = {"type": "file", "file": {"file_id": image_file.id}, "pages": "1"}
    refused = server.post({"messages": [{"role": "user", "content": [part]}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].content[0].file_id")


def test_responses_answer_about_documents_and_keep_them(server, expected):
    file = server.openai.files.create(file=("a.pdf", PDF), purpose="user_data")
    for source in ({"file_data": URL, "filename": "a.pdf"}, {"file_id": file.id}):
        content = [{"type": "input_file", **source}, {"type": "input_text", "text": TEXT}]
        response = server.openai.responses.create(model="tiny", input=[{"role": "user", "content": content}])
        assert response.output_text == expected.choices[0].message.content
        assert response.usage.input_tokens == expected.usage.prompt_tokens
        later = server.openai.responses.create(model="tiny", input="And now?", previous_response_id=response.id)
        assert later.usage.input_tokens > response.usage.input_tokens
    kept = server.openai.responses.input_items.list(later.previous_response_id).data[-1]
    assert kept.content[0].type == "input_file"
    one = {"type": "input_file", "file_data": URL, "pages": "2"}
    body = {"model": "tiny", "input": [{"role": "user", "content": [one, {"type": "input_text", "text": TEXT}]}]}
    usage = httpx.post(f"{server.url}/v1/responses", json=body, timeout=30).json()["usage"]
    assert usage["input_tokens"] == expected.usage.prompt_tokens - IMAGE_TOKENS


@pytest.mark.parametrize("kind", ["TIFF", "GIF"])
def test_files_with_several_pages_or_frames_are_documents(server, kind):
    images = [Image.new("RGB", (90, 60), colour) for colour in ("red", "blue", "green")]
    data = io.BytesIO()
    images[0].save(data, kind, save_all=True, append_images=images[1:], duration=100)
    file = server.openai.files.create(file=(f"a.{kind.lower()}", data.getvalue()), purpose="vision")
    assert server.openai.files.content(file.id).response.headers["content-type"] == f"image/{kind.lower()}"
    tokens = []
    for pages in ({}, {"pages": "2-3"}, {"pages": "1"}):
        part = {"type": "input_file", "file_id": file.id, **pages}
        body = {"model": "tiny", "input": [{"role": "user", "content": [part, {"type": "input_text", "text": TEXT}]}]}
        tokens.append(httpx.post(f"{server.url}/v1/responses", json=body, timeout=30).json()["usage"]["input_tokens"])
    assert [tokens[0] - tokens[1], tokens[1] - tokens[2]] == [IMAGE_TOKENS, IMAGE_TOKENS]
    refused = server.post(
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image_url",
                            "image_url": {
                                "url": (
                                    f"data:image/{kind.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"
                                )
                            },
                        }
                    ],
                }
            ]
        }
    )
    assert refused.status_code == 400
    assert 'a part of type "file"' in refused.json()["error"]["message"]


def test_messages_answer_about_documents(server, expected):
    source = {"type": "base64", "media_type": "application/pdf", "data": ENCODED}
    question = {"type": "text", "text": TEXT}

    def ask(*blocks: dict[str, Any]) -> Message:
        messages = [{"role": "user", "content": [*blocks]}]
        return server.anthropic.messages.create(model="tiny", max_tokens=400, messages=messages)

    answer = ask({"type": "document", "source": source}, question)
    assert answer.content[0].text == expected.choices[0].message.content
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == expected.usage.prompt_tokens
    titled = ask({"type": "document", "source": source, "title": "A", "context": "B", "pages": "1"}, question)
    assert titled.content[0].text
    text = {"type": "text", "media_type": "text/plain", "data": TEXT}
    plain = ask({"type": "document", "source": text})
    alone = ask(question)
    assert plain.content[0].text == alone.content[0].text
    broken = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(PDF[:99]).decode()}
    from anthropic import BadRequestError

    with pytest.raises(BadRequestError, match=r"messages\[0\]\.content\[1\]\.source: .*broken"):
        ask(question, {"type": "document", "source": broken})
    cited = ask({"type": "document", "source": source, "citations": {"enabled": True}}, question)
    assert cited.content[0].text == answer.content[0].text


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (PDF[:150], "invalid_document", "broken"),
        (encrypted(), "invalid_document", "encrypted"),
        (b"hello", "invalid_document", "documents are PDF files"),
        (pdf_file([page("", (20, 20))] * 10_000), "document_too_large", "10,000 pages"),
        (exponential(), "document_too_large", "page 1"),
    ],
    ids=["truncated", "encrypted", "text", "ten thousand pages", "exponential"],
)
def test_unusable_document_is_rejected_in_the_apis_form(server, data, code, words):
    response = asked(server, data)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, code, "invalid_request_error")
    assert error["param"] == "messages[0].content[0].file.file_data"
    assert words in error["message"]


def test_hostile_documents_disturb_nobody(server):
    broken = [slow(), exponential(), encrypted(), PDF[:120]] * 2
    with ThreadPoolExecutor(12) as threads:
        hostile = [threads.submit(asked, server, data) for data in broken]
        texts = [server.post({"messages": QUESTION}).status_code for _ in range(5)]
        good = [threads.submit(asked, server, PDF) for _ in range(3)]
    assert texts == [200] * 5
    assert [future.result().status_code for future in good] == [200] * 3
    assert [future.result().status_code for future in hostile] == [400] * len(broken)
    assert not rendering()
    assert server.service.bodies.used == 0


async def test_slow_document_delays_no_image_and_is_cancelled(folder):
    with LiveServer(folder, media={"document_timeout": 600, "num_workers": 1}) as patient:
        url = f"{patient.url}/v1/chat/completions"
        document = {"file_data": "data:application/pdf;base64," + base64.b64encode(slow()).decode()}
        async with httpx.AsyncClient(timeout=60) as client:
            waiting = asyncio.create_task(client.post(url, json={"messages": document_messages(document)}))
            await asyncio.to_thread(wait_until, rendering)
            image = await client.post(url, json={"messages": about(png_url(Image.new("RGB", (40, 40), "red")))})
            assert image.status_code == 200
            assert rendering()
            waiting.cancel()
        await asyncio.to_thread(wait_until, lambda: not rendering())


def previewed(server: LiveServer, data: bytes, **fields: str) -> httpx.Response:
    files = {"file": ("a.pdf", data, "application/pdf")}
    return httpx.post(f"{server.url}/v1/documents/previews", files=files, data=fields, timeout=60)


def test_previews_are_images_of_pages(server):
    body = previewed(server, PDF, pages="2").json()
    assert body["num_pages"] == 2
    [shown] = body["data"]
    image = Image.open(io.BytesIO(base64.b64decode(shown["image"].removeprefix("data:image/jpeg;base64,"))))
    assert (shown["page"], image.size) == (2, (shown["width"], shown["height"]))
    assert [one["page"] for one in previewed(server, PDF).json()["data"]] == [1, 2]
    for data, pages, message in ((PDF, "3", "there is no page 3"), (b"text", "1", "document"), (PDF, "a", "pages")):
        failed = previewed(server, data, pages=pages)
        assert (failed.status_code, message in failed.json()["error"]["message"]) == (400, True)
