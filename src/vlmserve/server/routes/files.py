"""``/v1/files``: images, videos and documents that requests name by id, and input files of batches."""

from __future__ import annotations

import uuid
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlmserve.errors import InvalidRequestError, InvalidVideoError
from vlmserve.media.files import media_type_of
from vlmserve.server.body import BodyShare
from vlmserve.server.errors import json_response
from vlmserve.server.forms import max_form_file, read_form
from vlmserve.server.history import needed_store, owner_of
from vlmserve.server.schema.base import validate
from vlmserve.server.schema.files import MAX_NAME, FileObject, FileRequest
from vlmserve.server.schema.paging import Deleted, FilesQuery, Query, list_page, read_query
from vlmserve.server.service import Service
from vlmserve.storage.batches import JSON_LINES
from vlmserve.storage.files import File


async def upload_file(request: Request) -> Response:
    """Store an image, a video, a document, or the requests of a batch."""
    service: Service = request.app.state.service
    store, owner = needed_store(service), owner_of(request)
    with service.bodies.share() as share:
        most = max_form_file(service.config.max_file_bytes, service.bodies.capacity)
        form = await read_form(request, most, share, service.config.body_timeout)
        data, fields = form.data, validate(FileRequest, form.fields)
        filename = form.filename.replace("\0", "")[-MAX_NAME:] or "file"

        def create(media_type: str) -> File:
            new_id = f"file-{uuid.uuid4().hex}"
            return store.files.create(owner, new_id, data, filename, fields.purpose, media_type, fields.lifetime)

        try:
            media_type = JSON_LINES
            if fields.purpose != "batch":
                media_type = await service.preparation.read_file(lambda: media_type_of(data, service.media))
            if media_type.startswith("video/") and not service.preparation.supports_videos:
                raise InvalidVideoError("this model takes no videos; upload images", param="file")
            return json_response(_shown(await store.run(create, media_type)))
        except InvalidRequestError as error:
            error.param = error.param or "file"
            raise


async def list_files(request: Request) -> Response:
    """List files, one page, newest first."""
    query, store = read_query(request, FilesQuery), needed_store(request.app.state.service)
    files, has_more = await store.run(store.files.list, owner_of(request), query.page, query.purpose)
    return json_response(list_page([_shown(file) for file in files], [file.id for file in files], has_more))


async def show_file(request: Request, file_id: str) -> Response:
    """Get a file's description without its content."""
    read_query(request, Query)
    store = needed_store(request.app.state.service)
    return json_response(_shown(await store.run(store.files.get, owner_of(request), file_id)))


async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file."""
    read_query(request, Query)
    store = needed_store(request.app.state.service)
    await store.run(store.files.delete, owner_of(request), file_id)
    return json_response(Deleted(file_id, "file"))


async def show_content(request: Request, file_id: str) -> Response:
    """Get the content of a file."""
    read_query(request, Query)
    service: Service = request.app.state.service
    store, owner, share = needed_store(service), owner_of(request), BodyShare(service.bodies)
    file = await store.run(store.files.get, owner, file_id)
    try:
        share.need(file.num_bytes)
        return _Content(file, await store.run(store.files.content, owner, file_id), share)
    except BaseException:
        share.give_back()
        raise


class _Content(Response):
    """The bytes of a file, counted in memory until they are sent."""

    def __init__(self, file: File, data: bytes, share: BodyShare) -> None:
        self._share = share
        headers = {
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
            "X-Content-Type-Options": "nosniff",
        }
        super().__init__(data, headers=headers, media_type=file.media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._share.give_back()


def _shown(file: File) -> FileObject:
    expires_at = None if file.expires_at is None else int(file.expires_at)
    return FileObject(file.id, file.num_bytes, int(file.created_at), expires_at, file.filename, file.purpose)
