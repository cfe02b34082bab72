"""The addresses of everything that is kept, and what OpenAPI says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import Response

from vlmserve.server.routes import conversations, files, responses, stored_responses
from vlmserve.server.schema.conversations import ConversationRequest, ConversationUpdate, ItemsRequest
from vlmserve.server.schema.files import Purpose
from vlmserve.server.schema.paging import FilesQuery, ItemQuery, ItemsQuery, Query, ResponseQuery
from vlmserve.server.schema.responses import ResponsesRequest

_REF = "#/components/schemas/{model}"
_CONVERSATION = "/v1/conversations/{conversation_id}"
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(Purpose.__args__)},  # type: ignore[attr-defined]
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
}

_Kind = type[BaseModel] | None
_ROUTES: tuple[tuple[str, str, Callable[..., Any], _Kind], ...] = (
    ("POST", "/v1/responses", responses.create_response, ResponsesRequest),
    ("GET", "/v1/responses/{response_id}", stored_responses.show_response, ResponseQuery),
    ("DELETE", "/v1/responses/{response_id}", stored_responses.delete_response, None),
    ("GET", "/v1/responses/{response_id}/input_items", stored_responses.list_input_items, ItemsQuery),
    ("POST", "/v1/responses/{response_id}/cancel", stored_responses.cancel_response, None),
    ("POST", "/v1/conversations", conversations.create_conversation, ConversationRequest),
    ("GET", _CONVERSATION, conversations.show_conversation, None),
    ("POST", _CONVERSATION, conversations.update_conversation, ConversationUpdate),
    ("DELETE", _CONVERSATION, conversations.delete_conversation, None),
    ("GET", f"{_CONVERSATION}/items", conversations.list_conversation_items, ItemsQuery),
    ("POST", f"{_CONVERSATION}/items", conversations.add_conversation_items, ItemsRequest),
    ("GET", f"{_CONVERSATION}/items/{{item_id}}", conversations.show_conversation_item, ItemQuery),
    ("DELETE", f"{_CONVERSATION}/items/{{item_id}}", conversations.delete_conversation_item, None),
    ("POST", "/v1/files", files.upload_file, None),
    ("GET", "/v1/files", files.list_files, FilesQuery),
    ("GET", "/v1/files/{file_id}", files.show_file, None),
    ("DELETE", "/v1/files/{file_id}", files.delete_file, None),
    ("GET", "/v1/files/{file_id}/content", files.show_content, None),
)


def add_history_routes(app: FastAPI) -> dict[str, Any]:
    """Add the routes. Returns the schemas that their descriptions refer to."""
    parts: dict[str, Any] = {}
    for method, path, endpoint, kind in _ROUTES:
        extra: dict[str, Any] = {}
        if endpoint is files.upload_file:
            extra = {"requestBody": {"content": {"multipart/form-data": {"schema": _UPLOAD}}, "required": True}}
        elif kind is not None:
            schema = kind.model_json_schema(ref_template=_REF)
            parts |= schema.pop("$defs", {})
            extra = _in_query(schema) if issubclass(kind, Query) else _in_body(schema)
        app.add_api_route(
            path, endpoint, methods=[method], response_class=Response, response_model=None, openapi_extra=extra
        )
    return parts


def _in_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def _in_query(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "parameters": [
            {"name": "include[]" if name == "include" else name, "in": "query", "schema": field}
            for name, field in schema["properties"].items()
        ]
    }
