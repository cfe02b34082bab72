"""The overhead benchmark counts what its client process reports."""

from __future__ import annotations

from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import overhead


def report(url: str, case: overhead.Case, seconds: float, results: Connection) -> None:
    results.send("warm")
    results.send((6, 1, 2.0))


def test_overhead_is_measured_of_three_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    engine = SimpleNamespace(cmdline=lambda: ["python", "-m", "vlmserve.engine.process"], pid=-1)
    frontend: Any = SimpleNamespace(children=lambda: [engine], pid=-2)

    def count(process: psutil.Process) -> float:
        measured.append(process.pid)
        return float(len(measured))

    monkeypatch.setattr(overhead, "ask", report)
    monkeypatch.setattr(overhead, "processor_seconds", count)
    result = overhead.measure("http://unused", frontend, overhead.cases(2)[1], 0.0)
    assert (result.rate, result.failed) == (6 * overhead.ANSWER_TOKENS / 2.0, 1)
    assert (result.frontend, result.engine, result.client) == (1.5, 1.5, 1.5)
    assert measured[:2] == [-2, -1]
    assert measured[2] > 0
