"""How the built page is served; tests/web uses it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import httpx
import pytest

from tests.server.live import LiveServer
from vlmserve.server import page

ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"
BUILT = Path(page.__file__).parent / "built"
TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "woff2": "font/woff2"}


def get(live: LiveServer, path: str, **headers: str) -> httpx.Response:
    return httpx.get(live.url + path, headers=headers, timeout=60)


def assets() -> list[str]:
    return sorted(path.name for path in (BUILT / "assets").iterdir())


def test_the_built_page_belongs_to_the_sources():
    """If not, `make web` builds it."""
    names = [path.relative_to(WEB).as_posix() for path in (WEB / "src").rglob("*") if path.is_file()]
    names += [f"reference/{path.name}" for path in (WEB / "reference").iterdir()]
    names += ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"]
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(name.encode() + b"\0" + (WEB / name).read_bytes() + b"\0")
    assert digest.hexdigest() == (BUILT / "sources.sha256").read_text().strip()


def test_page_is_small_and_ships_its_licences():
    sizes = {path: path.stat().st_size for path in BUILT.rglob("*") if path.is_file()}
    assert sum(size for path, size in sizes.items() if path.parent.name != "reference") < 1_235_000
    assert sum(sizes.values()) < 3_250_000
    licences = (BUILT / "licences.md").read_text(encoding="utf-8")
    texts = [text for text in re.split(r"(?m)^## .*$", licences) if text.strip()]
    assert len(texts) == len(set(texts))
    assert all(
        f"## {name} - " in licences
        for name in ("react", "react-dom", "react-markdown", "katex", "uplot", "lucide-react")
    )


def test_no_private_registry_stands_in_the_lockfile():
    lockfile = (WEB / "package-lock.json").read_text()
    assert not re.search(r'"resolved": "(?!https://registry\.npmjs\.org/)', lockfile)


def test_page_is_self_contained_without_inline_scripts(live):
    shown = get(live, "/")
    assert shown.status_code == 200
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in shown.headers["content-security-policy"]
    assert "unsafe" not in shown.headers["content-security-policy"]
    loaded = re.findall(r'(?:src|href)="([^"]+)"', shown.text)
    assert {address.rsplit(".", 1)[-1] for address in loaded} == {"js", "css", "svg"}
    # Relative, so that the page works wherever a proxy has put it.
    assert all(address.startswith("./assets/") for address in loaded)
    assert not re.search(r"<script[^>]*>[^<]|<style|style=|\son\w+=", shown.text)


@pytest.mark.parametrize("name", assets())
def test_assets_never_change_and_have_their_types(live, name):
    shown = get(live, f"/assets/{name}")
    kind = TYPES[name.rsplit(".", 1)[-1]]
    assert (shown.status_code, shown.headers["content-type"].split(";")[0]) == (200, kind)
    assert "immutable" in shown.headers["cache-control"]
    assert ("content-encoding" in shown.headers) == (kind != "font/woff2")
    assert shown.content == (BUILT / "assets" / name).read_bytes()
    plain = get(live, f"/assets/{name}", **{"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == shown.content


def test_page_is_revalidated_and_sent_if_changed(live):
    first = get(live, "/")
    assert first.headers["cache-control"] == "no-cache"
    again = get(live, "/", **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/assets/nothing.js", "/assets/..%2Findex.html", "/assets/", "/assets"])
def test_other_paths_lead_nowhere(live, path):
    assert get(live, path).json()["error"]["code"] == "not_found"


def test_the_page_needs_no_key(folder):
    with LiveServer(folder, server={"api_key": ("secret",)}) as server:
        assert get(server, "/").status_code == 200
        assert get(server, f"/assets/{assets()[0]}").status_code == 200
        assert get(server, "/v1/models").status_code == 401


def test_it_can_be_turned_off(folder):
    with LiveServer(folder, server={"enable_page": False}) as server:
        assert get(server, "/").status_code == 404
        assert get(server, f"/assets/{assets()[0]}").status_code == 404


def test_reference_loads_everything_from_the_server(live):
    shown = get(live, "/docs")
    assert (shown.status_code, shown.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'self'" in shown.headers["content-security-policy"]
    assert not re.search(r"<script[^>]*>[^<]|<style|style=|\son\w+=", shown.text)
    loaded = re.findall(r'(?:src|href)="([^"]+)"', shown.text)
    assert loaded == ["./docs/swagger-ui.css", "./docs/swagger-ui-bundle.js", "./docs/start.js"]
    for address in loaded:
        assert get(live, address.removeprefix(".")).status_code == 200
    assert '"./openapi.json"' in get(live, "/docs/start.js").text
    assert get(live, "/openapi.json").json()["openapi"].startswith("3.")
    assert get(live, "/docs/other.js").status_code == 404
