"""How long calls take on a device."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

Call = Callable[[], object]
T = TypeVar("T")

CALLS = 20
"""Of a captured sequence, at least."""
REPLAYS = 4
"""Of a captured sequence that are timed together."""
LEAST_REPEATS = 4
"""Of a measurement, the first of which does not count."""
MOST_SECONDS = 0.5
"""For the repeats of one measurement. Calls that take long need few repeats for a median."""
CACHES = 4
"""Copies of what a call reads take as much memory as so many L2 caches, so that none of it is there when it is read
again."""


class Launch(NamedTuple):
    """What calls took. seconds: of one call. note: why calls that a GPU could have repeated as a graph came from the
    host instead, so that its time may be in them; else empty."""

    seconds: float
    note: str = ""

    def named(self, name: str) -> dict[str, float | str]:
        """Microseconds by that name, and the note if there is one."""
        report: dict[str, float | str] = {name: self.seconds * 1e6}
        return report | ({f"{name}, note": self.note} if self.note else {})


def seconds_of(work: Call, device: torch.device, repeats: int) -> float:
    """The median of several runs, after one that does not count. The device has computed before the clock is read."""
    taken = []
    for _ in range(repeats + 1):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def wait(device: torch.device) -> None:
    """Until the device has computed all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what the models that are gone have taken on a GPU: a model and its graphs hold each other."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def per_launch(calls: Sequence[Call], device: torch.device, repeats: int) -> Launch:
    """The time of one of some calls in a row; the median over repeats.

    A GPU repeats them as one captured graph, and its own events time that: from the host, a launch takes 20 to 30
    microseconds, more than many kernels. The pause between two kernels of a graph counts, as it does in captured steps.
    What cannot be captured is called from the host, with a note. `calls` do the same with other memory each, see
    `copies`. Raises what a first call raises.
    """
    if device.type != "cuda":
        return Launch(seconds_of(lambda: [call() for call in calls], device, repeats) / len(calls))
    sequence = list(calls) * -(-CALLS // len(calls))
    try:
        graph = capture(calls, sequence, device)
    except CannotCaptureError as error:
        taken = seconds_of(lambda: [call() for call in sequence], device, repeats)
        return Launch(taken / len(sequence), f"not captured: {error}")
    return Launch(_seconds_of_replay(graph, device, repeats) / len(sequence))


class CannotCaptureError(Exception):
    pass


def capture(calls: Sequence[Call], sequence: Sequence[Call], device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of a sequence of calls, each of which runs once before: first calls compile and allocate."""
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        # Not `torch.cuda.graph`, which collects garbage each time: the search for tilings captures hundreds of graphs.
        torch.cuda.synchronize(device)
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in sequence:
                    call()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            cause = error.__context__ or error
            raise CannotCaptureError(f"{type(cause).__name__}: {cause}".splitlines()[0]) from error
    current.wait_stream(stream)
    return graph


def _seconds_of_replay(graph: torch.cuda.CUDAGraph, device: torch.device, repeats: int) -> float:
    stream = torch.cuda.current_stream(device)
    taken: list[float] = []
    while len(taken) <= repeats and (len(taken) < LEAST_REPEATS or sum(taken) * (REPLAYS + 1) < MOST_SECONDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The first one keeps the device busy until the others are launched.
        graph.replay()
        start.record(stream)
        for _ in range(REPLAYS):
            graph.replay()
        end.record(stream)
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3 / REPLAYS)
    return statistics.median(taken[1:])


def copies(original: T, num_bytes: int, device: torch.device) -> list[T]:
    """Something of so many bytes and copies of it, which together do not fit into the device's caches: what a call
    reads again and again would be read from there, as it is not in a model. On a CPU, no copies."""
    if device.type != "cuda":
        return [original]
    count = -(-CACHES * torch.cuda.get_device_properties(device).L2_cache_size // num_bytes)
    return [original, *(copy.deepcopy(original) for _ in range(count - 1))]
