"""How long /health and an honest question take while clients attack the server.

    .venv/bin/python -m benchmarks.attacks
    .venv/bin/python -m benchmarks.attacks --attack storm videos --seconds 20

Each attack runs against a server of its own with default limits, from another process. Times are wall times of the
probes, which ask one after the other. The attacker shares the machine's cores with the server. Store a report in
`benchmarks/results/server/MACHINE`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from PIL import Image, ImageDraw

from benchmarks.command import keep, show_rows
from benchmarks.peers import version
from tests.media.documents_for_tests import exponential
from tests.server.test_attacks import FRAMING, MB, TEXTS, send_chunked
from tests.server.test_hostile_files import hostile, question
from tests.server.test_hostile_grammars import BODIES

Attack = Callable[[str, int], None]
"""Send something once. Takes the server's URL and a number that differs each time."""
NUM_CLIENTS = 8
"""Threads of the attacker that send at the same time."""
NUM_ABORTED = 400
"""Requests that one turn of the storm sends and leaves."""
HONEST_ANSWER = "red"
COLUMNS = [
    "Attack", "Sent", "/health, median", "/health, longest", "Question about an image, median", "Longest", "More memory"
]  # fmt: skip
NOTES = (
    "Eight attacking threads on the cores of the server, one server with default limits for each attack, one run. "
    "*storm*: each counts 50 requests whose clients leave before the answer. *connections*: each counts 400 idle "
    "connections. Memory counts the server with its decoding processes, at the largest moment."
)


def post(url: str, path: str, body: Any) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body)
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}{path}", content=content, headers={"content-type": "application/json"}, timeout=5)


def endless_grammar(url: str, number: int) -> None:
    bodies = [(path, body) for path, several in BODIES.items() for body in several]
    path, body = bodies[number % len(bodies)]
    post(url, path, {"model": "pixie", **body})


def long_text(url: str, number: int) -> None:
    body, path = list(TEXTS.values())[number % len(TEXTS)]
    post(url, path, {"model": "pixie", **body("a " * (15 * MB))})


def endless_trailers(url: str, number: int) -> None:
    begin, repeated = list(FRAMING.values())[number % len(FRAMING)]
    with contextlib.suppress(OSError):
        send_chunked(url, "/v1/chat/completions", begin, repeated * (MB // len(repeated)))


def hostile_file(kind: str) -> Attack:
    def attack(url: str, number: int) -> None:
        post(url, "/v1/chat/completions", question(hostile(kind), f"hostile {number}"))

    return attack


def small_document(url: str, number: int) -> None:
    part = {"type": "file", "file": {"file_data": base64.b64encode(exponential()).decode()}}
    post(url, "/v1/chat/completions", question(part, f"hostile {number}"))


def storm(url: str, _: int) -> None:
    """Send requests whose clients leave before the answer."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True, "ignore_eos": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    at = urlsplit(url)
    with contextlib.ExitStack() as leaving, contextlib.suppress(OSError):
        for _ in range(NUM_ABORTED // NUM_CLIENTS):
            connection = leaving.enter_context(socket.create_connection((at.hostname, at.port), timeout=10))
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def idle_connections(url: str, _: int) -> None:
    """Open connections that send nothing, more than the server accepts at once."""
    at = urlsplit(url)
    with contextlib.ExitStack() as leaving, contextlib.suppress(OSError):
        for _ in range(400):
            leaving.enter_context(socket.create_connection((at.hostname, at.port), timeout=2))
        time.sleep(1)


ATTACKS: dict[str, Attack | None] = {
    "nothing": None,
    "grammars": endless_grammar,
    "trailers": endless_trailers,
    "texts": long_text,
    "videos": hostile_file("video"),
    "documents": hostile_file("document"),
    "small documents": small_document,
    "animations": hostile_file("animation"),
    "storm": storm,
    "connections": idle_connections,
}


@contextlib.contextmanager
def served() -> Iterator[tuple[str, psutil.Process]]:
    """The URL and the process of a server with the built-in model."""
    command = [sys.executable, "-m", "vlmserve", "serve", "pixie", "--port", "0", "--storage-url", "none"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        try:
            assert process.stdout is not None
            found = None
            while found is None:
                line = process.stdout.readline()
                if not line:
                    errors.seek(0)
                    raise SystemExit(f"the server did not start:\n{errors.read()}")
                found = re.search(r"http://[\d.]+:\d+", line)
            threading.Thread(target=process.stdout.read, daemon=True).start()
            wait_healthy(found[0])
            yield found[0], psutil.Process(process.pid)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_healthy(url: str) -> None:
    for _ in range(600):
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit("the server is not healthy after a minute")


def keep_attacking(name: str, url: str, until: float, sent: Any) -> None:
    """Run an attack from several threads until a time."""
    attack, numbers = ATTACKS[name], itertools.count()
    assert attack is not None

    def run() -> None:
        while time.monotonic() < until:
            attack(url, next(numbers))
            with sent.get_lock():
                sent.value += 1

    threads = [threading.Thread(target=run, daemon=True) for _ in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(until + 1 - time.monotonic(), 0))
    os._exit(0)  # some threads still wait for answers


def repeat(ask: Callable[[], None], pause: float, over: threading.Event) -> list[float]:
    """Seconds of each call until `over`."""
    times = []
    while not over.is_set():
        began = time.monotonic()
        ask()
        times.append(time.monotonic() - began)
        over.wait(pause)
    return times


def memory(process: psutil.Process) -> int:
    """Resident bytes of a process and its children."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += one.memory_info().rss
    return total


def measure(name: str, seconds: float, image: Path) -> list[Any]:
    """One row of the report."""
    with served() as (url, process):
        numbers = itertools.count()

        def check() -> None:
            # A connection of its own each time, as those of load balancers.
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
            connection.request("GET", "/health", headers={"connection": "close"})
            assert connection.getresponse().status == 200
            connection.close()

        client = httpx.Client(timeout=120)

        def ask() -> None:
            content = [{"type": "text", "text": "What color is the circle?"}, image_part(image)]
            body = {"messages": [{"role": "user", "content": content}], "cache_salt": f"honest {next(numbers)}"}
            answer = client.post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
            assert HONEST_ANSWER in answer["choices"][0]["message"]["content"], answer

        ask()
        before, largest, over = memory(process), 0, threading.Event()
        results: dict[str, list[float]] = {}
        probes = [
            threading.Thread(target=lambda: results.update(health=repeat(check, 0.02, over))),
            threading.Thread(target=lambda: results.update(question=repeat(ask, 0.2, over))),
        ]
        sent = multiprocessing.Value("l", 0)
        until = time.monotonic() + seconds
        attacker = multiprocessing.get_context("fork").Process(target=keep_attacking, args=(name, url, until, sent))
        if ATTACKS[name] is not None:
            attacker.start()
        for probe in probes:
            probe.start()
        while time.monotonic() < until:
            largest = max(largest, memory(process))
            time.sleep(0.2)
        over.set()
        for probe in probes:
            probe.join()
        if ATTACKS[name] is not None:
            attacker.join()
    assert set(results) == {"health", "question"}, f"{name}: a probe failed"
    health, asked = results["health"], results["question"]
    times = [statistics.median(health), max(health), statistics.median(asked), max(asked)]
    shown = [f"{value * 1000:.0f} ms" for value in times]
    return [name, f"{sent.value:,}", *shown, f"{(largest - before) / 1e9:.1f} GB"]


def image_part(path: Path) -> dict[str, Any]:
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def red_circle(folder: Path) -> Path:
    image = Image.new("RGB", (224, 224), "white")
    ImageDraw.Draw(image).ellipse((60, 60, 164, 164), fill="red")
    path = folder / "circle.png"
    image.save(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--attack", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10, help="how long each attack lasts (default 10)")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        image = red_circle(Path(folder))
        for kind in ("video", "document", "animation"):
            hostile(kind)  # made once, before times are taken
        rows = []
        for name in options.attack:
            rows.append(measure(name, options.seconds, image))
            show_rows({"columns": COLUMNS, "rows": rows[-1:]})
    report = {
        "title": "Honest clients during attacks",
        "command": f".venv/bin/python -m benchmarks.attacks --seconds {options.seconds:g}",
        "model": "pixie",
        "weights": "",
        "versions": {package: version(package) for package in ("vlmserve", "torch")},
        "columns": COLUMNS,
        "rows": rows,
        "notes": NOTES,
    }
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()
