"""Fetches images and videos from public http(s) URLs, with limits of time, size and redirects.

All connections use `GuardedBackend.connect_tcp`. It resolves a name once and connects to a checked address, so DNS
rebinding has no effect. Proxies of the environment are ignored.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
import ssl
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from vlmserve.cancellation import client
from vlmserve.errors import ImageFetchError
from vlmserve.media.kinds import check_num_bytes
from vlmserve.media.urls import ascii_host, ascii_url
from vlmserve.settings.config import MediaConfig
from vlmserve.types import MediaKind

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = (("User-Agent", "vlmserve"), ("Accept", "image/*,video/*,*/*;q=0.5"), ("Accept-Encoding", "identity"))
_GZIP_OR_ZLIB = 47
"""zlib's `wbits` that detects both formats."""
_INFLATED_AT_ONCE = 1024**2
_LOOKUPS, _CLIENT_LOOKUPS = 128, 32
"""Concurrent lookups of host names, in total and for each client. A lookup may outlive its fetch."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""Assigned addresses: https://www.iana.org/assignments/ipv6-address-space"""
_SPECIAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))
"""Protocol assignments, relays and documentation, which some versions of the library call global."""


def fetch_file(url: str, limits: MediaConfig, kind: MediaKind = "image") -> bytes:
    """Raises ImageFetchError for errors, after `limits.fetch_timeout` seconds or `limits.max_redirects` redirects, and
    for hosts that have private addresses or are missing in `limits.allowed_media_domains` (if set).

    `limits.allowed_media_hosts` are always allowed. Raises the kind's size error once the size is known to exceed the
    limit.
    """
    backend = GuardedBackend(limits, time.monotonic() + limits.fetch_timeout)
    with httpcore.ConnectionPool(ssl_context=_ssl_context(), network_backend=backend) as pool:
        for _ in range(limits.max_redirects + 1):
            url = _checked_url(url)
            try:
                target = _get(pool, url, limits, kind)
            except httpcore.TimeoutException as error:
                raise _failed(url, f"it took longer than {limits.fetch_timeout:g} s") from error
            except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
                raise _failed(url, str(error) or type(error).__name__) from error
            except _ForbiddenAddressError as error:
                raise _failed(url, str(error)) from error
            if isinstance(target, bytes):
                return target
            url = _redirected(url, target)
    raise _failed(url, f"it redirects more than {limits.max_redirects} times")


def _redirected(url: str, target: str) -> str:
    try:
        return urljoin(url, target)
    except ValueError as error:
        raise _failed(url, f"it redirects to a malformed URL ({error})") from error


def _location(response: httpcore.Response) -> str:
    """Some servers write a redirect in UTF-8 without percent-encoding."""
    value = next(value for name, value in response.headers if name.lower() == b"location")
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _get(pool: httpcore.ConnectionPool, url: str, limits: MediaConfig, kind: MediaKind) -> bytes | str:
    timeouts = dict.fromkeys(("connect", "read", "write", "pool"), limits.fetch_timeout)
    with pool.stream("GET", url, headers=_HEADERS, extensions={"timeout": timeouts}) as response:
        headers = {name.lower(): value.decode("latin-1") for name, value in response.headers}
        if response.status in _REDIRECTS and b"location" in headers:
            return _location(response)
        if response.status != 200:
            raise _failed(url, f"the server answered {response.status}")
        length = headers.get(b"content-length", "")
        check_num_bytes(int(length) if length.isdecimal() else 0, limits, kind)
        body = bytearray()
        for chunk in _inflated(url, response.iter_stream(), headers.get(b"content-encoding", "")):
            body += chunk
            check_num_bytes(len(body), limits, kind)
        return bytes(body)


def _inflated(url: str, chunks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Decompress in bounded pieces. Some servers compress against the request's headers."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        yield from chunks
        return
    if name not in ("gzip", "x-gzip", "deflate"):
        raise _failed(url, f"the server sent it with the unsupported Content-Encoding {encoding[:40]!r}")
    inflating = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        for chunk in chunks:
            while chunk and not inflating.eof:
                yield inflating.decompress(chunk, _INFLATED_AT_ONCE)
                chunk = inflating.unconsumed_tail
        yield inflating.flush(_INFLATED_AT_ONCE)
    except zlib.error as error:
        raise _failed(url, f"its {name} encoding is broken: {error}") from error
    if not inflating.eof:
        raise _failed(url, f"its {name} encoding is truncated")


def _checked_url(url: str) -> str:
    try:
        url = ascii_url(url)
        parts = urlsplit(url)
        is_valid = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError as error:  # includes errors of IDNA and lone surrogates
        raise ImageFetchError(f"the image's URL is malformed: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise ImageFetchError(f"images are fetched over http and https, not {parts.scheme or 'a local path'!r}")
    if not is_valid or any(char <= " " for char in parts.netloc):
        raise ImageFetchError("the image's URL is malformed")
    if "@" in parts.netloc:
        raise ImageFetchError("the image's URL must not contain a user name or password")
    return url


def _failed(url: str, reason: str) -> ImageFetchError:
    parts = urlsplit(url)
    return ImageFetchError(f"the file at {parts.scheme}://{parts.netloc}{parts.path[:100]} was not fetched: {reason}")


class _ForbiddenAddressError(Exception):
    pass


class GuardedBackend(httpcore.NetworkBackend):
    """Connects only to public addresses and allowed hosts, until one deadline."""

    def __init__(self, limits: MediaConfig, deadline: float) -> None:
        self._allowed_hosts = _hosts(limits.allowed_media_hosts)
        self._domains = _hosts(limits.allowed_media_domains)
        self._deadline = deadline
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        allowed = host.lower() in self._allowed_hosts
        if self._domains and not allowed and host.lower() not in self._domains:
            raise _ForbiddenAddressError(f"{host} is not one of the hosts that the operator allows")
        addresses = resolve_host(host, port, _remaining(self._deadline))
        # The same message in both cases, so that it does not reveal internal names.
        if not allowed and not (addresses and all(map(is_public, addresses))):
            raise _ForbiddenAddressError(
                f"{host} was not found or is not a public address; the operator can allow it with --allowed-media-hosts"
            )
        if not addresses:
            raise httpcore.ConnectError(f"the host {host} was not found")
        for address in addresses[:-1]:
            try:
                return self._connect(address, port, local_address, socket_options)
            except httpcore.ConnectError:
                continue
        return self._connect(addresses[-1], port, local_address, socket_options)

    def _connect(
        self, address: str, port: int, local_address: str | None, socket_options: Iterable[Any] | None
    ) -> httpcore.NetworkStream:
        timeout = _remaining(self._deadline)
        stream = self._inner.connect_tcp(address, port, timeout, local_address, socket_options or ())
        return _DeadlineStream(stream, self._deadline)


class _DeadlineStream(httpcore.NetworkStream):
    """One deadline for all waits: a server gains no time by sending single bytes."""

    def __init__(self, inner: httpcore.NetworkStream, deadline: float) -> None:
        self._inner = inner
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, _remaining(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, _remaining(self._deadline))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        stream = self._inner.start_tls(ssl_context, server_hostname, _remaining(self._deadline))
        return _DeadlineStream(stream, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def _hosts(names: Iterable[str]) -> frozenset[str]:
    return frozenset(ascii_host(name.strip("[]")).lower() for name in names)


def is_public(address: str) -> bool:
    """False for private, loopback, link-local and reserved addresses.

    In IPv6, an embedded IPv4 address (mapped, 6to4, Teredo, NAT64) counts.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if embedded is None and ip in _NAT64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(str(embedded))
        if ip not in _GLOBAL_UNICAST:
            return False
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _SPECIAL)


def resolve_host(host: str, port: int, timeout: float) -> list[str]:
    try:
        found = _lookups().find(host, port, timeout)
    except TimeoutError as error:
        raise httpcore.ConnectTimeout(str(error)) from error
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class Lookups:
    """Resolves host names in threads, because getaddrinfo has no timeout. Limits a client's threads."""

    def __init__(self, capacity: int, per_client: int) -> None:
        self._threads = ThreadPoolExecutor(capacity, "resolve")
        self._per_client = per_client
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()

    def find(self, host: str, port: int, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        name = client.get()
        with self._changed:
            if not self._changed.wait_for(lambda: self._running[name] < self._per_client, timeout):
                raise TimeoutError
            self._running[name] += 1
        pending = self._threads.submit(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM)
        pending.add_done_callback(lambda _: self._ended(name))
        try:
            return pending.result(deadline - time.monotonic())
        finally:
            pending.cancel()

    def _ended(self, name: str) -> None:
        with self._changed:
            self._running[name] -= 1
            self._running += Counter()  # drops clients without lookups
            self._changed.notify_all()


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise httpcore.ReadTimeout("the deadline has passed")
    return remaining


@functools.cache
def _lookups() -> Lookups:
    return Lookups(_LOOKUPS, _CLIENT_LOOKUPS)


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    return httpcore.default_ssl_context()
