"""The pages that ``web/`` builds: chat and live view at ``/``, API reference at ``/docs``."""

from __future__ import annotations

import functools
import gzip
import hashlib
import mimetypes
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

REFERENCE = "/docs"
ASSETS = ("/assets/", REFERENCE + "/")
"""Prefixes of paths without a key: their files are the same on every server."""

_POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'self'",
    )
)
"""Loads nothing from elsewhere, and runs no inline script or style, whatever an answer contains."""
_YEAR = 365 * 86400
mimetypes.add_type("font/woff2", ".woff2")  # not every system knows it
_COMPRESSED = ("text/", "application/json", "image/svg+xml")


def page_routes() -> list[Route]:
    return [
        Route("/", _show_document),
        Route("/assets/{name}", _show_asset),
        Route(REFERENCE, _show_reference),
        Route(REFERENCE + "/{name}", _show_reference_file),
    ]


async def _show_document(request: Request) -> Response:
    return _checked(request, "text/html", "index.html")


async def _show_reference(request: Request) -> Response:
    return _checked(request, "text/html", "reference", "index.html")


async def _show_reference_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _names("reference"):
        raise HTTPException(404)
    return _checked(request, mimetypes.guess_type(name)[0] or "text/plain", "reference", name)


def _checked(request: Request, kind: str, *parts: str) -> Response:
    """Respond with a built file that browsers revalidate."""
    content, packed = _read(*parts)
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": _POLICY,
        "ETag": tag,
        "Referrer-Policy": "same-origin",
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return _response(request, content, packed, kind, headers)


async def _show_asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _names("assets"):
        raise HTTPException(404)
    content, packed = _read("assets", name)
    # the name holds a digest
    headers = {"Cache-Control": f"public, max-age={_YEAR}, immutable"}
    return _response(request, content, packed, mimetypes.guess_type(name)[0] or "application/octet-stream", headers)


def _response(request: Request, content: bytes, packed: bytes, kind: str, headers: dict[str, str]) -> Response:
    headers = {**headers, "X-Content-Type-Options": "nosniff", "Vary": "Accept-Encoding"}
    if kind.startswith(_COMPRESSED) and "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["Content-Encoding"] = packed, "gzip"
    return Response(content, headers=headers, media_type=kind)


def _built() -> Traversable:
    return resources.files(__name__) / "built"


@functools.cache
def _names(folder: str) -> frozenset[str]:
    return frozenset(entry.name for entry in (_built() / folder).iterdir())


@functools.cache
def _read(*parts: str) -> tuple[bytes, bytes]:
    content = _built().joinpath(*parts).read_bytes()
    return content, gzip.compress(content, mtime=0)
