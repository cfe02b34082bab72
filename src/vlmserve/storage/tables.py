"""The tables."""

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
    """Short text that clients may make up. What no database takes becomes what never matches."""

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
    # No foreign key: what was deleted is missed when somebody wants to go on from there, and can be named.
    Column("previous_id", _Name(80)),
    Column("thread", _Name(80), nullable=False, index=True),
    Column("created_at", Double, nullable=False, index=True),
    Column("num_bytes", _Count, nullable=False),
    Column("body", Text, nullable=False),
    Index("responses_by_size", "num_bytes"),
)
"""thread: the id of the first response of those that follow each other; they are kept or forgotten together."""

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
"""Turns of a conversation, inputs and outputs of a response, or both at once."""

blobs = Table(
    "blobs",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("num_bytes", _Count, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Index("blobs_by_size", "num_bytes"),
)
"""The bytes of files and images, once each, under the hexadecimal blake3 digest of their content."""

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
"""used_at: when it has ended, and until then when it is to have ended. holder: the server that works on it."""

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
"""Lines of the files that a batch will have written when it ends."""

rate_limits = Table(
    "rate_limits",
    metadata,
    Column("name", _Name(400), primary_key=True),
    Column("per_minute", Double, nullable=False),
    Column("used", Double, nullable=False),
    Column("updated_at", Double, nullable=False, index=True),
)
"""What is used up of the limits of API keys. used: at `updated_at`; `per_minute` of it comes back in a minute."""

running_requests = Table(
    "running_requests",
    metadata,
    Column("name", _Name(400), primary_key=True),
    Column("server", String(64), primary_key=True),
    Column("held", Integer, nullable=False),
    Column("until", Double, nullable=False, index=True),
)
"""How many of the requests that a key may have at once each server has for it. until: when that ends by itself."""

VERSION = 4
"""Version of the tables."""
_CREATION_LOCK = 0x766C6D73


def create_tables(connection: Connection) -> None:
    """Create the tables of a new database, in the caller's transaction. Raises ConfigurationError for other tables."""
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
    "PRAGMA auto_vacuum = FULL",  # counts only before the first table is made
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA secure_delete = ON",
    "PRAGMA busy_timeout = 30000",
)
"""What every connection to SQLite is told first. A commit is on the disk when it returns, even if the power fails; what
is deleted is overwritten."""

LEAN_SETTINGS = ("PRAGMA secure_delete = OFF", "PRAGMA auto_vacuum = INCREMENTAL")
"""With which deleting writes little. Those above are told again afterwards."""
EMPTY_WAL = "PRAGMA wal_checkpoint(TRUNCATE)"
"""Until then, what was deleted is still in SQLite's log of changes, and the file has not shrunk."""


def has_rows_of(connection: Connection, owner: str) -> bool:
    kinds = (conversations, responses, files, batches)
    return any(
        connection.execute(select(kind.c.owner).where(kind.c.owner == owner).limit(1)).first() is not None
        for kind in kinds
    )
