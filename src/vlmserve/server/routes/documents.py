"""``POST /v1/documents/previews``: small images of a document's pages."""

from __future__ import annotations

import base64
import functools

from starlette.requests import Request
from starlette.responses import Response

from vlmserve.media.previews import preview_pages
from vlmserve.server.errors import json_response
from vlmserve.server.forms import max_form_file, read_form
from vlmserve.server.schema.base import validate
from vlmserve.server.schema.documents import DocumentPreview, PagePreview, PreviewRequest
from vlmserve.server.service import Service


async def preview_document(request: Request) -> Response:
    """Render small images of a document's pages."""
    service: Service = request.app.state.service
    service.check_serving()
    with service.bodies.share() as share:
        most = max_form_file(service.media.max_document_bytes, service.bodies.capacity)
        form = await read_form(request, most, share, service.config.body_timeout)
        wanted = validate(PreviewRequest, form.fields)
        work = functools.partial(
            preview_pages, form.data, wanted.pages, service.media, service.preparer.media.image_cache.decoding
        )
        num_pages, previews = await service.preparation.render(work)
    shown = [
        PagePreview(one.number, one.width, one.height, f"data:image/jpeg;base64,{base64.b64encode(one.jpeg).decode()}")
        for one in previews
    ]
    return json_response(DocumentPreview(num_pages, shown))
