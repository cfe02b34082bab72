"""The OpenAPI document of the server's operations: https://spec.openapis.org/oas/v3.1.0"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vlmserve.server.schema.errors import ErrorAnswer

Endpoint = Callable[..., Awaitable[Response]]
"""Takes a request and the named parts of its path."""
Schema = dict[str, Any]

_COMPONENTS = "#/components/schemas/"


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    endpoint: Endpoint
    body: type[BaseModel] | Schema | None = None
    """A JSON body, or the schema of a form."""
    query: type[BaseModel] | None = None
    answer: Any = None
    """The type of a JSON response, or the media type of another."""
    streams: bool = False
    """It may answer with server-sent events."""
    errors: Any = ErrorAnswer
    """The type of its errors."""


def routes(operations: Iterable[Operation]) -> list[Route]:
    return [Route(one.path, _called(one.endpoint), methods=[one.method]) for one in operations]


def _called(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    if len(inspect.signature(endpoint).parameters) == 1:
        return endpoint

    async def with_path(request: Request) -> Response:
        return await endpoint(request, **request.path_params)

    return with_path


def document(version: str, operations: Iterable[Operation], max_logprobs: int | None = None) -> Schema:
    """Make the OpenAPI document. max_logprobs: the engine's limit, if known."""
    components: dict[str, Schema] = {}
    paths: dict[str, Schema] = {}
    for one in operations:
        place = paths.setdefault(re.sub(r":path}", "}", one.path), {})
        place[one.method.lower()] = described = _described(one, components)
        if max_logprobs is not None:
            for content in described.get("requestBody", {"content": {}})["content"].values():
                _limit_logprobs(content["schema"], max_logprobs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "vlmserve", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _described(one: Operation, components: dict[str, Schema]) -> Schema:
    content: Schema = {}
    if isinstance(one.answer, str):
        content[one.answer] = {"schema": {}}
    elif one.answer is not None:
        content["application/json"] = {"schema": _answer_schema(one.answer, components)}
    if one.streams:
        content["text/event-stream"] = {"schema": {"description": "Events with the same in pieces."}}
    error = {"application/json": {"schema": _answer_schema(one.errors, components)}}
    described: Schema = {
        "operationId": one.endpoint.__name__,
        "summary": (inspect.getdoc(one.endpoint) or "").split("\n")[0],
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "The error.", "content": error},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)(?::path)?}", one.path)
    ]
    if one.query is not None:
        parameters += [
            {"name": "include[]" if name == "include" else name, "in": "query", "schema": field}
            for name, field in one.query.model_json_schema().get("properties", {}).items()
        ]
    if parameters:
        described["parameters"] = parameters
    if one.body is not None:
        described["requestBody"] = {"content": _body_content(one.body, components), "required": True}
    return described


def _body_content(body: type[BaseModel] | Schema, components: dict[str, Schema]) -> Schema:
    if isinstance(body, Mapping):
        return {"multipart/form-data": {"schema": body}}
    schema = body.model_json_schema(ref_template=_COMPONENTS + "{model}")
    components.update(schema.pop("$defs", {}))
    return {"application/json": {"schema": schema}}


def _limit_logprobs(body: Schema, most: int) -> None:
    for name, field in body.get("properties", {}).items():
        if name.endswith("logprobs"):
            for choice in field.get("anyOf", [field]):
                if choice.get("type") == "integer":
                    choice["maximum"] = most


def _answer_schema(kind: Any, components: dict[str, Schema]) -> Schema:
    [schema], own = msgspec.json.schema_components([kind], ref_template=_COMPONENTS + "{name}")
    components.update(own)
    return schema
