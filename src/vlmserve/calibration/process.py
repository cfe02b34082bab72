"""Writes a calibrated copy of a checkpoint into the cache, for the engine that started the process.

Settings come from standard input; when it closes, the process exits. Standard output gets only a failure. Several
processes wait for one copy, and resume an interrupted one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from vlmserve.calibration.quantizing import quantize_checkpoint
from vlmserve.engine.calibrated import Job
from vlmserve.engine.child import exit_with_parent
from vlmserve.engine.loading import set_threads
from vlmserve.engine.messages import Failure
from vlmserve.errors import ConfigurationError, VLMServeError
from vlmserve.logs import set_up_logging
from vlmserve.settings.base import read_settings
from vlmserve.settings.quantization import QuantizationConfig

logger = logging.getLogger(__name__)

LOGGED_SHARE = 0.1
"""Share of the work between two log lines, without a terminal."""


def make_copy(job: Job, progress: Callable[[int, int], None]) -> None:
    """Quantize a checkpoint into the cache, unless it is there. Raises as `quantize_checkpoint` does."""
    place = Path(job.place)
    unfinished = place.with_name(f"{place.name}.unfinished")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _alone(place.with_name(f"{place.name}.lock")):
            if place.is_dir():
                return
            how = read_settings(QuantizationConfig, job.settings)
            if how.method == "rtn":  # this method cannot resume
                shutil.rmtree(unfinished, ignore_errors=True)
            _, notes = quantize_checkpoint(Path(job.folder), unfinished, how, job.kernels, progress)
            for note in notes:
                logger.info("%s", note)
            os.rename(unfinished, place)
    except OSError as error:
        raise ConfigurationError(
            f"the calibrated weights cannot be written: {error.filename or place.parent}: {error.strerror}; "
            "set HF_HOME to use another folder"
        ) from error


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Another process calibrates the same weights; this one waits for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _shown() -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(console=console) as bars:
            bar = bars.add_task("Calibrating", total=None)
            yield lambda done, total: bars.update(bar, completed=done, total=total)
        return
    said = 0.0

    def say(done: int, total: int) -> None:
        nonlocal said
        if done / total >= said + LOGGED_SHARE:
            said = done / total
            logger.info("Calibrated: %.0f%%", 100 * said)

    yield say


def main() -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    set_up_logging(job.log_format, "calibration", job.log_level)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    set_threads(job.num_threads)
    answer = attempt(job)
    sys.stdout.buffer.write(answer)
    return 1 if answer else 0


def attempt(job: Job) -> bytes:
    """Returns a JSON `Failure`, or nothing."""
    try:
        with _shown() as progress:
            make_copy(job, progress)
    except VLMServeError as error:
        return msgspec.json.encode(Failure.of(error))
    return b""


if __name__ == "__main__":
    sys.exit(main())
