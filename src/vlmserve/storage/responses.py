"""Responses, their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, delete, insert, select, update

from vlmserve.errors import InvalidRequestError, NotFoundError
from vlmserve.storage.conversations import Conversations
from vlmserve.storage.database import Database
from vlmserve.storage.items import (
    PackedItem,
    Page,
    StoredItem,
    batches,
    check_room,
    delete_items,
    find_row,
    insert_items,
    read_page,
    sizes_of,
    unpack_items,
    with_sizes,
)
from vlmserve.storage.tables import files, items, responses


class Responses:
    """Methods see only the owner's responses, and raise NotFoundError for other ids."""

    def __init__(
        self, database: Database, conversations: Conversations, clock: Callable[[], float], max_blob_bytes: int
    ) -> None:
        self._database = database
        self._conversations = conversations
        self._clock = clock
        self._max_blob_bytes = max_blob_bytes

    def check_room(self, new: Sequence[PackedItem]) -> None:
        """Raise StorageFullError if the images of these items do not fit."""
        with self._database.read() as connection:
            sizes = {digest: len(data) for item in new for digest, data in item.blobs.items()}
            check_room(connection, sizes, self._max_blob_bytes)

    def save(
        self,
        owner: str,
        response: Mapping[str, Any] | None,
        inputs: Sequence[PackedItem],
        outputs: Sequence[PackedItem],
        conversation_id: str | None = None,
        previous_id: str | None = None,
        file_ids: Sequence[str] = (),
    ) -> None:
        """Store a response and append its items to its conversation, if any, in one transaction.

        A failed response changes neither its conversation nor a stored response with its id.

        response: a JSON object with an ``id``, without output; None stores only the conversation's items. file_ids:
        files that it uses.

        Raises StorageFullError, and NotFoundError for a deleted conversation.
        """

        has_failed = response is not None and response.get("status") == "failed"

        def work(connection: Connection) -> None:
            if response is not None:
                if has_failed and _exists(connection, response["id"]):
                    return
                self._insert(connection, owner, response, conversation_id, previous_id)
            new = [*inputs, *outputs]
            rows = [
                {
                    "owner": owner,
                    "is_output": int(index >= len(inputs)),
                    "response_id": None if response is None else response["id"],
                    "response_position": None if response is None else index,
                    "conversation_id": None,
                    "conversation_position": None,
                }
                for index in range(len(new))
            ]
            if conversation_id is None or has_failed:
                insert_items(connection, new, rows, self._max_blob_bytes)
            else:
                self._conversations.append(connection, owner, conversation_id, new, rows)
            if file_ids:
                used = (files.c.owner == owner) & files.c.id.in_(list(file_ids))
                connection.execute(update(files).where(used).values(used_at=self._clock()))

        self._database.write(work)

    def get(self, owner: str, id: str) -> dict[str, Any]:
        with self._database.read() as connection:
            row = _find(connection, owner, id)
            query = select(items.c.id, items.c.body).where(items.c.response_id == id, items.c.is_output == 1)
            outputs = connection.execute(query.order_by(items.c.response_position))
            stored = with_sizes(connection, [(item.id, item.body) for item in outputs])
            return {**msgspec.json.decode(row.body), "output": list(unpack_items(connection, stored))}

    def delete(self, owner: str, id: str) -> None:
        """Keep the response's items in its conversation."""

        def work(connection: Connection) -> None:
            _find(connection, owner, id)
            mine = items.c.response_id == id
            kept = update(items).where(mine, items.c.conversation_id.is_not(None))
            connection.execute(kept.values(response_id=None, response_position=None))
            delete_items(connection, mine)
            connection.execute(delete(responses).where(responses.c.id == id))

        self._database.delete(work)

    def inputs(self, owner: str, id: str, page: Page, max_bytes: int) -> tuple[list[dict[str, Any]], bool]:
        """A page of a response's input items, and whether there are more. Raises as `read_page` does."""
        with self._database.read() as connection:
            _find(connection, owner, id)
            series = (items.c.response_id == id) & (items.c.is_output == 0)
            listed, has_more = read_page(connection, series, items.c.response_position, page, max_bytes)
            return list(unpack_items(connection, listed)), has_more

    def history(self, owner: str, id: str) -> list[StoredItem]:
        """All inputs and outputs up to the end of a response, in order.

        Raises InvalidRequestError for a response in a conversation, NotFoundError if an earlier response was deleted.
        """
        with self._database.read() as connection:
            row = _find(connection, owner, id)
            if row.conversation_id is not None:
                raise InvalidRequestError(
                    f"Response {id!r} was made in the conversation {row.conversation_id!r}; go on with conversation "
                    "instead of previous_response_id",
                    param="previous_response_id",
                )
            query = select(responses.c.id, responses.c.previous_id)
            query = query.where(responses.c.thread == row.thread, responses.c.owner == owner)
            before = {some.id: some.previous_id for some in connection.execute(query)}
            chain: list[str] = []
            step: str | None = id
            while step is not None:
                if step not in before:
                    raise NotFoundError(
                        f"Response {step!r}, which {chain[-1]!r} follows, was deleted", param="previous_response_id"
                    )
                chain.append(step)
                step = before[step]
            rows: list[tuple[str, str]] = []
            for step in reversed(chain):
                query_items = select(items.c.id, items.c.body).where(items.c.response_id == step)
                found = connection.execute(query_items.order_by(items.c.response_position))
                rows += [(item.id, item.body) for item in found]
            return with_sizes(connection, rows)

    def find_items(self, owner: str, ids: Sequence[str]) -> dict[str, StoredItem]:
        """Return existing items by id."""
        rows: list[tuple[str, str]] = []
        with self._database.read() as connection:
            for some in batches(dict.fromkeys(ids)):
                query = select(items.c.id, items.c.body).where(items.c.owner == owner, items.c.id.in_(some))
                rows += [(item.id, item.body) for item in connection.execute(query)]
            return {item.id: item for item in with_sizes(connection, rows)}

    def unpack(self, stored: Sequence[StoredItem]) -> list[dict[str, Any]]:
        """Decode items, with their images. Raises NotFoundError for items deleted meanwhile."""
        with self._database.read() as connection:
            return list(unpack_items(connection, stored))

    def _insert(
        self,
        connection: Connection,
        owner: str,
        response: Mapping[str, Any],
        conversation_id: str | None,
        previous_id: str | None,
    ) -> None:
        thread = None
        if previous_id is not None:
            query = select(responses.c.thread).where(responses.c.id == previous_id, responses.c.owner == owner)
            thread = connection.execute(query).scalar_one_or_none()
        if conversation_id is not None:
            # A deleted conversation raises NotFoundError here, not a foreign key error below.
            self._conversations.append(connection, owner, conversation_id, ())
        body = msgspec.json.encode(response)
        values = {
            "id": response["id"],
            "owner": owner,
            "conversation_id": conversation_id,
            "previous_id": previous_id,
            "thread": thread or response["id"],
            "created_at": self._clock(),
            "num_bytes": len(body),
            "body": body.decode(),
        }
        connection.execute(insert(responses).values(values))


def delete_thread(connection: Connection, thread: str) -> int:
    """Return deleted bytes."""
    mine = select(responses.c.id).where(responses.c.thread == thread)
    deleted = delete_items(connection, items.c.response_id.in_(mine))
    sizes = delete(responses).where(responses.c.thread == thread).returning(responses.c.num_bytes)
    return deleted + sizes_of(connection, sizes)


def _exists(connection: Connection, id: str) -> bool:
    return connection.execute(select(responses.c.id).where(responses.c.id == id)).one_or_none() is not None


def _find(connection: Connection, owner: str, id: str) -> Row[Any]:
    missing = NotFoundError(f"Response with id {id!r:.100} not found", param="response_id")
    return find_row(connection, responses, owner, id, missing)
