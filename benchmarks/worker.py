"""A system in a process of its own: several of them can be measured in turns, and sleep while others work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from rich.console import Console

Work = TypeVar("Work")


class Worker:
    """The other process, seen from here. `seconds_to_ready`: what loading took.

    Raises RuntimeError, here and from `run`, when the process ends instead of answering; `log` says why.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], log: Path) -> None:
        """module: is run with those arguments and calls `serve`."""
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        self.seconds_to_ready: float = self._answer()["ready"]

    def run(self, **request: Any) -> float:
        """Seconds that a request takes."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def start_workers(
    module: str, arguments: Mapping[str, Sequence[str]], logs: Path, console: Console
) -> Iterator[list[Worker]]:
    """A worker for each name, which gets those arguments. One that does not start is reported and left out."""
    with ExitStack() as stack:
        workers: list[Worker] = []
        for name in arguments:
            log = logs / f"{name}.log"
            try:
                with console.status(f"{name}: loading"):
                    worker = Worker(name, module, arguments[name], log)
            except RuntimeError as error:
                console.print(f"{error} before it was ready; {log} says why", style="red")
            else:
                workers.append(stack.enter_context(worker))
        yield workers


def serve(load: Callable[[], None], prepare: Callable[[dict[str, Any]], Work], run: Callable[[Work], None]) -> None:
    """Load, then do what each line of standard input asks for, and answer with the seconds that `run` took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    started = time.perf_counter()
    load()
    print(json.dumps({"ready": time.perf_counter() - started}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        work = prepare(request)
        started = time.perf_counter()
        run(work)
        print(json.dumps({"seconds": time.perf_counter() - started}), file=answers, flush=True)
