"""What the load tester costs: its processor time at many streams, and what its clock adds to the first token.

    .venv/bin/python -m benchmarks.loadtest                        # 500 streams, five turns

The clock is measured against a server of this file, which streams at a known pace and notes when it got each request
and when it wrote each first token; all of that but the difference is its own. The processor time is that of a test of
`vlmserve serve --engine mock`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.command import keep
from benchmarks.soak import server
from vlmserve.loadtest.perform import perform
from vlmserve.loadtest.report import Report
from vlmserve.loadtest.run import Counts
from vlmserve.loadtest.settings import LoadConfig, TestConfig, WorkloadConfig

DELAY = 0.05
"""Seconds until the known server's first token."""
PACE = 0.1
TOKENS = 10


class KnownServer(asyncio.Protocol):
    """Streams `TOKENS` words over one connection, and notes how long the first took."""

    taken: list[float] = []  # noqa: RUF012  shared by all connections on purpose

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._head = b""

    def data_received(self, data: bytes) -> None:
        got = time.perf_counter()
        self._head += data
        head, found, body = self._head.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if not found or len(body) < length:
            return
        self._head = b""
        if head.startswith(b"POST /v1/chat"):
            self._task = asyncio.get_running_loop().create_task(self._stream(got))
            return
        models = b'{"data":[{"id":"known"}]}' if head.startswith(b"GET /v1/models") else b"{}"
        status = b"200 OK" if head.startswith(b"GET /v1/models") else b"404 Not Found"
        self._transport.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(models), models))

    async def _stream(self, got: float) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(DELAY)
        for place in range(TOKENS):
            if place == 0:
                self.taken.append(time.perf_counter() - got)
            self._event({"choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]})
            await asyncio.sleep(PACE)
        usage = {"prompt_tokens": 9, "completion_tokens": TOKENS, "total_tokens": 9 + TOKENS}
        self._event({"choices": [], "usage": usage})
        self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _event(self, value: object) -> None:
        event = b"data: " + json.dumps(value).encode() + b"\n\n"
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))


def serve_known(pipe: Connection) -> None:
    """Serve on a free port, which is sent; answer every message with the seconds of first tokens since the last."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(KnownServer, "127.0.0.1", 0, backlog=2048)
        pipe.send(listening.sockets[0].getsockname()[1])
        asked = asyncio.Event()
        loop.add_reader(pipe.fileno(), asked.set)
        while True:
            await asked.wait()
            asked.clear()
            pipe.recv()
            pipe.send(list(KnownServer.taken))
            KnownServer.taken.clear()

    uvloop.run(main())


class Silent:
    """Watches nothing."""

    def stage(self, text: str, total: int | None) -> None: ...

    def advance(self, done: int, counts: Counts | None) -> None: ...


def measure(url: str, load: LoadConfig, num_prompts: int, tokens: int) -> Report:
    """A load test without anything on the terminal."""
    workload = WorkloadConfig(num_prompts=num_prompts, random_input_len=16, random_output_len=tokens)
    return uvloop.run(perform(TestConfig(url=url, workload=workload, load=load), Silent()))


@dataclass(frozen=True)
class Clock:
    """Milliseconds of first tokens as the client and as the server saw them, medians."""

    streams: int
    client_ms: float
    server_ms: float
    cores: float

    @property
    def added_ms(self) -> float:
        return self.client_ms - self.server_ms


def measure_clock(streams: int, seconds: float) -> Clock:
    """An open loop of so many streams on average: in a closed one they would all begin at the same moments."""
    rate = streams / (DELAY + PACE * TOKENS)
    load = LoadConfig(request_rate=rate, num_warmups=streams)
    pipe, other = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve_known, args=(other,), daemon=True)
    process.start()
    try:
        report = measure(f"http://127.0.0.1:{pipe.recv()}", load, max(20, int(rate * seconds)), TOKENS)
        pipe.send("taken")
        # Those of the probe and of the warm-up came first.
        taken = pipe.recv()[-(report.num_good + report.num_failed) :]
    finally:
        process.terminate()
    ttft = report.latency_ms["ttft"]
    assert ttft is not None
    return Clock(streams, ttft.median, statistics.median(taken) * 1e3, report.client.cores or 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    clocks, cores, rates = [], [], []
    with server(["--engine", "mock", "--mock-ttft", "0.05", "--mock-tpot", "0.02", "--max-num-seqs", "1024"]) as (
        url,
        _,
    ):
        for _ in range(arguments.repeats):
            for streams in (1, 64, arguments.streams):
                clocks.append(measure_clock(streams, arguments.seconds))
            load = LoadConfig(
                max_concurrency=arguments.streams, duration=arguments.seconds, num_warmups=arguments.streams
            )
            report = measure(url, load, arguments.streams * 20, 100)
            cores.append(report.client.cores or 0.0)
            rates.append(report.throughput.output_tokens)
    table = Table("streams", "client's TTFT", "server's TTFT", "added", "client")
    for streams in (1, 64, arguments.streams):
        of = [clock for clock in clocks if clock.streams == streams]
        times = [statistics.median(getattr(one, name) for one in of) for name in ("client_ms", "server_ms", "added_ms")]
        used = statistics.median(one.cores for one in of)
        table.add_row(str(streams), *(f"{time:.2f} ms" for time in times), f"{used:.2f} cores")
    console = Console()
    console.print(table)
    console.print(
        f"{arguments.streams} streams of the mock engine: {statistics.median(rates):,.0f} tokens/s with "
        f"{statistics.median(cores):.2f} of a core ({min(cores):.2f} to {max(cores):.2f})"
    )
    keep({"clocks": [asdict(one) for one in clocks], "cores": cores, "tokens_per_s": rates}, arguments)


if __name__ == "__main__":
    main()
