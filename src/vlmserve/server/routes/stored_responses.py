"""``/v1/responses/{id}``: stored responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import InvalidRequestError
from vlmserve.server.errors import json_response
from vlmserve.server.history import needed_store, owner_of
from vlmserve.server.schema.paging import Deleted, ItemsQuery, Query, ResponseQuery, list_page, read_query

PAGE_BYTES = 16 * 1024**2
"""Maximum bytes of the items on a page, with their images."""


async def show_response(request: Request, response_id: str) -> Response:
    """Get a stored response."""
    read_query(request, ResponseQuery)
    store = needed_store(request.app.state.service)
    return json_response(await store.run(store.responses.get, owner_of(request), response_id))


async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a response."""
    read_query(request, Query)
    store = needed_store(request.app.state.service)
    await store.run(store.responses.delete, owner_of(request), response_id)
    return json_response(Deleted(response_id, "response"))


async def list_input_items(request: Request, response_id: str) -> Response:
    """List the input items of a response's request."""
    query = read_query(request, ItemsQuery)
    store = needed_store(request.app.state.service)
    items, has_more = await store.run(store.responses.inputs, owner_of(request), response_id, query.page, PAGE_BYTES)
    return json_response(list_page(items, [item["id"] for item in items], has_more))


async def cancel_response(request: Request, response_id: str) -> Response:
    """Fail: no response runs in the background."""
    store = needed_store(request.app.state.service)
    await store.run(store.responses.get, owner_of(request), response_id)
    raise InvalidRequestError(
        "Only responses that run in the background can be cancelled, and none do here; to end one that is being "
        "written, close its connection"
    )
