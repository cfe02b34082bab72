"""Conversations: lists of items that clients and responses add to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, delete, insert, or_, select, update

from vlmserve.errors import NotFoundError
from vlmserve.storage.database import Database
from vlmserve.storage.items import (
    PackedItem,
    Page,
    StoredItem,
    delete_items,
    find_row,
    insert_items,
    read_page,
    sizes_of,
    unpack_items,
    with_sizes,
)
from vlmserve.storage.tables import conversations, items, responses


@dataclass(frozen=True, slots=True)
class Conversation:
    """created_at: seconds since 1970."""

    id: str
    created_at: float
    metadata: dict[str, str]


class Conversations:
    """Methods see only the owner's conversations, and raise NotFoundError for other ids."""

    def __init__(self, database: Database, clock: Callable[[], float], max_blob_bytes: int) -> None:
        self._database = database
        self._clock = clock
        self._max_blob_bytes = max_blob_bytes

    def create(self, owner: str, id: str, metadata: dict[str, str], new: Sequence[PackedItem]) -> Conversation:
        """Raises StorageFullError."""

        def work(connection: Connection) -> Conversation:
            now = self._clock()
            values = {"id": id, "owner": owner, "created_at": now, "used_at": now, "next_position": 0}
            connection.execute(insert(conversations).values(metadata=_text(metadata), **values))
            self.append(connection, owner, id, new)
            return Conversation(id, now, metadata)

        return self._database.write(work)

    def get(self, owner: str, id: str) -> Conversation:
        with self._database.read() as connection:
            return _conversation(_find(connection, owner, id))

    def update(self, owner: str, id: str, metadata: dict[str, str]) -> Conversation:
        def work(connection: Connection) -> Conversation:
            row = _find(connection, owner, id)
            values = {"metadata": _text(metadata), "used_at": self._clock()}
            connection.execute(update(conversations).where(conversations.c.id == id).values(values))
            return Conversation(id, row.created_at, metadata)

        return self._database.write(work)

    def delete(self, owner: str, id: str) -> None:
        def work(connection: Connection) -> None:
            _find(connection, owner, id)
            delete_conversation(connection, id)

        self._database.delete(work)

    def add(self, owner: str, id: str, new: Sequence[PackedItem]) -> None:
        """Append items in one transaction. Raises StorageFullError."""
        self._database.write(lambda connection: self.append(connection, owner, id, new))

    def append(
        self,
        connection: Connection,
        owner: str,
        id: str,
        new: Sequence[PackedItem],
        more: Sequence[dict[str, Any]] = (),
    ) -> None:
        """`add` within the caller's transaction. more: extra columns of each item."""
        # The update locks the row: concurrent appends wait.
        places = (
            update(conversations)
            .where(conversations.c.id == id, conversations.c.owner == owner)
            .values(next_position=conversations.c.next_position + len(new), used_at=self._clock())
            .returning(conversations.c.next_position)
        )
        end = connection.execute(places).scalar_one_or_none()
        if end is None:
            raise _not_found(id)
        rows = (
            {
                "owner": owner,
                "is_output": 0,
                "response_id": None,
                "response_position": None,
                **(more[index] if more else {}),
                "conversation_id": id,
                "conversation_position": end - len(new) + index,
            }
            for index in range(len(new))
        )
        insert_items(connection, new, rows, self._max_blob_bytes)

    def items(self, owner: str, id: str, page: Page, max_bytes: int) -> tuple[list[dict[str, Any]], bool]:
        """A page of a conversation's items, and whether there are more. Raises as `read_page` does."""
        with self._database.read() as connection:
            _find(connection, owner, id)
            series = items.c.conversation_id == id
            listed, has_more = read_page(connection, series, items.c.conversation_position, page, max_bytes)
            return list(unpack_items(connection, listed)), has_more

    def all_items(self, owner: str, id: str) -> list[StoredItem]:
        with self._database.read() as connection:
            _find(connection, owner, id)
            query = select(items.c.id, items.c.body).where(items.c.conversation_id == id)
            rows = connection.execute(query.order_by(items.c.conversation_position))
            return with_sizes(connection, [(row.id, row.body) for row in rows])

    def item(self, owner: str, id: str, item_id: str) -> dict[str, Any]:
        with self._database.read() as connection:
            _find(connection, owner, id)
            query = select(items.c.id, items.c.body).where(items.c.conversation_id == id, items.c.id == item_id)
            row = connection.execute(query).one_or_none()
            if row is None:
                raise _no_item(id, item_id)
            [item] = unpack_items(connection, with_sizes(connection, [(row.id, row.body)]))
            return item

    def delete_item(self, owner: str, id: str, item_id: str) -> Conversation:
        """Delete an item, also from its response."""

        def work(connection: Connection) -> Conversation:
            row = _find(connection, owner, id)
            mine = (items.c.conversation_id == id) & (items.c.id == item_id)
            if connection.execute(select(items.c.id).where(mine)).one_or_none() is None:
                raise _no_item(id, item_id)
            delete_items(connection, mine)
            return _conversation(row)

        return self._database.delete(work)


def delete_conversation(connection: Connection, id: str) -> int:
    """Return deleted bytes."""
    made_in_it = select(responses.c.id).where(responses.c.conversation_id == id)
    deleted = delete_items(connection, or_(items.c.conversation_id == id, items.c.response_id.in_(made_in_it)))
    sizes = delete(responses).where(responses.c.conversation_id == id).returning(responses.c.num_bytes)
    deleted += sizes_of(connection, sizes)
    connection.execute(delete(conversations).where(conversations.c.id == id))
    return deleted


def _find(connection: Connection, owner: str, id: str) -> Row[Any]:
    return find_row(connection, conversations, owner, id, _not_found(id))


def _not_found(id: str) -> NotFoundError:
    return NotFoundError(f"Conversation with id {id!r:.100} not found", param="conversation")


def _no_item(id: str, item_id: str) -> NotFoundError:
    return NotFoundError(f"Item with id {item_id!r:.100} not found in conversation {id!r}", param="item_id")


def _conversation(row: Row[Any]) -> Conversation:
    return Conversation(row.id, row.created_at, msgspec.json.decode(row.metadata))


def _text(metadata: dict[str, str]) -> str:
    return msgspec.json.encode(metadata).decode()
