"""Streams that stay silent for long."""

from __future__ import annotations

import asyncio
import json

import httpx
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from tests.server.live import QUESTION, LiveServer
from tests.waiting import wait_until
from vlmserve.errors import InvalidRequestError, OverloadedError
from vlmserve.server.errors import error_response
from vlmserve.server.progress import describe
from vlmserve.server.streams import begin_in_time
from vlmserve.types import EngineSnapshot, EngineStats, RequestSnapshot, RequestState

PATHS = {
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 3},
    "/v1/completions": {"prompt": "one", "max_tokens": 3},
    "/v1/responses": {"input": "one", "max_output_tokens": 3, "store": False},
    "/v1/messages": {"model": "tiny", "messages": QUESTION, "max_tokens": 3},
}


@pytest.fixture(scope="module")
def silent(folder):
    """A server whose first tokens come after several pings."""
    server = {"stream_ping_interval": 0.05, "storage_url": "none"}
    with LiveServer(folder, engine={"mock_ttft": 0.4}, server=server) as running:
        yield running


@pytest.fixture
def slow_preparation(silent, monkeypatch):
    """The same server, whose prompts take long, too. Prompts of "wrong" fail."""
    prepare = silent.service.preparation.prepare

    async def slowly(messages, *arguments, **fields):
        await asyncio.sleep(0.4)
        if messages[-1]["content"] == "wrong":
            raise InvalidRequestError("The prompt is wrong", param="messages")
        return await prepare(messages, *arguments, **fields)

    monkeypatch.setattr(silent.service.preparation, "prepare", slowly)
    return silent


def stream(live: LiveServer, path: str, **fields: object) -> str:
    response = httpx.post(f"{live.url}{path}", json={**PATHS[path], **fields, "stream": True}, timeout=60)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return response.text


def test_streams_say_what_they_wait_for(silent):
    headers = {"X-Stream-Progress": "1"}
    body = {**PATHS["/v1/chat/completions"], "stream": True}
    text = httpx.post(f"{silent.url}/v1/chat/completions", json=body, headers=headers, timeout=60).text
    comments = [json.loads(line[2:]) for line in text.splitlines() if line.startswith(": {")]
    assert comments
    assert {comment["state"] for comment in comments} <= {"waiting", "prompt", "answer"}
    assert "\n: {" not in stream(silent, "/v1/chat/completions")


def snapshot(**states: RequestState) -> EngineSnapshot:
    """Requests by id, with a prompt of 100 tokens of which 40 are computed."""
    requests = [RequestSnapshot(name, state, 100, 100, 40, 0, 2, 3) for name, state in states.items()]
    return EngineSnapshot(EngineStats(), requests)


def test_progress_is_that_of_the_first_to_run():
    assert describe(snapshot(a="running"), ["gone"]) is None
    queue = snapshot(a="running", b="waiting", c="preempted", d="waiting")
    assert describe(queue, ["b"]) == {"state": "waiting", "place": 1}
    assert describe(queue, ["d", "c"]) == {"state": "waiting", "place": 2}
    assert describe(queue, ["d", "a"]) == {"state": "prompt", "tokens": 40, "total": 100}
    [request] = snapshot(a="running").requests
    reading = msgspec.structs.replace(request, images_in_progress=2)
    assert describe(EngineSnapshot(EngineStats(), [reading]), ["a"]) == {"state": "images", "images": 2}
    computed = msgspec.structs.replace(request, num_computed_tokens=99)
    assert describe(EngineSnapshot(EngineStats(), [computed]), ["a"]) == {"state": "answer"}


def num_pings(text: str, path: str) -> int:
    return text.count("event: ping\n") if path == "/v1/messages" else text.count("\n: ") + text.startswith(": ")


@pytest.mark.parametrize("path", PATHS)
def test_streams_ping_before_the_first_token(silent, path):
    assert num_pings(stream(silent, path), path) >= 3


@pytest.mark.parametrize("path", sorted(set(PATHS) - {"/v1/completions"}))
def test_streams_ping_while_the_prompt_is_prepared(slow_preparation, path):
    text = stream(slow_preparation, path)
    assert num_pings(text.partition('data: {"')[0] if path != "/v1/messages" else text, path) >= 3
    assert "data: {" in text


@pytest.mark.parametrize("path", sorted(set(PATHS) - {"/v1/completions"}))
def test_late_errors_are_events(slow_preparation, path):
    field = "input" if path == "/v1/responses" else "messages"
    wrong = "wrong" if field == "input" else [{"role": "user", "content": "wrong"}]
    *_, last = stream(slow_preparation, path, **{field: wrong}).strip().split("\n\n")
    event = json.loads(last.rpartition("data: ")[2])
    assert "The prompt is wrong" in json.dumps(event)
    if path == "/v1/chat/completions":
        assert (event["error"]["code"], event["error"]["param"]) == ("invalid_request", "messages")
    else:
        assert last.startswith("event: error\n")
        assert event["type"] == "error"
    wait_until(lambda: slow_preparation.service.num_answers == 0)


def test_early_errors_are_statuses(silent):
    assert silent.post({"messages": [], "stream": True}).status_code == 400


def test_clients_skip_pings(slow_preparation):
    chunks = list(slow_preparation.openai.chat.completions.create(model="tiny", messages=QUESTION, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"
    events = list(slow_preparation.openai.responses.create(model="tiny", input="one", stream=True, store=False))
    assert events[-1].type == "response.completed"
    client = slow_preparation.anthropic
    with client.messages.stream(model="tiny", messages=QUESTION, max_tokens=3) as answer:
        assert answer.get_final_message().usage.output_tokens > 0
    wrong = [{"role": "user", "content": "wrong"}]
    from anthropic import APIError

    with pytest.raises(APIError, match="The prompt is wrong"):
        list(client.messages.create(model="tiny", messages=wrong, max_tokens=3, stream=True))


@pytest.mark.parametrize("path", PATHS)
def test_late_error_responses_become_events(path):
    """As a gateway gets them from a worker."""

    async def answer() -> Response:
        await asyncio.sleep(0.1)
        return error_response(OverloadedError("The queue is full"), path)

    async def run() -> list[Message]:
        sent: list[Message] = []
        scope = {"type": "http", "path": path, "headers": []}

        async def send(message: Message) -> None:
            sent.append(message)

        response = await begin_in_time(Request(scope), answer(), lambda: True, 0.01)
        await response(scope, None, send)
        return sent

    begin, *rest = asyncio.run(run())
    assert begin["status"] == 200
    assert len(rest) > 2
    assert not rest[-1].get("more_body")
    assert rest[-1]["body"].endswith(b"\n\n")
    assert b"The queue is full" in rest[-1]["body"]


def test_leaving_a_pinging_stream_ends_its_request(silent, monkeypatch):
    async def never(*arguments, **fields):
        await asyncio.Event().wait()

    monkeypatch.setattr(silent.service.preparation, "prepare", never)
    body = {**PATHS["/v1/chat/completions"], "stream": True}
    with httpx.stream("POST", f"{silent.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # kept, because the connection closes with it
        assert next(lines).startswith(": ")
        assert silent.service.num_answers == 1
    wait_until(lambda: silent.service.num_answers == 0)


def test_streams_without_silence_have_no_pings(live):
    assert num_pings(stream(live, "/v1/chat/completions"), "/v1/chat/completions") == 0


def test_an_interval_of_zero_sends_no_pings(folder):
    with LiveServer(folder, engine={"mock_ttft": 0.3}, server={"stream_ping_interval": 0}) as server:
        assert num_pings(stream(server, "/v1/completions"), "/v1/completions") == 0
