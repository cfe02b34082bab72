#!/usr/bin/env python3
"""Check an installed wheel as a newcomer: kernels, questions, downloads, JSON from the API, and the page.

Runs with the interpreter into which the wheel was installed, in an empty home and an empty folder. A stand-in replaces
the hub. The page is checked where Playwright and Chromium are installed.

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
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
QUESTION = "What colour is the circle?"
SHAPES = {("red", "circle"), ("blue", "square"), ("yellow", "triangle")}
"""Colours and shapes in `examples/shapes.png`."""
TIMEOUT = 120.0
SETTINGS = ("VLMSERVE_", "HF_", "PYTHON", "XDG_")
"""Prefixes of variables that name settings, or folders of whoever runs this."""
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
    check_answer("vlmserve ask", run(home, "ask", str(image), QUESTION))


def check_run(home: Path, image: Path) -> None:
    done = run(home, "run", "pixie", typed=f"/image {image}\n{QUESTION}\n/quit\n")
    check_answer("vlmserve run", done)


def check_downloads(home: Path) -> None:
    """A model is downloaded, listed and removed."""
    from tests.hub import REPOSITORY, serving_hub

    with serving_hub() as hub:
        for words, is_there in ((("pull", REPOSITORY), True), (("rm", "--yes", REPOSITORY), False)):
            run(home, *words, HF_ENDPOINT=hub, HF_HUB_OFFLINE="0")
            if (REPOSITORY in run(home, "list")) != is_there:
                sys.exit(f"vlmserve list {'lacks' if is_there else 'has'} {REPOSITORY} after vlmserve {words[0]}")
    print("vlmserve pull, list and rm: a model came and went", flush=True)


def check_page(url: str, image: Path) -> None:
    """The page answers a question about an image in Chromium."""
    if find_spec("playwright") is None:
        return print("The page was not opened: Playwright is not installed", flush=True)
    from playwright.sync_api import sync_playwright

    from tests.web.browser import ARGUMENTS, find_chromium
    from tests.web.page import answer_of, ask

    if (chromium := find_chromium()) is None:
        return print("The page was not opened: there is no Chromium", flush=True)
    with sync_playwright() as driver:
        page = driver.chromium.launch(executable_path=chromium, args=ARGUMENTS).new_page()
        page.goto(url)
        ask(page, QUESTION, image)
        check_answer("The page", answer_of(page, 0))


def run(home: Path, *words: str, typed: str = "", **variables: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        command(*words), cwd=home, env=environment(home) | variables, input=typed, stdout=subprocess.PIPE, text=True,
        timeout=TIMEOUT, check=True,
    )  # fmt: skip
    return done.stdout


def check_serve(home: Path, image: Path) -> None:
    with serving(home) as url:
        check_answer("vlmserve serve", complete(url, image, QUESTION))
        check_json(url, image)
        with LOCAL.open(url, timeout=TIMEOUT) as response:
            document = response.read()
        if b"<script" not in document:
            sys.exit(f"the server's page is not in the wheel: {document[:200]!r}")
        check_page(url, image)


def check_json(url: str, image: Path) -> None:
    """A drawing becomes JSON that fits a schema and has all shapes."""
    words = {name: {"type": "string"} for name in ("colour", "shape")}
    one = {"type": "object", "properties": words, "required": [*words]}
    shapes = {"type": "object", "properties": {"shapes": {"type": "array", "items": one}}, "required": ["shapes"]}
    form = {"type": "json_schema", "json_schema": {"name": "shapes", "schema": shapes}}
    answer = complete(url, image, "Which shapes are there?", response_format=form)
    print(f"Shapes as JSON: {answer}", flush=True)
    if {(shape["colour"], shape["shape"]) for shape in json.loads(answer)["shapes"]} != SHAPES:
        sys.exit(f"the shapes are {SHAPES}")


def complete(url: str, image: Path, question: str, **fields: Any) -> str:
    """Ask a server a question about an image."""
    encoded = base64.b64encode(image.read_bytes()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "text", "text": question},
    ]
    body = {"model": "pixie", "temperature": 0, "messages": [{"role": "user", "content": parts}], **fields}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with LOCAL.open(request, timeout=TIMEOUT) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


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
    """An empty home, no settings and no downloads."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    return kept | {"HOME": str(home), "HF_HUB_OFFLINE": "1"}


def main() -> None:
    image = Path(sys.argv[1]).resolve()
    # Helpers of the tests need nothing but the standard library and Playwright. Other packages have a module `tests`.
    sys.modules["tests"] = tests = ModuleType("tests")
    tests.__path__ = [str(ROOT / "tests")]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        check_kernels(home)
        check_ask(home, image)
        check_run(home, image)
        check_downloads(home)
        check_serve(home, image)
    print(f"The wheel works; checked in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
