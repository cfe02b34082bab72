"""What the server costs around the engine: requests and streamed tokens a second with an engine that does nothing.

    .venv/bin/python -m benchmarks.overhead                        # on two cores, beside the client

Starts `vlmserve serve --engine mock` and asks over kept connections, with a client that parses no more than it must.
The processor seconds of each process say what one core of each would do alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.command import keep
from benchmarks.soak import server

ANSWER_TOKENS = 100
"""Of each answer in the measurement of streams."""


@dataclass(frozen=True)
class Case:
    """A kind of load. work: what is counted, for each answer."""

    name: str
    unit: str
    work: int
    connections: int
    body: dict[str, Any]


def cases(connections: int) -> list[Case]:
    """Short answers, one by one, and long ones, token by token."""
    question = {"model": "pixie", "messages": [{"role": "user", "content": "How many circles are there?"}]}
    one = {**question, "max_tokens": 1}
    long = {**question, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}
    return [
        Case("short answers", "requests", 1, connections, one),
        Case("streams", "tokens", ANSWER_TOKENS, connections, long),
    ]


class Asker(asyncio.Protocol):
    """One connection, which asks again as soon as it is answered."""

    def __init__(self, request: bytes, stream: bool) -> None:
        self._request = request
        self._end = b"0\r\n\r\n" if stream else b""
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.answered = 0
        self.failed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not (self._buffer.endswith(self._end) if self._end else self._is_whole()):
            return
        good = self._buffer.startswith(b"HTTP/1.1 200") and (not self._end or b"[DONE]" in self._buffer[-40:])
        self.answered += good
        self.failed += not good
        self._buffer.clear()
        assert self._transport is not None
        self._transport.write(self._request)

    def _is_whole(self) -> bool:
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return False
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return len(body) >= int(length)


def ask(url: str, case: Case, seconds: float, results: Connection) -> None:
    """Ask for some seconds, after one to warm up, and send how many answers came, how many failed, and the time."""
    asyncio.run(_ask(url, case, seconds, results))


async def _ask(url: str, case: Case, seconds: float, results: Connection) -> None:
    address = urlsplit(url)
    body = json.dumps(case.body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    loop = asyncio.get_running_loop()
    askers = []
    for _ in range(case.connections):
        _, asker = await loop.create_connection(
            lambda: Asker(request, bool(case.body.get("stream"))), address.hostname, address.port
        )
        askers.append(asker)
    await asyncio.sleep(1)
    results.send("warm")
    before, started = sum(asker.answered for asker in askers), time.monotonic()
    await asyncio.sleep(seconds)
    answered = sum(asker.answered for asker in askers) - before
    results.send((answered, sum(asker.failed for asker in askers), time.monotonic() - started))


@dataclass(frozen=True)
class Result:
    """A rate, and processor seconds a second of each process."""

    case: str
    unit: str
    rate: float
    failed: int
    frontend: float
    engine: float
    client: float

    @property
    def rate_of_a_core(self) -> float:
        """What the frontend would do with a core of its own."""
        return self.rate / self.frontend


def measure(url: str, frontend: psutil.Process, case: Case, seconds: float) -> Result:
    """One case, with a client in a process of its own."""
    [engine] = [child for child in frontend.children() if "vlmserve.engine.process" in child.cmdline()]
    receiver, sender = multiprocessing.Pipe(duplex=False)
    client = multiprocessing.Process(target=ask, args=(url, case, seconds, sender))
    client.start()
    receiver.recv()
    processes = [frontend, engine, psutil.Process(client.pid)]
    before = [processor_seconds(process) for process in processes]
    answered, failed, elapsed = receiver.recv()
    spent = [(processor_seconds(process) - start) / elapsed for process, start in zip(processes, before, strict=True)]
    client.join()
    return Result(case.name, case.unit, answered * case.work / elapsed, failed, *spent)


def processor_seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return times.user + times.system
    return 0.0


def medians(results: list[Result]) -> Iterator[Result]:
    """The result of median rate of each case."""
    for name in dict.fromkeys(result.case for result in results):
        of_case = sorted((result for result in results if result.case == name), key=lambda result: result.rate)
        middle = statistics.median_low([result.rate for result in of_case])
        yield next(result for result in of_case if result.rate == middle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    results = []
    with server(["--engine", "mock", "--max-num-seqs", "1024"]) as (url, frontend):
        for _ in range(arguments.repeats):
            for case in cases(arguments.connections):
                results.append(measure(url, frontend, case, arguments.seconds))
    table = Table("load", "a second", "failed", "frontend", "engine", "client", "one core of the frontend")
    for result in medians(results):
        shares = [f"{share:.0%}" for share in (result.frontend, result.engine, result.client)]
        rate = f"{result.rate:,.0f} {result.unit}"
        table.add_row(result.case, rate, str(result.failed), *shares, f"{result.rate_of_a_core:,.0f} {result.unit}")
    Console().print(table)
    keep({"connections": arguments.connections, "results": [asdict(result) for result in results]}, arguments)


if __name__ == "__main__":
    main()
