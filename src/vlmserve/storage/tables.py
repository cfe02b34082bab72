from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    func,
    insert,
    inspect,
    select,
)

from vlmserve.errors import ConfigurationError

metadata = MetaData()


class _Name(TypeDecorator[str]):
    """Short text from clients. Replaces characters that databases reject, so that such a name never matches."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else value.encode(errors="replace").decode().replace("\0", "\ufffd")


_Count = BigInteger().with_variant(Integer, "sqlite")

schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

conversations = Table(
    "conversations",
    metadata,
    Column("id", _Name(80), primary_key=True),
    Column("owner", _Name(256), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("used_at", Double, nullable=False, index=True),
    Column("next_position", _Count, nullable=False),
    Column("metadata", Text, nullable=False),
)

responses = Table(
    "responses",
    metadata,
    Column("id", _Name(80), primary_key=True),
    Column("owner", _Name(256), nullable=False),
    Column("conversation_id", ForeignKey("conversations.id", ondelete="CASCADE"), index=True),
    # No foreign key: an error can name a deleted response that another one follows.
    Column("previous_id", _Name(80)),
    Column("thread", _Name(80), nullable=False, index=True),
    Column("created_at", Double, nullable=False, index=True),
    Column("num_bytes", _Count, nullable=False),
    Column("body", Text, nullable=False),
    Index("responses_by_size", "num_bytes"),
)
"""thread: id of the first response of a chain, which is kept or deleted as a whole."""

items = Table(
    "items",
    metadata,
    Column("id", _Name(80), primary_key=True),
    Column("owner", _Name(256), nullable=False),
    Column("conversation_id", ForeignKey("conversations.id", ondelete="CASCADE")),
    Column("conversation_position", _Count),
    Column("response_id", ForeignKey("responses.id", ondelete="CASCADE")),
    Column("response_position", _Count),
    Column("is_output", Integer, nullable=False),
    Column("num_bytes", _Count, nullable=False),
    Column("body", Text, nullable=False),
    UniqueConstraint("conversation_id", "conversation_position"),
    UniqueConstraint("response_id", "response_position"),
    Index("items_by_size", "num_bytes"),
)
"""Items of a conversation, inputs and outputs of a response, or both."""

blobs = Table(
    "blobs",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("num_bytes", _Count, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Index("blobs_by_size", "num_bytes"),
)
"""Bytes of files and images, once per content, by hexadecimal blake3 digest."""

item_blobs = Table(
    "item_blobs",
    metadata,
    Column("item_id", ForeignKey("items.id", ondelete="CASCADE"), primary_key=True),
    Column("digest", ForeignKey("blobs.digest"), primary_key=True, index=True),
)

files = Table(
    "files",
    metadata,
    Column("id", _Name(80), primary_key=True),
    Column("owner", _Name(256), nullable=False, index=True),
    Column("digest", ForeignKey("blobs.digest"), nullable=False, index=True),
    Column("filename", _Name(255), nullable=False),
    Column("purpose", _Name(40), nullable=False),
    Column("media_type", _Name(80), nullable=False),
    Column("num_bytes", _Count, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("used_at", Double, nullable=False, index=True),
    Column("expires_at", Double, index=True),
)

batches = Table(
    "batches",
    metadata,
    Column("id", _Name(80), primary_key=True),
    Column("owner", _Name(256), nullable=False, index=True),
    Column("tenant", String(64), nullable=False),
    Column("endpoint", String(80), nullable=False),
    Column("model", _Name(256)),
    Column("window", String(40), nullable=False),
    Column("input_file_id", _Name(80), nullable=False),
    Column("input_digest", ForeignKey("blobs.digest"), nullable=False, index=True),
    Column("output_lifetime", Double),
    Column("metadata", Text, nullable=False),
    Column("status", String(20), nullable=False, index=True),
    Column("errors", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("in_progress_at", Double),
    Column("finalizing_at", Double),
    Column("cancelling_at", Double),
    Column("ended_at", Double),
    Column("expires_at", Double, nullable=False),
    Column("used_at", Double, nullable=False, index=True),
    Column("output_file_id", _Name(80)),
    Column("error_file_id", _Name(80)),
    Column("num_rows", _Count, nullable=False),
    Column("num_completed", _Count, nullable=False),
    Column("num_failed", _Count, nullable=False),
    Column("prompt_tokens", _Count, nullable=False),
    Column("cached_tokens", _Count, nullable=False),
    Column("completion_tokens", _Count, nullable=False),
    Column("num_bytes", _Count, nullable=False),
    Column("holder", String(40)),
    Column("held_until", Double),
)
"""used_at: when the batch ended, or will expire. holder: the server that works on it."""

batch_results = Table(
    "batch_results",
    metadata,
    Column("batch_id", ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    Column("row", Integer, primary_key=True, autoincrement=False),
    Column("succeeded", Integer, nullable=False),
    Column("num_bytes", _Count, nullable=False),
    Column("body", Text, nullable=False),
    Index("batch_results_by_size", "num_bytes"),
)
"""Lines of the files that a batch writes when it ends."""

rate_limits = Table(
    "rate_limits",
    metadata,
    Column("name", _Name(400), primary_key=True),
    Column("per_minute", Double, nullable=False),
    Column("used", Double, nullable=False),
    Column("updated_at", Double, nullable=False, index=True),
)
"""Used amounts of API keys' limits. used: at `updated_at`; refills by `per_minute`."""

running_requests = Table(
    "running_requests",
    metadata,
    Column("name", _Name(400), primary_key=True),
    Column("server", String(64), primary_key=True),
    Column("held", Integer, nullable=False),
    Column("until", Double, nullable=False, index=True),
)
"""Concurrent requests that servers hold of a key's limit. until: when the lease expires."""

VERSION = 4
_CREATION_LOCK = 0x766C6D73


def create_tables(connection: Connection) -> None:
    """Create the tables of a new database in the caller's transaction. Raises ConfigurationError for other tables."""
    if connection.dialect.name == "postgresql":  # several servers may start at once
        connection.execute(select(func.pg_advisory_xact_lock(_CREATION_LOCK)))
    if not inspect(connection).has_table("schema_version"):
        metadata.create_all(connection)
        connection.execute(insert(schema_version).values(version=VERSION))
    version = connection.execute(select(schema_version.c.version)).scalar_one()
    if version != VERSION:
        raise ConfigurationError(
            f"another vlmserve wrote the history (its version is {version}, this one knows {VERSION}); "
            "use that vlmserve or choose another --storage-path or --storage-url"
        )


SQLITE_SETTINGS = (
    "PRAGMA auto_vacuum = FULL",  # has an effect only before the first table exists
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA secure_delete = ON",
    "PRAGMA busy_timeout = 30000",
)
"""Settings of every connection. A commit is on disk when it returns, even after a power failure. Deleted data is
overwritten."""

LEAN_SETTINGS = ("PRAGMA secure_delete = OFF", "PRAGMA auto_vacuum = INCREMENTAL")
"""Settings for deletions with small writes. `SQLITE_SETTINGS` are restored afterwards."""
EMPTY_WAL = "PRAGMA wal_checkpoint(TRUNCATE)"
"""Truncates SQLite's log. Before that the log still has deleted data, and the file has not shrunk."""


def has_rows_of(connection: Connection, owner: str) -> bool:
    kinds = (conversations, responses, files, batches)
    return any(
        connection.execute(select(kind.c.owner).where(kind.c.owner == owner).limit(1)).first() is not None
        for kind in kinds
    )
