"""A stand-in for the Hugging Face hub, with the standard library only."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPOSITORY = "owner/tiny"
FILES = {"config.json": b"{}", "model.safetensors": bytes(20_000_000)}
COMMIT = "c" * 40


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for a download."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{REPOSITORY}"):
            entries = ", ".join(f'{{"rfilename": "{name}"}}' for name in FILES)
            body = f'{{"id": "{REPOSITORY}", "sha": "{COMMIT}", "siblings": [{entries}]}}'.encode()
            if "/tree/" in path:
                tree = (f'{{"type": "file", "path": "{name}", "size": 2, "oid": "{COMMIT}"}}' for name in FILES)
                body = f"[{', '.join(tree)}]".encode()
        elif path.startswith(f"/{REPOSITORY}/resolve/") and path.rpartition("/")[2] in FILES:
            body = FILES[path.rpartition("/")[2]]
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving_hub() -> Iterator[str]:
    """A hub on a free port; yields its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
