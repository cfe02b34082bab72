"""Write, page and delete rows of items and blobs."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from blake3 import blake3
from sqlalchemy import ColumnElement, Connection, Executable, Row, Table, delete, exists, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite

from vlmserve.errors import InvalidRequestError, NotFoundError, StorageFullError
from vlmserve.storage.tables import batches as batches_table
from vlmserve.storage.tables import blobs, files, item_blobs, items

_MANY = 500
"""Maximum values in one list of a statement."""
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_BLOB = "$blob"
"""The only key of an object that replaces a data URL. No other stored object has this key."""


@dataclass(frozen=True, slots=True)
class PackedItem:
    """An item without its images. body: JSON. blobs: bytes of the images by digest."""

    id: str
    body: str
    blobs: Mapping[str, bytes]

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> PackedItem:
        return cls(item["id"], *pack(item))


@dataclass(frozen=True, slots=True)
class StoredItem:
    """blobs: sizes of its images in bytes, by digest."""

    id: str
    body: str
    blobs: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return len(self.body) + sum(size * 4 // 3 for size in self.blobs.values())


@dataclass(frozen=True, slots=True)
class Page:
    """after: list items after this id."""

    after: str | None = None
    limit: int = 20
    ascending: bool = False


def find_row(connection: Connection, table: Table, owner: str, id: str, missing: NotFoundError) -> Row[Any]:
    """The owner's row. Raises `missing`."""
    row = connection.execute(select(table).where(table.c.id == id, table.c.owner == owner)).one_or_none()
    if row is None:
        raise missing
    return row


def batches(values: Iterable[str]) -> Iterator[list[str]]:
    """Split values into lists that fit into one statement."""
    rest = iter(values)
    while some := list(islice(rest, _MANY)):
        yield some


def insert_blobs(connection: Connection, data: Mapping[str, bytes], max_bytes: int) -> None:
    """Add missing blobs. Raises StorageFullError if all blobs together would exceed `max_bytes`."""
    check_room(connection, {digest: len(content) for digest, content in data.items()}, max_bytes)
    kind = sqlite if connection.dialect.name == "sqlite" else postgresql
    known = _known(connection, data)
    for digest, content in data.items():
        if digest not in known:
            row = kind.insert(blobs).values(digest=digest, num_bytes=len(content), data=content)
            connection.execute(row.on_conflict_do_nothing())


def check_room(connection: Connection, sizes: Mapping[str, int], max_bytes: int) -> None:
    """Raise StorageFullError if all blobs, with new ones of these sizes, would exceed `max_bytes`."""
    known = _known(connection, sizes)
    new = sum(size for digest, size in sizes.items() if digest not in known)
    if new and new + num_bytes_of(connection, blobs) > max_bytes:
        raise StorageFullError(
            f"Files and images may take {max_bytes:,} bytes here, and these would be more; delete some, or raise "
            "--max-stored-bytes"
        )


def num_bytes_of(connection: Connection, table: Table) -> int:
    # PostgreSQL sums integers to a Decimal.
    return int(connection.execute(select(func.coalesce(func.sum(table.c.num_bytes), 0))).scalar_one())


def _known(connection: Connection, digests: Iterable[str]) -> set[str]:
    known: set[str] = set()
    for some in batches(digests):
        known.update(connection.execute(select(blobs.c.digest).where(blobs.c.digest.in_(some))).scalars())
    return known


def insert_items(
    connection: Connection, new: Sequence[PackedItem], rows: Iterable[dict[str, Any]], max_bytes: int
) -> None:
    """rows: extra columns of each item. Raises StorageFullError."""
    if not new:
        return
    insert_blobs(connection, {digest: data for item in new for digest, data in item.blobs.items()}, max_bytes)
    values = [
        {"id": item.id, "num_bytes": len(item.body.encode()), "body": item.body, **row}
        for item, row in zip(new, rows, strict=True)
    ]
    connection.execute(insert(items), values)
    references = [{"item_id": item.id, "digest": digest} for item in new for digest in item.blobs]
    if references:
        connection.execute(insert(item_blobs), references)


def read_page(
    connection: Connection, series: ColumnElement[bool], position: ColumnElement[Any], page: Page, max_bytes: int
) -> tuple[list[StoredItem], bool]:
    """Items of a series in the order of `position`, and whether there are more.

    A page has at least one item, and otherwise ends before it exceeds `max_bytes`. Raises InvalidRequestError if
    `page.after` is not in the series.
    """
    query = select(items.c.id, items.c.body).where(series)
    if page.after is not None:
        found = connection.execute(select(position).where(series, items.c.id == page.after)).scalar_one_or_none()
        if found is None:
            raise InvalidRequestError(f"after: there is no {page.after!r} in this list", param="after")
        query = query.where(position > found if page.ascending else position < found)
    query = query.order_by(position if page.ascending else position.desc()).limit(page.limit + 1)
    listed, total = with_sizes(connection, [(row.id, row.body) for row in connection.execute(query)]), 0
    for index, item in enumerate(listed):
        total += item.num_bytes
        if index == page.limit or (index and total > max_bytes):
            return listed[:index], True
    return listed, False


def with_sizes(connection: Connection, rows: Sequence[tuple[str, str]]) -> list[StoredItem]:
    sizes: dict[str, dict[str, int]] = {id: {} for id, _ in rows}
    for some in batches(sizes):
        query = select(item_blobs.c.item_id, blobs.c.digest, blobs.c.num_bytes).join(blobs)
        for item_id, digest, size in connection.execute(query.where(item_blobs.c.item_id.in_(some))):
            sizes[item_id][digest] = size
    return [StoredItem(id, body, sizes[id]) for id, body in rows]


def unpack_items(connection: Connection, stored: Iterable[StoredItem]) -> Iterator[dict[str, Any]]:
    """Decode items, with their images. Raises NotFoundError if images were deleted meanwhile."""
    for item in stored:
        query = select(blobs.c.digest, blobs.c.data).where(blobs.c.digest.in_(list(item.blobs)))
        found = {row.digest: row.data for row in connection.execute(query)} if item.blobs else {}
        if len(found) < len(item.blobs):
            raise NotFoundError(f"Item {item.id!r} was deleted just now")
        yield unpack(item.body, found)


def delete_items(connection: Connection, which: ColumnElement[bool]) -> int:
    """Delete items and blobs that only they use; returns bytes."""
    digests = connection.execute(
        select(item_blobs.c.digest).distinct().join(items, items.c.id == item_blobs.c.item_id).where(which)
    )
    orphans = list(digests.scalars())
    return sizes_of(connection, delete(items).where(which).returning(items.c.num_bytes)) + delete_orphans(
        connection, orphans
    )


def sizes_of(connection: Connection, deleting: Executable) -> int:
    return sum(int(size) for size in connection.execute(deleting).scalars())


def delete_orphans(connection: Connection, digests: Iterable[str]) -> int:
    """Delete unused blobs among `digests`; returns bytes."""
    deleted = 0
    for some in batches(sorted(digests)):
        # Lock the blobs: else two transactions that delete the last references would each still see the other's
        # reference.
        connection.execute(
            select(blobs.c.digest).where(blobs.c.digest.in_(some)).order_by(blobs.c.digest).with_for_update()
        )
        orphans = delete(blobs).where(
            blobs.c.digest.in_(some),
            ~exists().where(item_blobs.c.digest == blobs.c.digest),
            ~exists().where(files.c.digest == blobs.c.digest),
            ~exists().where(batches_table.c.input_digest == blobs.c.digest),
        )
        deleted += sizes_of(connection, orphans.returning(blobs.c.num_bytes))
    return deleted


def digest_of(data: bytes) -> str:
    """Hexadecimal blake3, the key of a blob."""
    return blake3(data).hexdigest()


def pack(value: Any) -> tuple[str, dict[str, bytes]]:
    """A JSON value as text, and the bytes of its data URLs by digest. `unpack` reverses it."""
    found: dict[str, bytes] = {}
    return msgspec.json.encode(_taken_out(value, found)).decode(), found


def unpack(body: str, blobs: Mapping[str, bytes]) -> Any:
    return _put_back(msgspec.json.decode(body), blobs)


def _taken_out(value: Any, found: dict[str, bytes]) -> Any:
    if isinstance(value, dict):
        return {key: _taken_out(field, found) for key, field in value.items()}
    if isinstance(value, list):
        return [_taken_out(element, found) for element in value]
    if not isinstance(value, str) or (head := _DATA_URL.match(value)) is None:
        return value
    encoded = value[head.end() :]
    try:
        data = msgspec.convert(encoded, bytes)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return value
    if binascii.b2a_base64(data, newline=False) != encoded.encode():
        return value  # re-encoding would give other text
    digest = digest_of(data)
    found[digest] = data
    return {_BLOB: [head[0], digest]}


def _put_back(value: Any, blobs: Mapping[str, bytes]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_BLOB}:
            head, digest = value[_BLOB]
            return head + base64.b64encode(blobs[digest]).decode()
        return {key: _put_back(field, blobs) for key, field in value.items()}
    return [_put_back(element, blobs) for element in value] if isinstance(value, list) else value
