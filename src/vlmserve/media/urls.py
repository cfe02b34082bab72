"""Normalize URLs as browsers do: encode whitespace and non-ASCII characters."""

from __future__ import annotations

from urllib.parse import quote, urlsplit, urlunsplit

_ALLOWED = "%:/?#[]@!$&'()*+,;=~"
"""Reserved characters of RFC 3986, and the percent sign."""


def ascii_url(url: str) -> str:
    """IDNA host, the rest percent-encoded UTF-8. Raises ValueError."""
    parts = urlsplit(url.strip())
    if any(char < " " or char == "\x7f" for char in url.strip(" \t\r\n")):
        raise ValueError("it contains a control character")
    host, colon, port = (parts.netloc, "", "") if parts.netloc.isascii() else parts.netloc.partition(":")
    return urlunsplit(
        (
            parts.scheme,
            ascii_host(host) + colon + port,
            quote(parts.path, safe=_ALLOWED),
            quote(parts.query, safe=_ALLOWED),
            "",
        )
    )


def ascii_host(name: str) -> str:
    return name if name.isascii() else name.encode("idna").decode("ascii")
