"""What a gateway adds: requests straight to a worker, through a gateway over HTTP, and through a handle of Ray Serve.

    .venv/bin/python -m benchmarks.transports               # all three, two minutes; needs the extra `ray`
    .venv/bin/python -m benchmarks.transports --without-ray

One worker with a mock engine that answers at a fixed pace. The client sends requests in turn through the transports and
compares in the same run. With Ray Serve, a minimal gateway in this process reads the body and gets the answer's bytes
from a streaming call of a deployment, which asks the same worker: the least that a gateway on handles does.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks.command import keep
from tests.mock_checkpoint import make_mock_checkpoint
from tests.scaleout.processes import TOKEN, Cluster
from vlmserve.scaleout.messages import ROUTE_HEADER, TOKEN_HEADER
from vlmserve.scaleout.upstream import Upstream

Ask = Callable[[bytes], AsyncIterator[bytes]]

_PAUSE = 0.1
"""Seconds, at most, between two requests of a stream."""


@dataclass
class Timing:
    """Of the requests of one transport. Times in seconds. cpu: of the gateway's processes."""

    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    cpu: float = 0.0


def body(tokens: int, size: int) -> bytes:
    """A request for so many tokens, with an image of noise that makes it about `size` bytes."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "What is in the picture?"}]
    side = int((size * 3 / 4 / 3) ** 0.5)
    if side > 32:
        file = io.BytesIO()
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})
    fields = {
        "model": "tiny", "stream": True, "temperature": 0, "max_tokens": tokens, "ignore_eos": True,
        "messages": [{"role": "user", "content": content}],
    }  # fmt: skip
    return msgspec.json.encode(fields)


async def stream(ask: Ask, sent: bytes, timing: Timing) -> None:
    began = time.perf_counter()
    first = last = 0.0
    events = 0
    async for data in ask(sent):
        last = time.perf_counter()
        first = first or last
        events += data.count(b"data: ")
    timing.first.append(first - began)
    timing.per_token.append((last - first) / max(1, events - 2))
    timing.tokens += events - 2


async def warm(ask: Ask, sent: bytes, streams: int) -> None:
    """Open the connections, and have everything loaded that a request needs."""
    for _ in range(2):
        await asyncio.gather(*(stream(ask, sent, Timing()) for _ in range(streams)))


async def measure(
    ask: Ask, sent: bytes, streams: int, repeats: int, processes: list[psutil.Process], timing: Timing
) -> None:
    """Add so many requests of each stream. Streams wait at random between two requests: else all come at once again
    and again, and be told apart by whether they all catch the same step of the engine."""
    source = random.Random(streams)

    async def one() -> None:
        for _ in range(repeats):
            await asyncio.sleep(source.uniform(0, _PAUSE))
            await stream(ask, sent, timing)

    def cpu() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before, began = cpu(), time.perf_counter()
    await asyncio.gather(*(one() for _ in range(streams)))
    timing.seconds += time.perf_counter() - began
    timing.cpu += cpu() - before


def over_http(url: str, headers: dict[str, str]) -> Ask:
    upstream = Upstream(url, {"Content-Type": "application/json", **headers})

    async def ask(sent: bytes) -> AsyncIterator[bytes]:
        async with upstream.request("POST", "/v1/chat/completions", (), sent) as answer:
            assert answer.status == 200, await answer.read()
            while data := await answer.read():
                yield data

    return ask


@contextlib.contextmanager
def over_handle(worker: str) -> Any:
    """A streaming call of Ray Serve's, and the processes that it takes."""
    import ray
    from ray import serve

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 1024**2, log_to_driver=False
    )
    serve.start(proxy_location="Disabled")
    replica: Any = serve.deployment(_Handle, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1})
    handle = serve.run(replica.bind(worker), route_prefix=None).options(stream=True)

    async def ask(sent: bytes) -> AsyncIterator[bytes]:
        async for data in handle.answer.remote(sent):
            yield data

    try:
        mine = psutil.Process()
        yield ask, [mine, *(p for p in mine.children(recursive=True) if "ServeReplica" in " ".join(p.cmdline()))]
    finally:
        serve.shutdown()
        ray.shutdown()


class _Handle:
    """A worker as a deployment whose answers go through Ray."""

    def __init__(self, url: str) -> None:
        self._ask = over_http(url, {TOKEN_HEADER: TOKEN, ROUTE_HEADER: "bench.1"})

    async def answer(self, sent: bytes) -> AsyncIterator[bytes]:
        async for data in self._ask(sent):
            yield data


def figures(timing: Timing) -> dict[str, float]:
    cuts = statistics.quantiles(timing.first, n=100)
    return {
        "ttft_ms_p50": 1e3 * cuts[49],
        "ttft_ms_p99": 1e3 * cuts[98],
        "token_ms_p50": 1e3 * statistics.median(timing.per_token),
        "cpu_us_per_token": 1e6 * timing.cpu / max(1, timing.tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transports", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=30)
    parser.add_argument("--requests", type=int, default=240, help="of each row")
    parser.add_argument("--rounds", type=int, default=5, help="in which transports take turns")
    parser.add_argument("--bodies", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--without-ray", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args()
    console = Console(width=140)
    rows: list[dict[str, Any]] = []
    engine = {"mock_ttft": 0.02, "mock_tpot": 0.02}
    big = {"max_body_bytes": 64 * 1024**2}
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = make_mock_checkpoint(place)
        quiet = {"access_log": False}
        cluster = stack.enter_context(
            Cluster(folder, 1, engine=engine, server={**quiet, **big}, front={**quiet, **big})
        )
        [(_, worker)] = cluster.workers.values()
        gateway = [psutil.Process(cluster.gateway.pid)]
        direct = {TOKEN_HEADER: TOKEN, ROUTE_HEADER: "bench.1"}
        asks: dict[str, tuple[Ask, list[psutil.Process]]] = {
            "direct": (over_http(worker, direct), []),
            "gateway over HTTP": (over_http(cluster.url, {}), gateway),
        }
        if not options.without_ray:
            asks["handle of Ray Serve"] = stack.enter_context(over_handle(worker))
        settings = [(streams, 0) for streams in options.streams] + [(1, size) for size in options.bodies]
        for streams, size in settings:
            sent, repeats = body(options.tokens, size), max(2, options.requests // options.rounds // streams)
            timings = {name: Timing() for name in asks}
            for ask, _ in asks.values():
                asyncio_run(warm(ask, sent, streams))
            for _ in range(options.rounds):
                for name, (ask, processes) in asks.items():
                    asyncio_run(measure(ask, sent, streams, repeats, processes, timings[name]))
            rows += [
                {"transport": name, "streams": streams, "body": size, **figures(timing)}
                for name, timing in timings.items()
            ]
    table = Table("streams", "body", "transport", "TTFT p50", "p99", "per token", "gateway's CPU a token")
    for row in rows:
        table.add_row(
            str(row["streams"]), f"{row['body']:,}", row["transport"], f"{row['ttft_ms_p50']:.1f} ms",
            f"{row['ttft_ms_p99']:.1f} ms", f"{row['token_ms_p50']:.2f} ms", f"{row['cpu_us_per_token']:.0f} us",
        )  # fmt: skip
    console.print(table)
    keep({"rows": rows}, options)


_loop = asyncio.new_event_loop()


def asyncio_run(work: Any) -> Any:
    """All on one loop: the connections and the handle belong to it."""
    return _loop.run_until_complete(work)


if __name__ == "__main__":
    main()
