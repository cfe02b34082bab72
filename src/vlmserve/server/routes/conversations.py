"""``/v1/conversations``: lists of items that clients and responses add to."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from vlmserve.server.errors import json_response
from vlmserve.server.history import needed_store, owner_of
from vlmserve.server.routes.reading import read_parsed
from vlmserve.server.routes.stored_responses import PAGE_BYTES
from vlmserve.server.schema.base import RequestModel
from vlmserve.server.schema.conversations import (
    ConversationObject,
    ConversationRequest,
    ConversationUpdate,
    ItemsRequest,
)
from vlmserve.server.schema.items import InputItem
from vlmserve.server.schema.paging import Deleted, ItemQuery, ItemsQuery, Query, list_page, read_query
from vlmserve.server.service import Service
from vlmserve.storage.conversations import Conversation
from vlmserve.storage.items import PackedItem

Body = TypeVar("Body", bound=RequestModel)
Result = TypeVar("Result")


async def create_conversation(request: Request) -> Response:
    """Create a conversation."""
    store = needed_store(request.app.state.service)
    owner, new_id = owner_of(request), f"conv_{uuid.uuid4().hex}"

    def create(body: ConversationRequest) -> Conversation:
        return store.conversations.create(owner, new_id, body.metadata, _packed(body.items))

    return json_response(_shown(await _with_body(request, ConversationRequest, create)))


async def show_conversation(request: Request, conversation_id: str) -> Response:
    """Get a conversation without its items."""
    read_query(request, Query)
    store = needed_store(request.app.state.service)
    return json_response(_shown(await store.run(store.conversations.get, owner_of(request), conversation_id)))


async def update_conversation(request: Request, conversation_id: str) -> Response:
    """Replace a conversation's metadata."""
    store, owner = needed_store(request.app.state.service), owner_of(request)

    def update(body: ConversationUpdate) -> Conversation:
        return store.conversations.update(owner, conversation_id, body.metadata)

    return json_response(_shown(await _with_body(request, ConversationUpdate, update)))


async def delete_conversation(request: Request, conversation_id: str) -> Response:
    """Delete a conversation, its items and its responses."""
    read_query(request, Query)
    store = needed_store(request.app.state.service)
    await store.run(store.conversations.delete, owner_of(request), conversation_id)
    return json_response(Deleted(conversation_id, "conversation.deleted"))


async def list_conversation_items(request: Request, conversation_id: str) -> Response:
    """List a conversation's items, one page."""
    query, store = read_query(request, ItemsQuery), needed_store(request.app.state.service)
    items, has_more = await store.run(
        store.conversations.items, owner_of(request), conversation_id, query.page, PAGE_BYTES
    )
    return json_response(list_page(items, [item["id"] for item in items], has_more))


async def add_conversation_items(request: Request, conversation_id: str) -> Response:
    """Append items to a conversation."""
    read_query(request, ItemQuery)
    store, owner = needed_store(request.app.state.service), owner_of(request)
    added: list[dict[str, Any]] = []

    def add(body: ItemsRequest) -> None:
        added.extend(item.stored() for item in body.items)
        store.conversations.add(owner, conversation_id, [PackedItem.of(item) for item in added])

    await _with_body(request, ItemsRequest, add)
    return json_response(list_page(added, [item["id"] for item in added], False))


async def show_conversation_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Get one item of a conversation."""
    read_query(request, ItemQuery)
    store = needed_store(request.app.state.service)
    return json_response(await store.run(store.conversations.item, owner_of(request), conversation_id, item_id))


async def delete_conversation_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Delete one item of a conversation."""
    read_query(request, Query)
    store = needed_store(request.app.state.service)
    return json_response(
        _shown(await store.run(store.conversations.delete_item, owner_of(request), conversation_id, item_id))
    )


async def _with_body(request: Request, kind: type[Body], work: Callable[[Body], Result]) -> Result:
    service: Service = request.app.state.service
    with service.bodies.share() as share:
        body = await read_parsed(request, kind, share)
        return await needed_store(service).run(work, body)


def _packed(items: Sequence[InputItem]) -> list[PackedItem]:
    return [PackedItem.of(item.stored()) for item in items]


def _shown(conversation: Conversation) -> ConversationObject:
    return ConversationObject(conversation.id, int(conversation.created_at), conversation.metadata)
