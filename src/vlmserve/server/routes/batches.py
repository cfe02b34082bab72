"""``/v1/batches``: files of requests to answer in the background."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import UnavailableError
from vlmserve.server.errors import json_response
from vlmserve.server.guard import TENANT
from vlmserve.server.history import needed_store, owner_of
from vlmserve.server.routes.reading import read_parsed
from vlmserve.server.schema.batches import BatchesQuery, BatchObject, BatchRequest
from vlmserve.server.schema.paging import Query, list_page, read_query
from vlmserve.server.service import Service
from vlmserve.storage.batches import Batch


async def create_batch(request: Request) -> Response:
    """Answer the requests of a file with low priority."""
    service: Service = request.app.state.service
    store, owner = needed_store(service), owner_of(request)
    if not service.config.max_batches:
        raise UnavailableError("No batches run here: --max-batches is 0, or the worker loads models on demand")
    tenant: bytes = request.scope.get(TENANT, b"")
    with service.bodies.share() as share:
        body = await read_parsed(request, BatchRequest, share)

    def create() -> Batch:
        lifetime = body.output_expires_after
        return store.batches.create(
            owner,
            f"batch_{uuid.uuid4().hex}",
            tenant=tenant.hex(),
            endpoint=body.endpoint,
            window=body.completion_window,
            seconds=body.seconds,
            input_file_id=body.input_file_id,
            output_lifetime=None if lifetime is None else lifetime.seconds,
            metadata=body.metadata,
            most=service.config.max_batches,
        )

    batch = await store.run(create)
    service.batch_news.set()
    return json_response(BatchObject.of(batch))


async def list_batches(request: Request) -> Response:
    """List batches, one page, newest first."""
    query, store = read_query(request, BatchesQuery), needed_store(request.app.state.service)
    batches, has_more = await store.run(store.batches.list, owner_of(request), query.page)
    shown = [BatchObject.of(batch) for batch in batches]
    return json_response(list_page(shown, [batch.id for batch in batches], has_more))


async def show_batch(request: Request, batch_id: str) -> Response:
    """Get a batch with its progress."""
    read_query(request, Query)
    store = needed_store(request.app.state.service)
    return json_response(BatchObject.of(await store.run(store.batches.get, owner_of(request), batch_id)))


async def cancel_batch(request: Request, batch_id: str) -> Response:
    """End a batch and keep its results."""
    read_query(request, Query)
    service: Service = request.app.state.service
    store = needed_store(service)
    batch = await store.run(store.batches.cancel, owner_of(request), batch_id)
    service.batch_news.set()
    return json_response(BatchObject.of(batch))
