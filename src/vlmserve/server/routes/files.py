"""``/v1/files``: images, videos and documents that requests name by id, and input files of batches."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from urllib.parse import quote

from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlmserve.errors import InvalidRequestError, InvalidVideoError
from vlmserve.media.files import media_type_of
from vlmserve.server.body import BodyShare, content_type, read_body, wrong_content_type
from vlmserve.server.errors import json_response
from vlmserve.server.history import needed_store, owner_of
from vlmserve.server.schema.base import validate
from vlmserve.server.schema.files import MAX_NAME, FileObject, FileRequest
from vlmserve.server.schema.paging import Deleted, FilesQuery, Query, list_page, read_query
from vlmserve.server.service import Service
from vlmserve.storage.batches import JSON_LINES
from vlmserve.storage.files import File

_FORM_BYTES = 64 * 1024
"""Maximum bytes of a form without its file."""
_CHUNK_BYTES = 256 * 1024
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})
_COPIES = 3
"""Copies of a file in memory while its form is parsed."""


async def upload_file(request: Request) -> Response:
    """Store an image, a video, a document, or the requests of a batch."""
    service: Service = request.app.state.service
    store, owner = needed_store(service), owner_of(request)
    with service.bodies.share() as share:
        most = min(service.config.max_file_bytes, service.bodies.capacity // _COPIES - _FORM_BYTES)
        data, filename, fields = await _read_form(request, most, share)

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


class _InMemory(MultiPartParser):
    """Parses in memory: the body is there already, and bounded."""

    def __init__(self, request: Request, body: bytearray) -> None:
        self.spool_max_size = len(body) + 1
        super().__init__(request.headers, _chunks(body), max_files=1, max_fields=8, max_part_size=_FORM_BYTES)


async def _chunks(body: bytearray) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), _CHUNK_BYTES):
        yield bytes(body[start : start + _CHUNK_BYTES])
        await asyncio.sleep(0)  # let others run


async def _read_form(request: Request, max_bytes: int, share: BodyShare) -> tuple[bytes, str, FileRequest]:
    """A form's file, its name and the other fields. Raises InvalidRequestError, and the errors of `read_body`."""
    kind = content_type(request)
    if kind != "multipart/form-data":
        raise wrong_content_type("multipart/form-data", kind)
    _check_charset(request)
    service: Service = request.app.state.service
    body = await read_body(request, max_bytes + _FORM_BYTES, share, service.config.body_timeout)
    share.need((_COPIES - 1) * len(body))
    try:
        form = await _InMemory(request, body).parse()
    except MultiPartException as error:
        raise InvalidRequestError(f"The form cannot be read: {error.message}") from None
    body.clear()
    fields = {name: value for name, value in form.multi_items() if name != "file"}
    if any(isinstance(value, UploadFile) for value in fields.values()):
        raise InvalidRequestError("The file should be in the field file", param="file")
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidRequestError("file: Field is missing, or has no filename", param="file")
    data = await file.read()
    await form.close()
    if len(data) > max_bytes:
        raise InvalidRequestError(f"The file has {len(data):,} bytes; at most {max_bytes:,} are allowed", param="file")
    filename = (file.filename or "").replace("\0", "")[-MAX_NAME:] or "file"
    return data, filename, validate(FileRequest, fields)


def _check_charset(request: Request) -> None:
    """Raise InvalidRequestError unless names are UTF-8: some of Python's codecs are no encodings."""
    _, parameters = parse_options_header(request.headers.get("content-type", ""))
    charset = parameters.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in _CHARSETS:
        raise InvalidRequestError(f"The form's charset should be utf-8, not {charset!r:.100}")


def _shown(file: File) -> FileObject:
    expires_at = None if file.expires_at is None else int(file.expires_at)
    return FileObject(file.id, file.num_bytes, int(file.created_at), expires_at, file.filename, file.purpose)
