"""Reads a request's history: its owner, earlier turns, and files."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request

from vlmserve.errors import InvalidRequestError, NotFoundError, PromptTooLongError
from vlmserve.media.budget import BUDGET_FIELDS
from vlmserve.media.files import is_document
from vlmserve.server.body import BodyShare
from vlmserve.server.schema.items import InputItem, ItemReference, copy_of, parts_of
from vlmserve.server.service import Service
from vlmserve.storage.items import StoredItem
from vlmserve.storage.store import Store
from vlmserve.types import Prompt

OWNER = "vlmserve.owner"
"""The key of the owner's name in a request's ASGI scope."""

_OFF = "This server keeps no history (--storage-url none)"

Message = dict[str, Any]


def owner_of(request: Request) -> str:
    return str(request.scope.get(OWNER, ""))


def needed_store(service: Service, param: str | None = None) -> Store:
    """Raises NotFoundError if the server keeps no history."""
    if service.store is None:
        raise NotFoundError(_OFF, param=param)
    return service.store


async def read_items(store: Store, items: Sequence[StoredItem], max_bytes: int, share: BodyShare) -> list[Message]:
    """Raises PromptTooLongError before it reads items over `max_bytes`, RefusedError without memory for them."""
    size = sum(item.num_bytes for item in items)
    if size > max_bytes:
        raise PromptTooLongError(
            f"The history has {size:,} bytes; at most {max_bytes:,} are allowed. Start a new conversation, or one that "
            "begins with a summary"
        )
    share.need(size)
    return await store.run(store.responses.unpack, items)


async def kept_items(
    service: Service, owner: str, items: Sequence[InputItem | ItemReference], share: BodyShare
) -> list[Message]:
    """Convert items to stored form, and replace references by copies.

    Raises NotFoundError for an unknown item, and the errors of `read_items`.
    """
    places = {index: item.id for index, item in enumerate(items) if isinstance(item, ItemReference)}
    copies: dict[int, Message] = {}
    if places:
        store = needed_store(service, f"input[{min(places)}]")
        found = await store.run(store.responses.find_items, owner, list(places.values()))
        for index, id in places.items():
            if id not in found:
                raise NotFoundError(
                    f"input[{index}]: there is no item with the id {id!r:.100}; those of responses with store false "
                    "are not kept. Send the item itself",
                    param=f"input[{index}]",
                )
        # An item that is referenced twice counts twice, which bounds the expansion.
        read = await read_items(store, [found[id] for id in places.values()], service.max_body_bytes, share)
        copies = {index: copy_of(item) for index, item in zip(places, read, strict=True)}
    return [copies[index] if isinstance(item, ItemReference) else item.stored() for index, item in enumerate(items)]


async def with_files(service: Service, owner: str, messages: Sequence[Message], share: BodyShare) -> list[Message]:
    """Replace file ids by the files' contents.

    Raises NotFoundError for an unknown file, RefusedError without memory for them.
    """
    urls: dict[str, tuple[str, str]] = {}

    async def resolved(part: Message, place: str) -> Message:
        file_id = part["file"].get("file_id")
        if file_id is None:
            return part
        if file_id not in urls:
            try:
                urls[file_id] = await _data_url(service, owner, file_id, share)
            except InvalidRequestError as error:
                error.param = place
                raise
        kind, url = urls[file_id]
        if kind == "file":
            return {**part, "file": {"file_data": url}}
        if "pages" in part:
            raise InvalidRequestError(f"{place}: the file {file_id} has no pages; leave pages out", param=place)
        limits = {name: value for name, value in part.items() if name in BUDGET_FIELDS}
        others = {name: value for name, value in part["file"].items() if name != "file_id"}
        return {"type": kind, kind: {"url": url, **others}, **limits}

    shown: list[Message] = []
    for index, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, list):
            content = [
                await resolved(part, f"messages[{index}].content[{number}].file_id") if part["type"] == "file" else part
                for number, part in enumerate(content)
            ]
        shown.append({**message, "content": content})
    return shown


async def _data_url(service: Service, owner: str, file_id: str, share: BodyShare) -> tuple[str, str]:
    """The part type of a file, and its content as a data URL."""
    store = needed_store(service)
    file = await store.run(store.files.get, owner, file_id)
    family = file.media_type.partition("/")[0]
    if family not in ("image", "video") and file.media_type != "application/pdf":
        raise InvalidRequestError(f"The file {file_id} is of {file.media_type}: no image, document or video")
    share.need(file.num_bytes * 4 // 3)

    data = await store.run(store.files.content, owner, file_id)

    def read() -> tuple[str, str]:
        kind = "file" if is_document(data, service.media) else f"{family}_url"
        return kind, f"data:{file.media_type};base64,{base64.b64encode(data).decode()}"

    return await service.preparation.read_file(read)


def file_ids(items: Sequence[Message]) -> list[str]:
    return sorted({part["file_id"] for item in items for part in parts_of(item) if "file_id" in part})


async def fitting(
    prepare: Callable[[list[Message]], Awaitable[Prompt]], messages: list[Message], max_tokens: int
) -> Prompt:
    """Make a prompt of the system message and as many of the last turns as fit into `max_tokens`.

    A turn starts at a user message. A last turn that does not fit is returned, and rejected later.
    """
    first = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    turns = [index for index in range(first, len(messages)) if messages[index]["role"] == "user"]
    cuts = sorted({first, *turns})
    prompt = await prepare(messages)
    if len(prompt.token_ids) <= max_tokens or len(cuts) < 2:
        return prompt
    low, high = 1, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        shorter = await prepare(messages[:first] + messages[cuts[middle] :])
        low, high = (low, middle) if len(shorter.token_ids) <= max_tokens else (middle + 1, high)
    return await prepare(messages[:first] + messages[cuts[low] :])
