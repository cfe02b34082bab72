"""What requests over HTTP carry: images of this machine as data URLs, and errors of a server in words."""

from __future__ import annotations

import base64
import mimetypes
from pathlib import Path
from typing import Any


def wire_message(message: dict[str, Any]) -> dict[str, Any]:
    """The same message with images from files as data URLs, which is the only way they travel."""
    if isinstance(message["content"], str):
        return message
    return {**message, "content": [_wire_part(part) for part in message["content"]]}


def _wire_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    path: Path = part["image"]
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def error_text(response: Any) -> str:
    """The message of an error in OpenAI's form, or the status line of another server's."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code} {response.reason_phrase}"


def connection_problem(error: Exception) -> str:
    """In words, what kept a request from reaching a server."""
    import httpx

    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return "write a URL like http://127.0.0.1:8000"
    text = str(error)
    return "connection refused; is it running?" if "refused" in text.lower() else text
