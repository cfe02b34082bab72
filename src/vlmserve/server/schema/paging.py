"""Query parameters and pages of lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import ConfigDict, Field
from starlette.requests import Request

from vlmserve.errors import InvalidRequestError
from vlmserve.server.schema.base import RequestModel, validate
from vlmserve.server.schema.items import Includable
from vlmserve.storage.items import Page


class Query(RequestModel):
    """Query parameters of a URL. All values are text."""

    model_config = ConfigDict(strict=False, extra="ignore", frozen=True, hide_input_in_errors=True)
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"before": ()}


class ItemsQuery(Query):
    """Query of a list of items. include has no effect."""

    after: str | None = Field(None, description="The id of the last item of the page before.")
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    include: list[Includable] = Field(default_factory=list, description="No effect: items always have all parts.")

    @property
    def page(self) -> Page:
        return Page(self.after, self.limit, self.order == "asc")


class ItemQuery(Query):
    include: list[Includable] = Field(default_factory=list, description="No effect: items always have all parts.")


class ResponseQuery(ItemQuery):
    """Query of one response. stream must be false: a stored response has ended."""

    stream: Literal[False] = False


class FilesQuery(Query):
    after: str | None = Field(None, description="The id of the last file of the page before.")
    limit: int = Field(10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None

    @property
    def page(self) -> Page:
        return Page(self.after, self.limit, self.order == "asc")


QueryKind = TypeVar("QueryKind", bound=Query)


def read_query(request: Request, kind: type[QueryKind]) -> QueryKind:
    """Parse query parameters. Raises InvalidRequestError, naming the parameter."""
    values: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        field = name.removesuffix("[]")
        if field == "include":
            values.setdefault(field, []).append(value)
        elif field in values:
            raise InvalidRequestError(f"{field} is in the query twice", param=field)
        else:
            values[field] = value
    return validate(kind, values)


class ListPage(msgspec.Struct):
    """A page of a list. first_id, last_id: of this page."""

    data: Sequence[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def list_page(data: Sequence[Any], ids: Sequence[str], has_more: bool) -> ListPage:
    return ListPage(data, ids[0] if ids else None, ids[-1] if ids else None, has_more)


class Deleted(msgspec.Struct):
    """The response to a deletion."""

    id: str
    object: str
    deleted: bool = True
