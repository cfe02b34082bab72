"""Hand a gateway's port to its successor without a moment in which nobody listens.

A gateway keeps a Unix socket named by its address. The successor sends the cluster's token, receives the listening
socket (SCM_RIGHTS) with all waiting connections, and accepts; then the predecessor stops. Linux only: abstract socket
names belong to a network namespace, like ports, and vanish with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
import struct
import sys

from vlmserve.errors import ConfigurationError
from vlmserve.server.run import address_of
from vlmserve.settings.config import ServerConfig

logger = logging.getLogger(__name__)

_PATIENCE = 5.0
"""Timeout in seconds for each message of the other side."""
_MOST_TOKEN_BYTES = 1024
_SOCKET, _LISTENS, _DENIED = b"s", b"l", b"d"


def _name(address: tuple[object, ...]) -> str:
    return f"\0vlmserve gateway {address[0]} {address[1]}"


class Offer:
    """The running gateway's side. Use it from one event loop. listener: the web server's socket."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener = listener
        self._token = token.encode()
        self._door: socket.socket | None = None
        self._successor: socket.socket | None = None
        if sys.platform != "linux":
            return
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.setblocking(False)
        try:
            self._door.bind(_name(listener.getsockname()))
            self._door.listen(4)
        except OSError as error:
            logger.warning("No other gateway can take over the port of this one: %s", error)
            self._door.close()
            self._door = None

    async def taken(self) -> None:
        if self._door is None:
            await asyncio.Event().wait()
            return
        loop = asyncio.get_running_loop()
        while True:
            successor, _ = await loop.sock_accept(self._door)
            try:
                successor.setblocking(False)
                if await self._give(successor):
                    self._successor = successor
                    return
            except (OSError, TimeoutError) as error:
                logger.warning("Another gateway has not taken over: %s", error)
            finally:
                if self._successor is None:
                    successor.close()

    async def _give(self, successor: socket.socket) -> bool:
        """Returns whether the successor accepts connections. Raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_PATIENCE):
            token = await loop.sock_recv(successor, _MOST_TOKEN_BYTES)
        if not (_is_own(successor) and hmac.compare_digest(token, self._token)):
            successor.send(_DENIED)
            return False
        socket.send_fds(successor, [_SOCKET], [self._listener.fileno()])
        return await loop.sock_recv(successor, 1) == _LISTENS

    def close(self) -> None:
        for one in (self._door, self._successor):
            if one is not None:
                one.close()


class Predecessor:
    """The gateway to replace. listener: its listening socket."""

    def __init__(self, listener: socket.socket, channel: socket.socket) -> None:
        self.listener = listener
        self._channel = channel

    def release(self) -> None:
        """Blocks until it has stopped, some seconds at most."""
        with contextlib.closing(self._channel), contextlib.suppress(OSError):  # it has ended, so it accepts nothing
            self._channel.send(_LISTENS)
            self._channel.recv(1)


def predecessor_at(server: ServerConfig, token: str) -> Predecessor | None:
    """Ask the gateway at an address for its socket. None: no gateway runs there.

    Raises ConfigurationError if it may not be replaced or does not answer.
    """
    if sys.platform != "linux":
        return None
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.settimeout(_PATIENCE)
    where = f"{server.host} port {server.port}"
    with contextlib.ExitStack() as stack:
        stack.enter_context(channel)
        _, _, address = address_of(server)
        try:
            channel.connect(_name(address))
        except ConnectionRefusedError:
            return None
        try:
            channel.send(token.encode())
            said, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        except OSError as error:
            raise ConfigurationError(f"the gateway at {where} does not let go of it: {error}; stop it first") from None
        if said != _SOCKET or not descriptors:
            raise ConfigurationError(f"the gateway at {where} is another user's or of another cluster; stop it first")
        stack.pop_all()
    return Predecessor(socket.socket(fileno=descriptors[0]), channel)


def _is_own(successor: socket.socket) -> bool:
    """True for processes of this user and root."""
    credentials = successor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return user in (0, os.geteuid())
