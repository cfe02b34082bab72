"""Pages of strangers cannot use a server without keys; everybody else can."""

from __future__ import annotations

import re
import socket

import httpx
import pytest
from starlette.datastructures import Headers

from tests.server.live import QUESTION, LiveServer
from vlmserve.errors import ConfigurationError
from vlmserve.server.errors import RefusedError
from vlmserve.server.origins import Origins
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import ServerConfig

BODY = {"model": "tiny", "messages": QUESTION, "max_tokens": 1}


def answers(server: LiveServer, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, str]:
    response = httpx.post(f"{server.url}{path}", json=BODY, headers=headers, timeout=60)
    return response.status_code, response.json().get("error", {}).get("code", "")


def allows(*, needs_key: bool = False, host: str | None = None, origin: str | None = None, **settings: object) -> bool:
    headers = {name: value for name, value in (("host", host), ("origin", origin)) if value is not None}
    try:
        Origins(ServerConfig(**settings), needs_key=needs_key).check(Headers(headers))
    except RefusedError:
        return False
    return True


LOCAL = ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "10.1.2.3", "vlmserve:8000", "host.docker.internal:8000"]
LOCAL += [
    "vlmserve.default.svc.cluster.local",
    "LOCALHOST.",
    "me.localhost:80",
    f"{socket.gethostname()}:1",
    "[fe80::1]",
]


@pytest.mark.parametrize("host", [None, *LOCAL])
def test_addresses_and_local_names_are_answered(host: str | None) -> None:
    assert allows(host=host)


STRANGE = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example."]
STRANGE += ["127.0.0.1@evil.example", "notlocal.com", "[::1", "xn--e1afmkfd.com"]


@pytest.mark.parametrize("host", STRANGE)
def test_registrable_names_are_rejected_unless_allowed(host: str) -> None:
    assert not allows(host=host)
    assert allows(host=host, allowed_hosts=("*",))
    assert allows(host=host, needs_key=True)
    assert not allows(host=host, needs_key=True, allowed_hosts=("chat.example.com",))


def test_hosts_may_be_named() -> None:
    settings = {"allowed_hosts": ("Chat.Example.com", "*.lab.example")}
    assert all(allows(host=host, **settings) for host in ("chat.example.com:443", "a.b.lab.example", "127.0.0.1"))
    assert not any(allows(host=host, **settings) for host in ("a.chat.example.com", "lab.example.evil", "xlab.example"))


def test_origins() -> None:
    host = "127.0.0.1:8000"
    assert allows(host=host, origin="http://127.0.0.1:8000")
    for origin in ("http://evil.example", "http://127.0.0.1:9000", "null", "http://[", "file://"):
        assert not allows(host=host, origin=origin)
        assert allows(host=host, origin=origin, needs_key=True)
        for setting in ("allowed_origins", "cors_origins"):
            assert allows(host=host, origin=origin, **{setting: ("*",)})
    assert allows(host=host, origin="app://notes", allowed_origins=("app://notes",))
    assert allows(host=host, origin="https://chat.example", cors_origins=("https://chat.example/",))
    assert not allows(host=host, origin="https://chat.example.evil", cors_origins=("https://chat.example",))


@pytest.mark.parametrize(
    ("setting", "matching", "other"),
    [
        (
            "moz-extension://*",
            ["moz-extension://6f1c-4a2b", "moz-extension://"],
            ["https://6f1c", "moz-extension-x://a"],
        ),
        ("https://*.Example.com", ["https://a.example.com", "https://a.b.example.com"], ["https://example.com"]),
        ("http://app:*", ["http://app:3000", "http://app"], ["http://app:x", "http://app.evil.example:3000"]),
        ("https://a.example:8443/", ["https://a.example:8443"], ["https://a.example", "https://aXexample:8443"]),
        ("null", ["null"], ["https://null"]),
    ],
)
@pytest.mark.parametrize("name", ["allowed_origins", "cors_origins"])
def test_origins_may_be_patterns(name: str, setting: str, matching: list[str], other: list[str]) -> None:
    assert all(allows(host="x", origin=origin, **{name: (setting,)}) for origin in matching)
    assert not any(allows(host="x", origin=origin, **{name: (setting,)}) for origin in other)


@pytest.mark.parametrize(
    "origin", ["moz-extension:*", "example.com", "https://*x.com", "https://a.example/page", "*.com"]
)
def test_origins_that_can_never_match_are_rejected(origin: str) -> None:
    with pytest.raises(ConfigurationError, match="matches no origin"):
        read_settings(ServerConfig, {"allowed_origins": [origin]})


@pytest.mark.parametrize("origin", ["chrome-extension://", "HTTPS://", "app:///", "https:"])
def test_origins_without_a_host_are_rejected(origin: str) -> None:
    pattern = f"{origin.rstrip('/')}//*"
    with pytest.raises(ConfigurationError, match=f"has no host; write {re.escape(pattern)} for all hosts"):
        read_settings(ServerConfig, {"allowed_origins": [origin]})
    assert read_settings(ServerConfig, {"allowed_origins": [pattern, "file://"]}).allowed_origins == (
        pattern,
        "file://",
    )


def test_foreign_page_uploads_and_asks_nothing(folder) -> None:
    with LiveServer(folder, server={"storage_url": "memory"}) as server:
        files = {"file": ("a.png", b"x", "image/png")}
        upload = httpx.post(
            f"{server.url}/v1/files", files=files, data={"purpose": "vision"}, headers={"origin": "http://evil.example"}
        )
        assert (upload.status_code, upload.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert httpx.get(f"{server.url}/v1/files").json()["data"] == []
        assert answers(server, host="evil.example") == (403, "host_not_allowed")
        assert answers(server, origin="null") == (403, "origin_not_allowed")
        assert answers(server) == (200, "")
        assert answers(server, origin=server.url) == (200, "")
        assert httpx.get(f"{server.url}/ready", headers={"host": "balancer.example"}).status_code == 200


def test_settings_of_cors_and_keys_go_on_working(folder) -> None:
    with LiveServer(folder, server={"cors_origins": ("https://chat.example",)}) as server:
        assert answers(server, origin="https://chat.example") == (200, "")
        assert answers(server, origin="https://other.example") == (403, "origin_not_allowed")
    with LiveServer(folder, server={"api_key": ("secret",)}) as server:
        assert answers(server, host="chat.example", origin="https://x.example", authorization="Bearer secret")[0] == 200
