"""/v1/responses, mostly through the real openai client."""

from __future__ import annotations

import base64
import functools
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.server.live import IN_BOTH_KINDS, LiveServer
from tests.server.test_chat import data_url
from tests.waiting import wait_until
from vlmserve.errors import EngineDeadError, StorageError
from vlmserve.models.hub import resolve_model
from vlmserve.server.history import OWNER
from vlmserve.settings.config import BUILT_IN_MODEL


def shown(url: str, text: str = "What is in the picture?") -> list:
    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": text}]
    return [{"role": "user", "content": content}]


def respond(server: LiveServer, input: object = "What is this?", **fields):
    return server.openai.responses.create(model="tiny", input=input, **fields)


def refused(server: LiveServer, status: int, **body) -> dict:
    response = httpx.post(f"{server.url}/v1/responses", json={"input": "What is this?", **body}, timeout=60)
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_a_response_has_everything_that_openai_promises(keeping):
    response = respond(keeping, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, top_p=0.9)
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", "tiny")
    assert response.error is None
    assert response.incomplete_details is None
    [item] = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert item.content[0].type == "output_text"
    assert item.content[0].annotations == []
    assert response.output_text
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert (response.temperature, response.top_p, response.truncation) == (0.5, 0.9, "disabled")
    assert (response.metadata, response.instructions) == ({"a": "b"}, "Be brief.")
    assert response.completed_at >= response.created_at


def test_response_equals_chat_completion(keeping):
    chat = keeping.openai.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": data_url("red")}},
                {"type": "text", "text": "What is in the picture?"},
            ]},
        ],
    )  # fmt: skip
    response = respond(keeping, shown(data_url("red")), instructions="Be brief.")
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_events_follow_openais_order_and_add_up(keeping):
    whole = respond(keeping)
    events = list(respond(keeping, stream=True))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert "".join(deltas) == events[-4].text == last.output_text == whole.output_text
    assert events[0].response.status == "in_progress"
    assert events[2].item.id == events[4].item_id == last.output[0].id
    assert last.usage == whole.usage
    assert keeping.openai.responses.retrieve(last.id) == last


def test_the_clients_own_stream_helper_understands_the_events(keeping):
    with keeping.openai.responses.stream(model="tiny", input="What is this?") as stream:
        final = stream.get_final_response()
    assert final.output_text == respond(keeping).output_text


async def test_the_async_client_gets_whole_responses_and_streams(keeping):
    async with keeping.async_openai as client:
        whole = await client.responses.create(model="tiny", input="What is this?")
        stream = await client.responses.create(model="tiny", input="What is this?", stream=True)
        *_, last = [event async for event in stream]
    assert last.response.output_text == whole.output_text


def test_truncated_answer_is_incomplete_with_a_reason(keeping):
    response = respond(keeping, max_output_tokens=3)
    assert response.status == response.output[0].status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 3
    *_, last = respond(keeping, max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete"
    assert keeping.openai.responses.retrieve(last.response.id).status == "incomplete"


@IN_BOTH_KINDS
def test_a_response_is_retrieved_and_deleted(keeping):
    client = keeping.openai
    response = respond(keeping, shown(data_url("red")))
    assert client.responses.retrieve(response.id) == response
    [item] = client.responses.input_items.list(response.id).data
    assert item.content[0].image_url == data_url("red")
    client.responses.delete(response.id)
    for method in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            method(response.id)
        assert caught.value.body["type"] == "invalid_request_error"
        assert response.id in caught.value.body["message"]


def test_what_is_not_to_be_stored_is_not(keeping):
    response = respond(keeping, store=False)
    assert response.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        keeping.openai.responses.retrieve(response.id)


@IN_BOTH_KINDS
def test_successive_turns_equal_a_clients_conversation(keeping):
    first = respond(keeping, shown(data_url("red")), instructions="Be brief.")
    second = respond(keeping, "And why?", previous_response_id=first.id)
    third = respond(keeping, "And how?", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    sent = [
        *shown(data_url("red")),
        *first.output,  # as the client has them
        {"role": "user", "content": "And why?"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": [{"type": "input_text", "text": "And how?"}]},
    ]
    whole = respond(keeping, sent)
    assert whole.output_text == third.output_text
    assert whole.usage.input_tokens == third.usage.input_tokens


def test_references_stand_for_items_that_are_kept(keeping):
    """As clients do that send a whole conversation, but name what the server itself has said."""
    question, more = shown(data_url("red")), {"role": "user", "content": "And now?"}
    first = respond(keeping, question)
    [asked] = keeping.openai.responses.input_items.list(first.id)
    references = [{"type": "item_reference", "id": id} for id in (asked.id, first.output[0].id)]
    by_name = respond(keeping, [*references, more])
    whole = respond(keeping, [*question, first.output[0].to_dict(), more])
    assert (by_name.output_text, by_name.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)

    copies = list(keeping.openai.responses.input_items.list(by_name.id, order="asc"))
    assert copies[0].content == asked.content
    assert copies[1].content[0].text == first.output_text
    keeping.openai.responses.delete(first.id)
    assert respond(keeping, "And now?", previous_response_id=by_name.id).output_text
    assert refused(keeping, 404, input=[*references, more])["param"] == "input[0]"
    again = [{"type": "item_reference", "id": copy.id} for copy in copies[:2]]
    assert respond(keeping, [*again, more]).output_text == whole.output_text


def test_references_cannot_exceed_a_bodys_limits(keeping, monkeypatch):
    response = respond(keeping, "word " * 20)
    [asked] = keeping.openai.responses.input_items.list(response.id)
    monkeypatch.setattr(keeping.service, "max_body_bytes", 1000)
    reference = {"type": "item_reference", "id": asked.id}
    assert "bytes" in refused(keeping, 400, input=[reference] * 10)["message"]
    assert keeping.service.bodies.used == 0


@IN_BOTH_KINDS
def test_input_items_are_paged_both_ways(keeping):
    turns = [{"role": "user", "content": f"question {number}"} for number in range(7)]
    response = respond(keeping, turns)
    listing = keeping.openai.responses.input_items
    for order, expected in (("asc", turns), ("desc", turns[::-1])):
        items = list(listing.list(response.id, limit=3, order=order))  # the client fetches page after page
        assert [item.content[0].text for item in items] == [turn["content"] for turn in expected]
    page = listing.list(response.id, limit=3)
    assert page.has_more
    assert (page.first_id, page.last_id) == (page.data[0].id, page.data[-1].id)
    for query, param in (({"after": "msg_x"}, "after"), ({"limit": 0}, "limit"), ({"order": "up"}, "order"),
                         ({"before": "x"}, "before"), ({"limit": "x"}, "limit")):  # fmt: skip
        bad = httpx.get(f"{keeping.url}/v1/responses/{response.id}/input_items", params=query)
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, param)


@IN_BOTH_KINDS
def test_a_response_in_a_conversation_adds_its_turn(keeping):
    client = keeping.openai
    conversation = client.conversations.create(items=[{"type": "message", "role": "user", "content": "I am Ann."}])
    first = respond(keeping, "What is this?", conversation=conversation.id)
    assert first.conversation.id == conversation.id
    *_, last = respond(keeping, "And why?", conversation={"id": conversation.id}, stream=True)
    items = client.conversations.items.list(conversation.id, order="asc").data
    said = [(item.role, item.content[0].text) for item in items]
    assert said == [
        ("user", "I am Ann."),
        ("user", "What is this?"),
        ("assistant", first.output_text),
        ("user", "And why?"),
        ("assistant", last.response.output_text),
    ]
    assert items[2].id == first.output[0].id
    same = respond(keeping, [{"role": role, "content": text} for role, text in said[:-1]])
    assert same.output_text == last.response.output_text
    assert respond(keeping, [], conversation=conversation.id, store=False).output_text
    assert len(client.conversations.items.list(conversation.id).data) == 6
    with pytest.raises(openai.BadRequestError, match="conversation"):
        respond(keeping, previous_response_id=first.id)


@IN_BOTH_KINDS
def test_responses_at_once_in_one_conversation_lose_nothing(keeping):
    conversation = keeping.openai.conversations.create()

    def ask(number: int) -> str:
        response = respond(keeping, f"q{number}", conversation=conversation.id, max_output_tokens=2)
        return response.output[0].id

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(ask, range(12)))
    items = list(keeping.openai.conversations.items.list(conversation.id, order="asc", limit=10))
    assert [item.role for item in items] == ["user", "assistant"] * 12
    answers = {item.id: items[index - 1].content[0].text for index, item in enumerate(items)}
    assert [answers[id] for id in ids] == [f"q{number}" for number in range(12)]


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"previous_response_id": "resp_none"}, 404, "previous_response_id", "resp_none"),
        ({"previous_response_id": "nul\0"}, 404, "previous_response_id", "not found"),
        ({"conversation": "conv_none"}, 404, "conversation", "conv_none"),
        ({"conversation": "c", "previous_response_id": "r"}, 400, None, "together"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-x"}]}]},
         404, "input[0].content[0].file_id", "file-x"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         400, "input[0].content[0].image_url", "http"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input[0].content[0]", "either"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "x"}]}]},
         400, "input[0].content[0].file_data", "not valid base64"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, 400, "input[0].content[0]", "file_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "input[0].content[0]", "input_text"),
        ({"input": [{"type": "computer_call"}]}, 400, "input[0].call_id", "missing"),
        ({"input": [{"role": "tool", "content": "x"}]}, 400, "input[0].role", "user"),
        ({"input": [5]}, 400, "input[0]", "JSON object"),
        ({"input": []}, 400, None, "input is missing"),
        ({"input": 5}, 400, "input", "list"),
        ({"background": True}, 400, "background", "not supported"),
        ({"reasoning": {"effort": "enormous"}}, 400, "reasoning.effort", "none"),
        ({"include": ["message.output_text.secrets"]}, 400, "include[0]", "encrypted_content"),
        ({"top_logprobs": 2}, 400, "top_logprobs", "include"),
        ({"top_logprobs": 99, "include": ["message.output_text.logprobs"]}, 400, "top_logprobs", "at most 20"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_none"}]},
         404, "input[1]", "msg_none"),
        ({"input": [{"type": "item_reference"}]}, 400, "input[0].id", "missing"),
        ({"text": {"format": {"type": "grammar"}}}, 400, "text.format", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text.format", "schema is missing"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "foo"}}}},
            400, "text.format.schema", "foo",
        ),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "text.format"),
        ({"n": 2}, 400, "n", "not supported"),
        ({"use_beam_search": True}, 400, "use_beam_search", "not supported"),
        ({"truncation": "some"}, 400, "truncation", "auto"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens", "1"),
        ({"metadata": {"a": 1}}, 400, "metadata.a", "string"),
        ({"metadata": {str(number): "" for number in range(17)}}, 400, "metadata", "16"),
        ({"messages": [{"role": "user", "content": "hi"}]}, 400, "messages", "not supported"),
        ({"max_tokens": 5}, 400, "max_tokens", "did you mean max_output_tokens?"),
        ({"model": "other"}, 404, "model", "other"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(keeping, fields, status, param, words):
    error = refused(keeping, status, **fields)
    assert error["param"] == param
    assert words in error["message"]
    assert "messages[" not in error["message"]


def test_harmless_fields_change_nothing(keeping):
    plain = respond(keeping).output_text
    null = dict.fromkeys(("instructions", "previous_response_id", "conversation", "tools", "text", "reasoning"))
    harmless = {"background": False, "tools": [], "tool_choice": "auto", "reasoning": {}, "user": "me",
                "parallel_tool_calls": True, "service_tier": "auto", "text": {"format": {"type": "text"}},
                "stream_options": {"include_obfuscation": False}, "truncation": "auto",
                "include": ["reasoning.encrypted_content"]}  # fmt: skip
    for fields in (null, harmless):
        response = httpx.post(f"{keeping.url}/v1/responses", json={"input": "What is this?", **fields}, timeout=60)
        assert response.json()["output"][0]["content"][0]["text"] == plain


@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": "message"}])
def test_items_without_a_type_are_messages(keeping, kind):
    item = {**kind, "role": "user", "content": "What is this?"}
    assert respond(keeping, [item], temperature=0).output_text == respond(keeping, temperature=0).output_text


def test_only_background_responses_can_be_cancelled(keeping):
    response = respond(keeping)
    with pytest.raises(openai.BadRequestError, match="background"):
        keeping.openai.responses.cancel(response.id)
    with pytest.raises(openai.NotFoundError):
        keeping.openai.responses.cancel("resp_none")
    with pytest.raises(openai.BadRequestError, match="stream"):
        list(keeping.openai.responses.retrieve(response.id, stream=True))


def test_long_history_is_rejected_or_truncated_as_asked(keeping):
    turns = []
    for number in range(12):
        turns += [{"role": "user", "content": f"question {number} " + "red square " * 20}]
        turns += [{"role": "assistant", "content": "blue circle " * 5}]
    turns = [*turns, {"role": "user", "content": "What is this?"}]
    error = refused(keeping, 400, input=turns)
    assert error["code"] == "context_length_exceeded"
    cut = respond(keeping, turns, instructions="Be brief.", truncation="auto", store=False)
    assert cut.usage.input_tokens < 512
    longest = next(
        response
        for start in range(0, len(turns), 2)
        if (response := httpx.post(
            f"{keeping.url}/v1/responses", json={"input": turns[start:], "instructions": "Be brief."}, timeout=60
        )).status_code == 200
    )  # fmt: skip
    assert cut.usage.input_tokens == longest.json()["usage"]["input_tokens"]
    assert refused(keeping, 400, input="red " * 2000, truncation="auto")["code"] == "context_length_exceeded"


@IN_BOTH_KINDS
def test_owners_see_only_their_own(keeping):
    """Whoever sets the owner, as a check of API keys does, decides."""

    class AsSomebody:
        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            headers = dict(scope.get("headers", ()))
            await self.app({**scope, OWNER: headers.get(b"x-owner", b"").decode()}, receive, send)

    def client(owner: str) -> httpx.Client:
        return httpx.Client(base_url=f"{server.url}/v1", headers={"x-owner": owner}, timeout=60)

    storage = {"storage_url": keeping.settings.storage_url}
    with LiveServer(keeping.folder, server=storage, wrap=lambda app, service: AsSomebody(app)) as server:
        ann, bob = client("ann"), client("bob")
        with ann, bob:
            png = base64.b64decode(data_url("red").partition(",")[2])
            file = ann.post("/files", files={"file": ("a.png", png)}, data={"purpose": "vision"}).json()["id"]
            response = ann.post("/responses", json={"input": "What is this?"}).json()["id"]
            item = ann.get(f"/responses/{response}/input_items").json()["data"][0]["id"]
            conversation = ann.post("/conversations", json={}).json()["id"]
            paths = [f"/files/{file}", f"/files/{file}/content", f"/responses/{response}",
                     f"/responses/{response}/input_items", f"/conversations/{conversation}",
                     f"/conversations/{conversation}/items"]  # fmt: skip
            assert [ann.get(path).status_code for path in paths] == [200] * 6
            assert [bob.get(path).status_code for path in paths] == [404] * 6
            assert bob.get("/files").json()["data"] == []
            image = [{"role": "user", "content": [{"type": "input_image", "file_id": file}]}]
            for body in (
                {"input": "x", "previous_response_id": response},
                {"input": "x", "conversation": conversation},
                {"input": image},
                {"input": [{"type": "item_reference", "id": item}]},
            ):
                assert bob.post("/responses", json=body).status_code == 404
                assert ann.post("/responses", json=body).status_code == 200


@pytest.fixture(scope="module")
def slow_keeping(folder):
    with LiveServer(folder, engine={"mock_tpot": 0.02}, server={"storage_url": "memory"}) as server:
        yield server


def test_a_client_that_leaves_leaves_nothing_behind(slow_keeping):
    client = slow_keeping.openai
    conversation = client.conversations.create()
    body = {"input": "What is this?", "conversation": conversation.id, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{slow_keeping.url}/v1/responses", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        created = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
    wait_until(lambda: slow_keeping.service.num_answers == 0)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created)
    assert client.conversations.items.list(conversation.id).data == []
    assert slow_keeping.service.bodies.used == 0


def test_conversation_deleted_meanwhile_ends_the_response(slow_keeping):
    client = slow_keeping.openai
    conversation = client.conversations.create()
    events = client.responses.create(
        model="tiny", input="What is this?", conversation=conversation.id, stream=True, max_output_tokens=20
    )
    created = next(iter(events)).response.id
    client.conversations.delete(conversation.id)
    *_, last = events
    assert last.type == "response.failed"
    assert conversation.id in last.response.error.message
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created)


def test_failed_stream_says_why_and_is_kept(slow_keeping):
    client = slow_keeping.openai
    conversation = client.conversations.create()
    events = client.responses.create(model="tiny", input="What is this?", conversation=conversation.id, stream=True)
    created = next(iter(events)).response.id
    fail = functools.partial(slow_keeping.client.fail_all, lambda: EngineDeadError("It is dead"))
    slow_keeping.loop.call_soon_threadsafe(fail)
    *_, last = events
    assert (last.type, last.response.status, last.response.error.message) == ("response.failed", "failed", "It is dead")
    kept = client.responses.retrieve(created)
    assert (kept.status, kept.error.message) == ("failed", "It is dead")
    [item] = client.responses.input_items.list(created).data
    assert item.content[0].text == "What is this?"
    assert client.conversations.items.list(conversation.id).data == []


def test_unstorable_response_is_not_acknowledged(keeping, monkeypatch):
    def broken(*_):
        raise StorageError("The disk is full")

    monkeypatch.setattr(keeping.service.store.responses, "save", broken)
    assert refused(keeping, 503)["message"] == "The disk is full"
    *_, last = respond(keeping, stream=True)
    assert (last.type, last.response.error.message) == ("response.failed", "The disk is full")
    assert respond(keeping, store=False).output_text
    monkeypatch.undo()
    assert keeping.openai.responses.retrieve(respond(keeping).id).output_text
    assert keeping.service.bodies.used == 0


def test_only_images_requested_by_name_are_included(keeping):
    response = respond(keeping, shown(data_url("red")))
    include = ["message.input_image.image_url"]
    [item] = keeping.openai.responses.input_items.list(response.id, include=include)
    assert item.content[0].image_url == data_url("red")
    assert keeping.openai.responses.retrieve(response.id, include=include) == response
    with pytest.raises(openai.BadRequestError, match="include"):
        keeping.openai.responses.retrieve(response.id, include=["message.output_text.secrets"])


def test_without_history_only_answers_work(folder):
    with LiveServer(folder, server={"storage_url": "none"}) as server:
        response = respond(server)
        assert response.output_text
        assert response.to_dict()["store"] is False
        assert refused(server, 400, store=True)["param"] == "store"
        reference = {"type": "item_reference", "id": "msg_x"}
        for fields in ({"previous_response_id": response.id}, {"conversation": "conv_x"}, {"input": [reference]}):
            assert "--storage-url" in refused(server, 404, **fields)["message"]
        for path in (f"/responses/{response.id}", "/files", "/conversations/x"):
            reply = httpx.get(f"{server.url}/v1{path}")
            assert reply.status_code == 404
            assert "--storage-url" in reply.json()["error"]["message"]


def test_follow_ups_pay_only_for_what_is_new(tmp_path):
    """With the real engine: an image that was shown once is neither encoded nor prefilled again."""
    engine = {"engine": "real", "kv_cache_memory": "16MiB", "num_threads": 1}
    server_settings = {"storage_path": str(tmp_path / "history.db")}
    with LiveServer(resolve_model(BUILT_IN_MODEL), engine=engine, server=server_settings) as server:

        def turn(input: object, **fields):
            response = respond(server, input, temperature=0, max_output_tokens=8, **fields)
            return response, response.usage.input_tokens_details

        first, details = turn(shown(data_url("red"), "What colour is the circle?"))
        assert (details.cached_tokens, details.images_encoded) == (0, 1)
        second, details = turn("How many shapes are there?", previous_response_id=first.id)
        assert details.cached_tokens > first.usage.input_tokens - 16
        assert (details.images, details.images_encoded) == (1, 0)
        _, details = turn("Where is it?", previous_response_id=second.id)
        assert details.cached_tokens > second.usage.input_tokens - 16
        assert details.images_encoded == 0

        png = base64.b64decode(data_url("red").partition(",")[2])
        file = server.openai.files.create(file=("red.png", png), purpose="vision")
        content = [{"type": "input_image", "file_id": file.id}, {"type": "input_text", "text": "What do you see?"}]
        _, details = turn([{"role": "user", "content": content}])
        assert details.images_encoded == 0
        assert details.cached_tokens > 64
