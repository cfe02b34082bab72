"""/v1/batches through the real openai client."""

from __future__ import annotations

import json

import openai
import pytest

from tests.server.live import IN_BOTH_KINDS
from tests.server.test_chat import about, data_url
from tests.server.test_files import png
from tests.waiting import wait_until


def line(custom_id: str, text: str = "Hello", url: str = "/v1/chat/completions", **fields) -> dict:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 5, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines) -> bytes:
    return b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines)


def upload(client: openai.OpenAI, lines) -> str:
    return client.files.create(file=("requests.jsonl", jsonl(lines)), purpose="batch").id


def start(client: openai.OpenAI, lines, endpoint="/v1/chat/completions", **fields):
    fields = {"completion_window": "24h", **fields}
    return client.batches.create(input_file_id=upload(client, lines), endpoint=endpoint, **fields)


def finished(client: openai.OpenAI, id: str):
    ended = ("completed", "failed", "expired", "cancelled")
    wait_until(lambda: client.batches.retrieve(id).status in ended)
    return client.batches.retrieve(id)


def content(client: openai.OpenAI, file_id: str | None) -> list[dict]:
    return [] if file_id is None else [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


@IN_BOTH_KINDS
def test_file_requests_are_answered_like_client_requests(keeping):
    client = keeping.openai
    bodies = [line(f"row {number}", f"Question {number}?")["body"] for number in range(20)]
    bodies[3]["messages"] = about(data_url("red"))
    bodies[5]["temperature"] = -1
    bodies[7]["model"] = "tiny"
    lines = [{**line(f"row {number}"), "body": body} for number, body in enumerate(bodies)]
    batch = start(client, [*lines[:10], b"\n", *lines[10:]], metadata={"for": "a test"})
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", "/v1/chat/completions")
    assert (batch.completion_window, batch.metadata) == ("24h", {"for": "a test"})
    assert batch.expires_at == batch.created_at + 86400
    batch = finished(client, batch.id)
    assert (batch.status, batch.errors, batch.model) == ("completed", None, "tiny")
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (20, 19, 1)
    answers = content(client, batch.output_file_id)
    assert [one["custom_id"] for one in answers] == [f"row {number}" for number in range(20) if number != 5]
    total = 0
    for one in answers:
        assert one["error"] is None
        assert one["response"]["status_code"] == 200
        assert one["response"]["request_id"].startswith("req-")
        body = bodies[int(one["custom_id"].split()[1])]
        direct = keeping.post(body).json()
        assert one["response"]["body"]["choices"] == direct["choices"]
        total += one["response"]["body"]["usage"]["total_tokens"]
    assert batch.usage.total_tokens == total
    [wrong] = content(client, batch.error_file_id)
    assert wrong["custom_id"] == "row 5"
    assert wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["param"] == "temperature"
    file = client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert keeping.service.bodies.used == 0


def test_all_endpoints_are_answered(keeping):
    client = keeping.openai
    prompt = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "Hello", "max_tokens": 3},
    }
    asked = {"custom_id": "b", "method": "POST", "url": "/v1/responses", "body": {"model": "tiny", "input": "Hello"}}
    ids = [start(client, [one], one["url"]).id for one in (prompt, asked)]
    [text], [response] = (content(client, finished(client, id).output_file_id) for id in ids)
    assert text["response"]["body"]["object"] == "text_completion"
    stored = client.responses.retrieve(response["response"]["body"]["id"])
    assert stored.output_text == response["response"]["body"]["output"][0]["content"][0]["text"]


@IN_BOTH_KINDS
def test_batches_are_listed_page_by_page(keeping):
    client = keeping.openai
    mine = [start(client, [line("a")]).id for _ in range(3)]
    listed = [batch.id for batch in client.batches.list(limit=2)][:3]
    assert listed == mine[::-1]
    with pytest.raises(openai.BadRequestError, match="after"):
        client.batches.list(after="batch_none")
    with pytest.raises(openai.NotFoundError, match="batch_none"):
        client.batches.retrieve("batch_none")
    for id in mine:
        finished(client, id)


def test_invalid_batch_files_fail_with_the_place(keeping):
    client = keeping.openai
    other = line("e", url="/v1/completions")
    lines = [line("a"), b"nonsense\n", line("a"), other, line("f", stream=True), {**line("g"), "method": "GET"}]
    batch = finished(client, start(client, lines).id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at >= batch.created_at
    assert [(error.code, error.line) for error in batch.errors.data] == [
        ("invalid_line", 2), ("duplicate_custom_id", 3), ("mismatched_url", 4), ("invalid_request", 5),
        ("invalid_line", 6),
    ]  # fmt: skip
    batch = finished(client, start(client, [line("a"), line("b", model="other")]).id)
    assert [error.code for error in batch.errors.data] == ["mismatched_model"]
    assert finished(client, start(client, [b"\n"]).id).errors.data[0].code == "empty_file"
    many = finished(client, start(client, [b"x\n"] * 1000).id)
    assert len(many.errors.data) == 50


def test_wrong_requests_are_refused(keeping):
    client = keeping.openai
    file_id = upload(client, [line("a")])
    for fields, param in (
        ({"endpoint": "/v1/audio/speech"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(
                **{"input_file_id": file_id, "endpoint": "/v1/responses", "completion_window": "24h", **fields}
            )
        assert caught.value.body["param"] == param
    with pytest.raises(openai.NotFoundError) as caught:
        client.batches.create(input_file_id="file-none", endpoint="/v1/responses", completion_window="24h")
    assert caught.value.body["param"] == "input_file_id"
    image = client.files.create(file=("a.png", png("red")), purpose="vision")
    with pytest.raises(openai.BadRequestError, match="another purpose"):
        client.batches.create(input_file_id=image.id, endpoint="/v1/responses", completion_window="24h")
    part = {"type": "file", "file": {"file_id": file_id}}
    response = keeping.post({"messages": [{"role": "user", "content": [part]}]})
    assert response.status_code == 400
    assert "no image" in response.json()["error"]["message"]
