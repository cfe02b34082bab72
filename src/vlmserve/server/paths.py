"""Normalizes paths, and suggests known paths for unknown ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("/{2,}")
_SHOWN = 60
"""Maximum characters of an unknown path in an error."""
_SIMILARITY = 0.85
"""Minimum `difflib` ratio between an unknown path and a suggested one."""
_API = "/v1"
OLLAMA = "/api/"
"""Prefix of Ollama's paths."""


class OnePath:
    """Merges repeated slashes and drops a trailing slash."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.endswith("/") or "//" in path:
            scope["path"] = _SLASHES.sub("/", path).rstrip("/") or "/"
        await self._app(scope, receive, send)


def methods_at(path: str, routes: Iterable[BaseRoute]) -> list[str]:
    found: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.path_regex.match(path):
            found |= route.methods or set()
    return sorted(found)


def not_found_message(path: str, routes: Sequence[BaseRoute]) -> str:
    shown = path if len(path) <= _SHOWN else f"{path[:_SHOWN]}…"
    if path.startswith(OLLAMA):
        there = [route.path for route in routes if isinstance(route, Route) and route.path.startswith(OLLAMA)]
        have = f"has {', '.join(there)}" if there else "does not have Ollama's API"
        return f"There is no {shown} here: this server {have}; OpenAI's API is at {_API}"
    known = [route for route in routes if isinstance(route, Route)]
    if (prefixed := _with_right_prefix(path, known)) is not None:
        return f"There is no {shown} here; use {prefixed}"
    close = difflib.get_close_matches(path, [route.path for route in known if "{" not in route.path], 1, _SIMILARITY)
    if close:
        return f"There is no {shown} here; did you mean {close[0]}?"
    return f"There is no {shown} here; /openapi.json lists all paths"


def _with_right_prefix(path: str, routes: Sequence[Route]) -> str | None:
    """`path` with ``/v1`` added, or without a prefix such as ``/v1`` or ``/openai``, if known."""
    starts = [match.start() for match in re.finditer("/", path)][1:]
    for candidate in (_API + path, *(path[start:] for start in starts), *(_API + path[start:] for start in starts)):
        if any(route.path_regex.match(candidate) for route in routes):
            return candidate if len(candidate) <= _SHOWN else f"{candidate[:_SHOWN]}…"
    return None
