#!/usr/bin/env python3
"""Check an installed wheel, as someone who has nothing else: the kernels are inside, and the model answers rightly.

Runs with the interpreter into which the wheel was installed, in an empty home and an empty folder, without the hub.

    python .ci/wheel.py examples/shapes.png
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

QUESTION = "What colour is the circle?"
TIMEOUT = 120.0
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def command(*words: str) -> list[str]:
    """The program that the wheel installed beside this interpreter."""
    return [str(Path(sys.executable).with_name("vlmserve")), *words]


def check_kernels(home: Path) -> None:
    """They were compiled, and run on this processor. An empty working directory keeps the sources out of the way."""
    code = "import vlmserve; from vlmserve.kernels.extension import supported_isas; print(vlmserve.__file__)\n"
    code += "isas = supported_isas(); print('kernels:', *isas); raise SystemExit(not isas)"
    subprocess.run([sys.executable, "-c", code], cwd=home, env=environment(home), check=True)


def check_ask(home: Path, image: Path) -> None:
    done = subprocess.run(
        command("ask", str(image), QUESTION), cwd=home, env=environment(home), stdout=subprocess.PIPE, text=True,
        timeout=TIMEOUT, check=True,
    )  # fmt: skip
    check_answer("vlmserve ask", done.stdout)


def check_serve(home: Path, image: Path) -> None:
    encoded = base64.b64encode(image.read_bytes()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "text", "text": QUESTION},
    ]
    body = {"model": "pixie", "temperature": 0, "messages": [{"role": "user", "content": parts}]}
    with serving(home) as url:
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with LOCAL.open(request, timeout=TIMEOUT) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
        with LOCAL.open(url, timeout=TIMEOUT) as response:
            page = response.read()
    check_answer("vlmserve serve", answer)
    if b"<script" not in page:
        sys.exit(f"the server's page is not in the wheel: {page[:200]!r}")


@contextmanager
def serving(home: Path) -> Iterator[str]:
    """A server, from when it is ready; yields its URL. Ctrl-C ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(command("serve", "--port", str(port)), cwd=home, env=environment(home))
    try:
        deadline = time.monotonic() + TIMEOUT
        while not is_ready(url):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"no server answers at {url} (status {server.returncode})")
            time.sleep(0.2)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def is_ready(url: str) -> bool:
    try:
        with LOCAL.open(f"{url}/ready", timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def check_answer(source: str, answer: str) -> None:
    print(f"{source}: {QUESTION} {answer.strip()}", flush=True)
    if "red" not in answer.lower().replace(".", "").split():
        sys.exit(f"{source} does not answer that the circle is red")


def environment(home: Path) -> dict[str, str]:
    """Of someone whose home is empty and who downloads no model."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLMSERVE_", "HF_", "PYTHON"))}
    return kept | {"HOME": str(home), "HF_HUB_OFFLINE": "1"}


def main() -> None:
    image = Path(sys.argv[1]).resolve()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        check_kernels(home)
        check_ask(home, image)
        check_serve(home, image)
    print(f"The wheel works; checked in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
