from __future__ import annotations

import contextlib
import contextvars
import gzip
import http.server
import ssl
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpcore
import pytest

from tests.certificates import make_certificate
from tests.media.images_for_tests import encoded, noise
from vlmserve.cancellation import client
from vlmserve.errors import ImageFetchError, ImageTooLargeError
from vlmserve.media import fetch
from vlmserve.media.fetch import fetch_file, is_public
from vlmserve.settings.config import MediaConfig

IMAGE = encoded(noise(12, 9))
Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


class Site:
    """A web server on this machine that answers as the tests say."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                site.answers[self.path](self)

            def log_message(self, *args: Any) -> None:
                return

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def url(self, path: str, answer: Answer, host: str = "127.0.0.1") -> str:
        self.answers[path] = answer
        return f"{self._scheme}://{host}:{self.server.server_port}{path}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with contextlib.closing(Site()) as site:
        yield site


def limits(**changes: Any) -> MediaConfig:
    return MediaConfig(allowed_media_hosts=("127.0.0.1",), **changes)


def send(body: bytes = IMAGE, status: int = 200, **headers: str) -> Answer:
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        try:
            request.wfile.write(body)
        except OSError:
            return

    return answer


def test_an_image_is_fetched(site: Site) -> None:
    assert fetch_file(site.url("/image.png?size=1", send()), limits()) == IMAGE


def test_redirects_are_followed_up_to_the_limit(site: Site) -> None:
    site.url("/there", send())
    url = site.url("/here", send(b"", 302, Location="there"))
    assert fetch_file(url, limits(max_redirects=1)) == IMAGE
    with pytest.raises(ImageFetchError, match="redirects more than 0 times"):
        fetch_file(url, limits(max_redirects=0))


def test_a_loop_of_redirects_ends(site: Site) -> None:
    with pytest.raises(ImageFetchError, match="redirects more than 3 times"):
        fetch_file(site.url("/loop", send(b"", 301, Location="/loop")), limits())


@pytest.mark.parametrize(
    "target", ["file:///etc/hostname", "ftp://127.0.0.1/a", "gopher://127.0.0.1", "data:image/png,a"]
)
def test_a_redirect_leads_only_to_the_web(site: Site, target: str) -> None:
    with pytest.raises(ImageFetchError, match="http and https"):
        fetch_file(site.url("/away", send(b"", 302, Location=target)), limits())


def test_a_redirect_cannot_lead_inside(site: Site) -> None:
    inside = site.url("/secret", send(), host="localhost")
    asked = len(site.asked)
    with pytest.raises(ImageFetchError, match="not a public address"):
        fetch_file(site.url("/out", send(b"", 302, Location=inside)), limits())
    assert site.asked[asked:] == ["/out"]


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "LOCALHOST", "127.1", "2130706433", "0x7f.1", "0x7f000001", "0177.0.0.1", "0",
     "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:0:0:1]", "[::]"],
)  # fmt: skip
def test_hosts_inside_the_network_are_refused_unless_allowed(site: Site, host: str) -> None:
    asked = len(site.asked)
    with pytest.raises(ImageFetchError, match="not a public address"):
        fetch_file(site.url("/inside", send(), host), MediaConfig())
    assert len(site.asked) == asked


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:10.0.0.1",
     "64:ff9b::a00:1", "2002:a00:1::", "0.1.2.3", "127.255.0.1", "100.127.255.255", "169.254.170.2", "192.0.0.8",
     "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "239.1.1.1", "240.0.0.1",
     "::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1",
     "64:ff9b::169.254.169.254", "64:ff9b:1::1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001::1", "2001:db8::1",
     "2001:0:4136:e378:8000:63bf:f5ff:fffe", "3fff::1", "100::1", "fec0::1", "fd00:ec2::254", "fe80::1%25eth0",
     "5f00::1", "ff0e::1"],
)  # fmt: skip
def test_addresses_inside_networks_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["93.184.215.14", "100.63.255.255", "100.128.0.1", "172.32.0.1", "2606:4700::1111", "2001:4860:4860::8888",
     "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"],
)  # fmt: skip
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


def test_name_is_resolved_once_and_connected_as_checked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [["93.184.215.14"], ["127.0.0.1"]]
    connected = []

    def connect(self: object, host: str, *_: object) -> None:
        connected.append(host)
        raise fetch.httpcore.ConnectError("nobody there")

    monkeypatch.setattr(fetch, "resolve_host", lambda host, port, timeout: answers.pop(0))
    monkeypatch.setattr(fetch.httpcore.SyncBackend, "connect_tcp", connect)
    with pytest.raises(ImageFetchError, match="nobody there"):
        fetch_file(site.url("/twice", send(), "rebinding.example"), MediaConfig())
    assert connected == ["93.184.215.14"]
    assert len(answers) == 1


def test_a_redirect_is_resolved_and_checked_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"allowed.example": ["127.0.0.1"], "inside.example": ["127.0.0.1"]}
    monkeypatch.setattr(fetch, "resolve_host", lambda host, port, timeout: addresses[host])
    inside = site.url("/metadata", send(), "inside.example")
    url = site.url("/hop", send(b"", 307, Location=inside), "allowed.example")
    asked = len(site.asked)
    with pytest.raises(ImageFetchError, match=r"inside\.example was not found or is not a public"):
        fetch_file(url, MediaConfig(allowed_media_hosts=("allowed.example",)))
    assert site.asked[asked:] == ["/hop"]


def test_a_name_with_one_inside_address_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "resolve_host", lambda host, port, timeout: ["93.184.215.14", "127.0.0.1"])
    with pytest.raises(ImageFetchError, match="not a public address"):
        fetch_file(site.url("/rebound", send(), "example.com"), limits())


def test_only_listed_hosts_are_looked_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []

    def resolve(host: str, port: int, timeout: float) -> list[str]:
        looked_up.append(host)
        return ["127.0.0.1"]

    monkeypatch.setattr(fetch, "resolve_host", resolve)
    monkeypatch.setattr(fetch, "is_public", lambda address: True)
    listed = MediaConfig(allowed_media_domains=("Images.example", "10.0.0.1"))
    url = site.url("/listed", send(), "images.EXAMPLE")
    assert fetch_file(url, listed) == IMAGE
    for host in ("sub.images.example", "example", "images.example.", "127.0.0.1"):
        with pytest.raises(ImageFetchError, match="not one of the hosts"):
            fetch_file(site.url("/listed", send(), host), listed)
    away = site.url("/away", send(b"", 302, Location=site.url("/listed", send(), "other.example")), "images.example")
    with pytest.raises(ImageFetchError, match="not one of the hosts"):
        fetch_file(away, listed)
    assert {host.lower() for host in looked_up} == {"images.example"}
    assert fetch_file(site.url("/listed", send()), limits(allowed_media_domains=("images.example",))) == IMAGE


def test_listed_host_must_still_be_public(site: Site) -> None:
    with pytest.raises(ImageFetchError, match="not a public address"):
        fetch_file(site.url("/inside", send(), "localhost"), MediaConfig(allowed_media_domains=("localhost",)))


def test_next_address_is_tried_after_a_dead_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "resolve_host", lambda host, port, timeout: ["127.0.0.2", "127.0.0.1"])
    assert fetch_file(site.url("/second", send()), limits()) == IMAGE


@pytest.mark.parametrize("status", [404, 500, 403, 204])
def test_other_answers_are_reported(site: Site, status: int) -> None:
    with pytest.raises(ImageFetchError, match=f"answered {status}"):
        fetch_file(site.url("/missing", send(b"", status)), limits())


def test_declared_oversized_body_is_not_read(site: Site) -> None:
    url = site.url("/large", send(b"", Content_Length="1000000"))
    with pytest.raises(ImageTooLargeError, match="1,000,000 bytes"):
        fetch_file(url, limits(max_image_bytes=1000))


def test_undeclared_oversized_body_is_cut_off(site: Site) -> None:
    with pytest.raises(ImageTooLargeError):
        fetch_file(site.url("/endless", send(bytes(2_000_000))), limits(max_image_bytes=1000))


def test_a_body_shorter_than_announced_is_refused(site: Site) -> None:
    with pytest.raises(ImageFetchError, match="not fetched"):
        fetch_file(site.url("/short", send(Content_Length=str(len(IMAGE) + 5))), limits())


def test_bodies_that_are_compressed_unasked_are_inflated(site: Site) -> None:
    for name, body in (
        ("gzip", gzip.compress(IMAGE, mtime=0)),
        ("X-GZIP", gzip.compress(IMAGE, mtime=0)),
        ("deflate", zlib.compress(IMAGE)),
    ):
        assert fetch_file(site.url("/zip", send(body, Content_Encoding=name)), limits()) == IMAGE
    with pytest.raises(ImageFetchError, match="truncated"):
        fetch_file(site.url("/zip", send(gzip.compress(IMAGE)[:-9], Content_Encoding="gzip")), limits())
    with pytest.raises(ImageFetchError, match="gzip encoding is broken"):
        fetch_file(site.url("/zip", send(IMAGE, Content_Encoding="gzip")), limits())
    with pytest.raises(ImageFetchError, match="Content-Encoding 'br'"):
        fetch_file(site.url("/zip", send(IMAGE, Content_Encoding="br")), limits())


def test_compressed_bomb_stops_at_the_limit(site: Site) -> None:
    bomb = gzip.compress(bytes(400_000_000), 1)
    url = site.url("/bomb", send(bomb, Content_Encoding="gzip"))
    tracemalloc.start()
    with pytest.raises(ImageTooLargeError):
        fetch_file(url, limits(max_image_bytes=1_000_000))
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/日本 語.png?größe=1 2", "/%E6%97%A5%E6%9C%AC%20%E8%AA%9E.png?gr%C3%B6%C3%9Fe=1%202"),
        ("/a%20b.png?x=%2B+1", "/a%20b.png?x=%2B+1"),
        ("/a.png#part", "/a.png"),
    ],
)
def test_urls_are_percent_encoded(site: Site, path: str, asked: str) -> None:
    url = site.url(asked, send())
    root = url[: -len(asked)]
    assert fetch_file(f" {root}{path}\n", limits()) == IMAGE
    assert site.asked[-1] == asked


def test_redirects_in_utf_8_are_followed(site: Site) -> None:
    site.url("/%C3%BC%20x", send())
    location = "/ü x".encode().decode("latin-1")  # as http.server writes bytes
    assert fetch_file(site.url("/utf", send(b"", 302, Location=location)), limits()) == IMAGE


@pytest.mark.parametrize("host", ["\uff11\uff12\uff17.0.0.1", "\u24dbocalhost", "127\u30020\u30020\u30021"])
def test_host_check_ignores_case(site: Site, host: str) -> None:
    asked = len(site.asked)
    url = site.url("/inside", send(), host=host)
    with pytest.raises(ImageFetchError, match="not a public address"):
        fetch_file(url, MediaConfig())
    assert len(site.asked) == asked


def check_deadline(site: Site, where: str) -> None:
    """A server that sends single bytes is given up in time."""
    stop = threading.Event()

    def drip(request: http.server.BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.0 200 OK\r\n" + (b"\r\n" if where == "body" else b"X-Slow: "))
        while not stop.wait(0.02):
            try:
                request.wfile.write(b"x")
            except OSError:
                return

    with pytest.raises(ImageFetchError, match=r"longer than 0\.3 s"):
        fetch_file(site.url(f"/drip-{where}", drip), limits(fetch_timeout=0.3))
    stop.set()


@pytest.mark.parametrize("where", ["head", "body"])
def test_a_server_that_drips_bytes_gains_no_time(site: Site, where: str) -> None:
    check_deadline(site, where)


def test_https_needs_a_trusted_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, certificate = make_certificate(tmp_path)
    with contextlib.closing(Site(server)) as site:
        with pytest.raises(ImageFetchError, match="certificate verify failed"):
            fetch_file(site.url("/image.png", send()), limits())
        assert not site.asked
        pool = httpcore.ConnectionPool

        def trusting(ssl_context: ssl.SSLContext, **options: Any) -> httpcore.ConnectionPool:
            return pool(ssl_context=ssl.create_default_context(cafile=str(certificate)), **options)

        monkeypatch.setattr(httpcore, "ConnectionPool", trusting)
        assert fetch_file(site.url("/image.png", send()), limits()) == IMAGE
        check_deadline(site, "body")


def test_slow_name_resolution_gains_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    enough, resolved = threading.Event(), threading.Event()

    def never_resolves(*args: Any) -> list[Any]:
        enough.wait(20)
        resolved.set()
        return []

    monkeypatch.setattr(fetch.socket, "getaddrinfo", never_resolves)
    with pytest.raises(ImageFetchError, match="longer than"):
        fetch_file("http://slow.example/a.png", limits(fetch_timeout=0.1))
    assert not resolved.is_set()
    enough.set()


def test_missing_hosts_and_closed_ports_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImageFetchError, match=r"no-such-host\.invalid was not found"):
        fetch_file("http://no-such-host.invalid/a.png", limits())
    with pytest.raises(ImageFetchError, match="refused"):
        fetch_file("http://127.0.0.1:1/a.png", limits())


def test_an_answer_that_is_not_http_is_reported(site: Site) -> None:
    def babble(request: http.server.BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"SSH-2.0-hello\r\n\r\n")

    with pytest.raises(ImageFetchError, match="not fetched"):
        fetch_file(site.url("/ssh", babble), limits())


@pytest.mark.parametrize(
    "url",
    ["http://", "http:///a.png", "http://127.0.0.1:99999/", "http://[::1/", "http://127.0.0.1 /a", "http://a\nb/",
     "http://127.0.0.1:0/", "http://user:password@127.0.0.1/a.png", "http://日..本/", "http://a/\ud800",
     "http:127.0.0.1"],
)  # fmt: skip
def test_malformed_urls_are_refused(url: str) -> None:
    with pytest.raises(ImageFetchError, match="URL"):
        fetch_file(url, limits())


def test_error_messages_omit_the_url_query(site: Site) -> None:
    with pytest.raises(ImageFetchError) as caught:
        fetch_file(site.url("/private?token=hunter2", send(b"", 404)), limits())
    assert "hunter2" not in str(caught.value)


def test_a_redirect_to_a_malformed_url_is_refused(site: Site) -> None:
    url = site.url("/malformed", send(b"", 302, Location="http://[::1"))
    with pytest.raises(ImageFetchError, match="malformed"):
        fetch_file(url, limits())


def test_missing_and_internal_names_give_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = []
    for addresses in ([], ["10.0.0.1"]):
        monkeypatch.setattr(fetch, "resolve_host", lambda host, port, timeout, found=addresses: found)
        with pytest.raises(ImageFetchError) as caught:
            fetch_file("http://db.corp.example/", MediaConfig())
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_slow_names_of_one_client_delay_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    over, waiting = threading.Event(), threading.Semaphore(0)

    def resolve(host: str, port: int, *_: Any) -> list[Any]:
        if host == "slow":
            waiting.release()
            over.wait(60)
        return [(0, 0, 0, "", (host, port))]

    monkeypatch.setattr(fetch.socket, "getaddrinfo", resolve)
    lookups = fetch.Lookups(capacity=4, per_client=3)

    def find(name: str, host: str, timeout: float) -> list[Any]:
        client.set(name)
        return lookups.find(host, 80, timeout)

    with ThreadPoolExecutor(10) as threads:
        slow = [threads.submit(contextvars.Context().run, find, "many", "slow", 0.5) for _ in range(10)]
        for _ in range(3):
            assert waiting.acquire(timeout=20)
        assert contextvars.Context().run(find, "one", "quick", 20)
        for one in slow:
            with pytest.raises(TimeoutError):
                one.result(20)
        assert contextvars.Context().run(find, "one", "quick", 20), "abandoned lookups still count"
        assert not waiting.acquire(blocking=False), "at most three run"
        over.set()
        assert contextvars.Context().run(find, "many", "quick", 20)
