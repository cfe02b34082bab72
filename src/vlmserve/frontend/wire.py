"""Asks a server from the command line."""

from __future__ import annotations

import base64
import mimetypes
import os
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmserve.errors import InvalidImageError, VLMServeError

if TYPE_CHECKING:
    import httpx

DOCUMENT_ENDINGS = (".pdf", ".tif", ".tiff")
"""Name endings of files with pages."""
_RARE_IMAGE_ENDINGS = (".heic", ".heif", ".avif", ".webp")
"""Image suffixes that some systems do not know."""
URL_SCHEMES = ("http://", "https://", "data:")
KEY_VARIABLE = "VLMSERVE_API_KEY"
REPLY_TIMEOUT = 600.0
"""Seconds of silence before giving up on a server; a request may wait in a long queue."""


def connect(url: str, model: str | None = None, connections: int | None = None) -> tuple[httpx.Client, str]:
    """Return a client, and `model` or the first model that the server lists.

    url: may end in ``/v1``. connections: maximum. Raises VLMServeError if the server is unreachable or rejects the key
    in VLMSERVE_API_KEY.
    """
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    asked = f"{base}/v1/models"
    key = os.environ.get(KEY_VARIABLE, "").partition(",")[0]
    client = httpx.Client(
        base_url=f"{base}/v1",
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(10.0, read=REPLY_TIMEOUT, pool=None),
        limits=httpx.Limits(max_connections=connections),
    )
    try:
        response = client.get("/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise VLMServeError(f"there is no server at {asked}: {connection_problem(error)}") from error
    if response.status_code != 200:
        raise VLMServeError(f"{asked}: {error_text(response)}")
    try:
        return client, model or str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise VLMServeError(f"{asked} lists no model; give --model, or the URL of an OpenAI-compatible API") from None


def medium_part(place: str, pages: str | None = None) -> dict[str, Any]:
    """The message part for a path or URL, chosen by its ending. pages: of a document.

    Raises InvalidImageError for a missing file.
    """
    chosen = {} if pages is None else {"pages": pages}
    if place.startswith(URL_SCHEMES):
        if _is_document(place):
            return {"type": "file", "file": {"file_url": place}, **chosen}
        return {"type": "image_url", "image_url": {"url": place}}
    path = Path(place)
    if not path.is_file():
        raise InvalidImageError(f"there is no image or document {place!r}; give the path of a file or a URL")
    return {"type": "document", "document": path, **chosen} if _is_document(place) else {"type": "image", "image": path}


def is_image_name(name: str) -> bool:
    """True if the suffix belongs to images that a model reads: not for SVG."""
    kind = mimetypes.guess_type(name)[0] or ""
    return (kind.startswith("image/") and kind != "image/svg+xml") or name.lower().endswith(_RARE_IMAGE_ENDINGS)


def _is_document(place: str) -> bool:
    if place.startswith("data:"):
        return place.startswith("data:application/pdf")
    name = place.partition("?")[0].partition("#")[0] if place.startswith(URL_SCHEMES) else place
    return name.lower().endswith(DOCUMENT_ENDINGS)


def wire_message(message: dict[str, Any]) -> dict[str, Any]:
    """Replace local images and documents by data URLs."""
    if isinstance(message["content"], str):
        return message
    return {**message, "content": [_wire_part(part) for part in message["content"]]}


def _wire_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] not in ("image", "document"):
        return part
    path: Path = part[part["type"]]
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    url = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": url}}
    chosen = {name: part[name] for name in ("pages",) if name in part}
    return {"type": "file", "file": {"filename": path.name, "file_data": url}, **chosen}


def error_text(response: Any) -> str:
    """Read OpenAI's form, or return another server's status line."""
    try:
        text = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = f"the server answered {response.status_code} {response.reason_phrase}"
    return f"{text}; set {KEY_VARIABLE}" if response.status_code == HTTPStatus.UNAUTHORIZED else text


def connection_problem(error: Exception) -> str:
    import httpx

    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return "write a URL like http://127.0.0.1:8000"
    text = str(error)
    return "connection refused; is it running?" if "refused" in text.lower() else text
