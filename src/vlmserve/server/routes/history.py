"""The operations on stored data."""

from __future__ import annotations

from typing import Any

from vlmserve.server.openapi import Operation
from vlmserve.server.routes import batches, conversations, files, responses, stored_responses
from vlmserve.server.schema.batches import BatchesQuery, BatchObject, BatchRequest
from vlmserve.server.schema.conversations import (
    ConversationObject,
    ConversationRequest,
    ConversationUpdate,
    ItemsRequest,
)
from vlmserve.server.schema.files import FileObject, Purpose
from vlmserve.server.schema.paging import Deleted, FilesQuery, ItemQuery, ItemsQuery, ListPage, ResponseQuery
from vlmserve.server.schema.responses import ResponseObject, ResponsesRequest

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

HISTORY_OPERATIONS = (
    Operation(
        "POST", "/v1/responses", responses.create_response, ResponsesRequest, answer=ResponseObject, streams=True
    ),
    Operation(
        "GET", "/v1/responses/{response_id}", stored_responses.show_response, query=ResponseQuery, answer=ResponseObject
    ),
    Operation("DELETE", "/v1/responses/{response_id}", stored_responses.delete_response, answer=Deleted),
    Operation(
        "GET",
        "/v1/responses/{response_id}/input_items",
        stored_responses.list_input_items,
        query=ItemsQuery,
        answer=ListPage,
    ),
    Operation("POST", "/v1/responses/{response_id}/cancel", stored_responses.cancel_response),
    Operation(
        "POST", "/v1/conversations", conversations.create_conversation, ConversationRequest, answer=ConversationObject
    ),
    Operation("GET", _CONVERSATION, conversations.show_conversation, answer=ConversationObject),
    Operation("POST", _CONVERSATION, conversations.update_conversation, ConversationUpdate, answer=ConversationObject),
    Operation("DELETE", _CONVERSATION, conversations.delete_conversation, answer=Deleted),
    Operation(
        "GET", f"{_CONVERSATION}/items", conversations.list_conversation_items, query=ItemsQuery, answer=ListPage
    ),
    Operation("POST", f"{_CONVERSATION}/items", conversations.add_conversation_items, ItemsRequest, answer=ListPage),
    Operation(
        "GET",
        f"{_CONVERSATION}/items/{{item_id}}",
        conversations.show_conversation_item,
        query=ItemQuery,
        answer=dict[str, Any],
    ),
    Operation(
        "DELETE",
        f"{_CONVERSATION}/items/{{item_id}}",
        conversations.delete_conversation_item,
        answer=ConversationObject,
    ),
    Operation("POST", "/v1/files", files.upload_file, _UPLOAD, answer=FileObject),
    Operation("GET", "/v1/files", files.list_files, query=FilesQuery, answer=ListPage),
    Operation("GET", "/v1/files/{file_id}", files.show_file, answer=FileObject),
    Operation("DELETE", "/v1/files/{file_id}", files.delete_file, answer=Deleted),
    Operation("GET", "/v1/files/{file_id}/content", files.show_content, answer="*/*"),
    Operation("POST", "/v1/batches", batches.create_batch, BatchRequest, answer=BatchObject),
    Operation("GET", "/v1/batches", batches.list_batches, query=BatchesQuery, answer=ListPage),
    Operation("GET", "/v1/batches/{batch_id}", batches.show_batch, answer=BatchObject),
    Operation("POST", "/v1/batches/{batch_id}/cancel", batches.cancel_batch, answer=BatchObject),
)
