"""Check that all workers of a cluster store in one database."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vlmserve.errors import ConfigurationError
from vlmserve.settings.config import ServerConfig

logger = logging.getLogger(__name__)

_SERVERS = ("postgresql://", "postgresql+", "postgres://")


def is_shared(server: ServerConfig) -> bool:
    """True if other machines reach the database."""
    return (server.storage_url or "").startswith(_SERVERS)


def check_shared(server: ServerConfig) -> ServerConfig:
    """Without a database, a worker stores nothing. Raises ConfigurationError for one in a file or in memory."""
    if server.storage_url is None and server.storage_path is None:
        logger.info("The cluster keeps no responses, conversations and files; --storage-url postgresql://... does")
        return server.model_copy(update={"storage_url": "none"})
    refuse_local(server)
    return server


def refuse_local(server: ServerConfig) -> None:
    """Raises ConfigurationError for a database of one machine."""
    is_named = server.storage_path is not None or server.storage_url not in (None, "none")
    if is_named and not is_shared(server):
        raise ConfigurationError(
            "a cluster needs a shared history, not SQLite or memory: use --storage-url "
            "postgresql://user:password@host/name, or --storage-url none"
        )


def check_local(servers: Sequence[ServerConfig]) -> None:
    """Workers on one machine may share a file. Raises ConfigurationError for several databases, or one in memory."""
    if len({(server.storage_url, server.storage_path) for server in servers}) > 1:
        raise ConfigurationError(
            "the workers of a cluster share one history: write storage_url or storage_path into [server], not into "
            "sections of workers"
        )
    if len(servers) > 1 and servers[0].storage_url == "memory":
        raise ConfigurationError(
            "--storage-url memory belongs to one process; leave it out, and the workers share an SQLite file"
        )
