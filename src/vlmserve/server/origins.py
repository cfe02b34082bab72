"""Checks Host and Origin headers, because web pages in browsers can reach servers that their authors cannot."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from vlmserve.server.errors import RefusedError
from vlmserve.settings.config import ServerConfig

_PRIVATE = (".localhost", ".local", ".internal", ".svc", ".lan", ".home.arpa")
"""Suffixes that nobody can register: local machine, local networks, Docker, Kubernetes."""


class Origins:
    """Raises RefusedError (403) for requests of foreign web pages.

    ``Origin`` names the page. In DNS rebinding, the page's domain resolves to the server, and ``Host`` shows it. If
    every request needs a key, which such pages lack, only what the settings name is checked.
    """

    def __init__(self, config: ServerConfig, *, needs_key: bool) -> None:
        self._any_host = "*" in config.allowed_hosts or (needs_key and not config.allowed_hosts)
        self._any_origin = bool({"*"} & {*config.allowed_origins, *config.cors_origins}) or (
            needs_key and not config.allowed_origins
        )
        own = (config.host, socket.gethostname())
        self._hosts = {name.lower().rstrip(".") for name in (*own, *config.allowed_hosts)}
        self._suffixes = tuple(name[1:] for name in self._hosts if name.startswith("*.")) + _PRIVATE
        self._origins = re.compile(origin_pattern((*config.allowed_origins, *config.cors_origins)))

    def check(self, headers: Headers) -> None:
        """Check ``Host`` and ``Origin``. A request without either comes from no browser."""
        host = headers.get("host", "").lower()
        if host and not self._any_host and not self._is_allowed(host):
            raise _refused(
                f"This server does not answer to the host name {host!r:.200}; --allowed-hosts allows it",
                "host_not_allowed",
            )
        origin = headers.get("origin", "").lower()
        if origin and not self._any_origin and not self._is_known(origin, host):
            raise _refused(
                f"Pages of the origin {origin!r:.200} may not use this server; --cors-origins lets them read answers, "
                "--allowed-origins allows other programs that send this origin",
                "origin_not_allowed",
            )

    def _is_known(self, origin: str, host: str) -> bool:
        return _host_of(origin) == host or self._origins.fullmatch(origin) is not None

    def _is_allowed(self, host: str) -> bool:
        name = _name(host)
        if name is None:
            return False
        # nobody can register a name without a dot: localhost, a container, a machine
        return "." not in name or name in self._hosts or name.endswith(self._suffixes) or _is_address(name)


def origin_pattern(origins: Iterable[str]) -> str:
    """A regular expression of the origins in a setting, in lower case, without ``*``.

    ``scheme://*`` allows all origins of a scheme, ``*.example.com`` all subdomains, ``:*`` any port.
    """
    return "|".join(map(_one_pattern, filter("*".__ne__, origins)))


def _one_pattern(origin: str) -> str:
    scheme, separator, host = origin.lower().partition("://")
    host = host.rstrip("/")
    if host == "*":
        return f"{re.escape(scheme)}://[^/]*"
    name, port = (host[:-2], r"(?::\d+)?") if host.endswith(":*") else (host, "")
    subdomain = r"(?:[^/:@]+\.)" if name.startswith("*.") else ""
    return re.escape(f"{scheme}{separator}") + subdomain + re.escape(name.removeprefix("*.")) + port


def _host_of(origin: str) -> str | None:
    """Return host and port in the form of ``Host``; None for ``null`` or an invalid origin."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _name(host: str) -> str | None:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return None if name is None or "@" in host else name.rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _refused(message: str, code: str) -> RefusedError:
    return RefusedError(HTTPStatus.FORBIDDEN, message, code)
