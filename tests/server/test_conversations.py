"""/v1/conversations through the real openai client."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.server.live import IN_BOTH_KINDS
from tests.server.test_chat import data_url


def user(text: str) -> dict:
    return {"type": "message", "role": "user", "content": text}


@IN_BOTH_KINDS
def test_a_conversation_is_made_found_changed_and_deleted(keeping):
    conversations = keeping.openai.conversations
    made = conversations.create(metadata={"topic": "shapes"})
    assert made.id.startswith("conv_")
    assert made.object == "conversation"
    assert conversations.retrieve(made.id) == made
    changed = conversations.update(made.id, metadata={"topic": "colours"})
    assert changed.metadata == conversations.retrieve(made.id).metadata == {"topic": "colours"}
    assert changed.created_at == made.created_at
    deleted = conversations.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "conversation.deleted")
    for method in (conversations.retrieve, conversations.delete, conversations.items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            method(made.id)
        assert caught.value.body["message"] == f"Conversation with id '{made.id}' not found"


@IN_BOTH_KINDS
def test_items_are_added_listed_found_and_deleted(keeping):
    conversations = keeping.openai.conversations
    conversation = conversations.create(items=[user("one")])
    image = [{"type": "input_image", "image_url": data_url("red")}, {"type": "input_text", "text": "two"}]
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "three"}]}
    added = conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": image}, answer]
    )
    assert [item.role for item in added.data] == ["user", "assistant"]
    listed = conversations.items.list(conversation.id, order="asc").data
    assert [item.content[-1].text for item in listed] == ["one", "two", "three"]
    assert listed[1].content[0].image_url == data_url("red")
    assert listed[1:] == added.data
    assert conversations.items.retrieve(listed[1].id, conversation_id=conversation.id) == listed[1]
    left = conversations.items.delete(listed[1].id, conversation_id=conversation.id)
    assert left.id == conversation.id
    assert [item.id for item in conversations.items.list(conversation.id)] == [listed[2].id, listed[0].id]
    for method in (conversations.items.retrieve, conversations.items.delete):
        with pytest.raises(openai.NotFoundError, match=listed[1].id):
            method(listed[1].id, conversation_id=conversation.id)


@IN_BOTH_KINDS
def test_any_text_comes_back_as_it_was(keeping):
    said = 'nul \0, quotes \' " and \\, { "$blob": 1 }, \U0001f600, data:image/png;base64,QUJD'
    conversation = keeping.openai.conversations.create(items=[user(said), user("data:image/png;base64,QUJD")])
    listed = keeping.openai.conversations.items.list(conversation.id, order="asc").data
    assert [item.content[0].text for item in listed] == [said, "data:image/png;base64,QUJD"]
    changed = keeping.openai.conversations.update(conversation.id, metadata={"a\0": said})
    assert keeping.openai.conversations.retrieve(conversation.id) == changed


@IN_BOTH_KINDS
def test_the_client_reads_page_after_page(keeping):
    conversations = keeping.openai.conversations
    conversation = conversations.create()
    for start in range(0, 40, 20):
        conversations.items.create(conversation.id, items=[user(f"{start + number}") for number in range(20)])
    items = list(conversations.items.list(conversation.id, limit=7, order="asc"))
    assert [item.content[0].text for item in items] == [str(number) for number in range(40)]


def test_wrong_requests_are_refused_by_name(keeping):
    def post(path: str, body: object) -> tuple[int, str | None]:
        response = httpx.post(f"{keeping.url}/v1/conversations{path}", json=body, timeout=30)
        return response.status_code, response.json()["error"]["param"]

    conversation = keeping.openai.conversations.create()
    assert post("", {"meta_data": {}}) == (400, "meta_data")
    assert post("", {"items": [user("x")] * 21}) == (400, "items")
    assert post("", {"items": [{"role": "user"}]}) == (400, "items[0].content")
    assert post("", {"metadata": {"a": "x" * 513}}) == (400, "metadata.a")
    assert post(f"/{conversation.id}/items", {"items": []}) == (400, "items")
    assert post("/conv_none/items", {"items": [user("x")]}) == (404, "conversation")
    assert post("/%00", {"metadata": {}}) == (404, "conversation")
    bad = httpx.get(f"{keeping.url}/v1/conversations/{conversation.id}/items?after=msg_none")
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "after")
    assert httpx.get(f"{keeping.url}/v1/conversations/{conversation.id}?before=x").status_code == 400


@IN_BOTH_KINDS
def test_image_without_room_is_rejected_and_others_fit(keeping):
    huge = "data:image/png;base64," + "A" * 1_600_000
    with pytest.raises(openai.APIStatusError) as caught:
        keeping.openai.conversations.create(
            items=[{"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": huge}]}]
        )
    assert (caught.value.status_code, caught.value.body["code"]) == (507, "storage_full")
    assert keeping.openai.conversations.create(items=[user("hello")]).id
    assert keeping.service.bodies.used == 0
