"""OpenAI's ``/v1/batches``: https://platform.openai.com/docs/api-reference/batch"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from vlmserve.errors import InvalidRequestError
from vlmserve.server.schema.base import RequestModel
from vlmserve.server.schema.items import Metadata
from vlmserve.server.schema.paging import Query
from vlmserve.storage.batches import Batch
from vlmserve.storage.items import Page

MAX_CUSTOM_ID = 512
"""Maximum characters of a line's id."""

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
"""Paths that lines of a batch may call."""
_UNITS = {"m": 60, "h": 3600, "d": 86400}


class LineForm(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an input file, without its body."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID)]
    method: Literal["POST"]
    url: Endpoint


class BatchLine(LineForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line with the body of a request to `url`."""

    body: dict[str, Any]


_DECODER = msgspec.json.Decoder(BatchLine)


def read_line(data: bytes | bytearray | memoryview) -> BatchLine:
    """Parse a line. Raises InvalidRequestError."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"{error}; a line is an object with custom_id, method (POST), url (like /v1/chat/completions) and body"
        ) from None


class OutputLifetime(RequestModel):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class BatchRequest(RequestModel):
    """The body of ``POST /v1/batches``."""

    input_file_id: str = Field(description="A file that was uploaded with the purpose batch.")
    endpoint: Endpoint
    completion_window: str = Field(
        "24h",
        pattern=r"^([1-9]\d{0,3}[mh]|([1-9]|[12]\d|30)d)$",
        description="Time limit in minutes, hours or days, like 24h.",
    )
    metadata: Metadata = Field(default_factory=dict)
    output_expires_after: OutputLifetime | None = None

    @property
    def seconds(self) -> float:
        return int(self.completion_window[:-1]) * _UNITS[self.completion_window[-1]]


class BatchesQuery(Query):
    after: str | None = Field(None, description="The id of the previous page's last batch.")
    limit: int = Field(20, ge=1, le=100)

    @property
    def page(self) -> Page:
        return Page(self.after, self.limit)


class RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class BatchError(msgspec.Struct):
    """An error in an input file. line: number in the file, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: str = "list"


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class ReasoningTokens(msgspec.Struct, frozen=True):
    """Details of output tokens; batches do not count reasoning separately."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Tokens of all answered requests."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    total_tokens: int
    output_tokens_details: ReasoningTokens = ReasoningTokens()


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. Times are whole seconds since 1970."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str]

    @classmethod
    def of(cls, batch: Batch) -> BatchObject:
        errors = msgspec.convert(batch.errors, list[BatchError])
        ended_at = {batch.status: _whole(batch.ended_at)}
        return cls(
            id=batch.id,
            endpoint=batch.endpoint,
            model=batch.model,
            errors=BatchErrors(errors) if errors else None,
            input_file_id=batch.input_file_id,
            completion_window=batch.window,
            status=batch.status,
            output_file_id=batch.output_file_id,
            error_file_id=batch.error_file_id,
            created_at=int(batch.created_at),
            in_progress_at=_whole(batch.in_progress_at),
            expires_at=int(batch.expires_at),
            finalizing_at=_whole(batch.finalizing_at),
            completed_at=ended_at.get("completed"),
            failed_at=ended_at.get("failed"),
            expired_at=ended_at.get("expired"),
            cancelling_at=_whole(batch.cancelling_at),
            cancelled_at=ended_at.get("cancelled"),
            request_counts=RequestCounts(batch.num_rows, batch.num_completed, batch.num_failed),
            usage=BatchUsage(
                batch.prompt_tokens,
                CachedTokens(batch.cached_tokens),
                batch.completion_tokens,
                batch.prompt_tokens + batch.completion_tokens,
            ),
            metadata=batch.metadata,
        )


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
