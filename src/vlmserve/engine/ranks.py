"""Rank 0's handles on the processes of the other ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from vlmserve.devices.ranks import join, meeting_place
from vlmserve.engine.calibrated import calibrated_copy
from vlmserve.engine.child import child_environment, socket_directory
from vlmserve.engine.loading import rank_device, set_threads
from vlmserve.engine.messages import Failure
from vlmserve.engine.rank import STARTED, RankLaunch
from vlmserve.engine.rank_beats import RankBeats, RankWatch
from vlmserve.engine.shared_frames import send_frames
from vlmserve.errors import ConfigurationError, EngineDeadError, VLMServeError
from vlmserve.frames import Frames
from vlmserve.logs import log_format_in_use
from vlmserve.models.hub import resolve_model
from vlmserve.settings.config import EngineConfig

logger = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that an ending process has to store on disk what waits for it, and then to exit."""
_STDERR = 2
_THEIRS = "--model-impl transformers"


class RankProcesses:
    """Starts and ends one process for each rank but 0. A `Followers`.

    A rank without a heartbeat for `EngineConfig.rank_timeout` seconds is killed. Processes also end with this process
    or object. Raises ConfigurationError for settings that need a single rank, EngineDeadError if a rank dies at start.
    """

    def __init__(self, config: EngineConfig, folder: Path | None = None) -> None:
        for refused, flag in ((config.enable_lora, "--enable-lora"), (config.model_impl == "transformers", _THEIRS)):
            if refused:
                raise ConfigurationError(f"{flag} is for models on one device: leave --tensor-parallel-size out")
        size, device = config.tensor_parallel_size, rank_device(config, 0)
        folder = resolve_model(config.model, config.revision, config.mmproj) if folder is None else folder
        if config.quantization.calibrates:
            calibrated_copy(config, folder)  # before ranks wait for each other
        directory = socket_directory()
        self._processes = [_Process(config, folder, directory, rank) for rank in range(1, size)]
        self._watch = RankWatch([one.beats for one in self._processes], config.rank_timeout, _Killer(self._processes))
        self._close = weakref.finalize(self, _end, self._processes, self._watch, directory)
        with self.explained():
            for process in self._processes:
                process.wait_until_started()
            self.ranks = join(meeting_place(directory / "ranks", size), 0, size, device)
        set_threads(config.num_threads, size)
        where = f"{size} GPUs" if device.type == "cuda" else f"the CPU, with {torch.get_num_threads()} threads each"
        logger.info("Tensor parallelism: %d ranks on %s", size, where)

    def send(self, frames: Frames) -> None:
        self.check()
        with self.explained():
            send_frames([process.channel for process in self._processes], frames)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            expected = isinstance(error, VLMServeError) or not isinstance(error, Exception)
            reason = None if expected else self._reason()
            self.close()
            if reason is None:
                raise
            raise reason from error

    @property
    def watched(self) -> Sequence[int]:
        return [process.channel.fileno() for process in self._processes]

    @property
    def silence(self) -> float:
        return self._watch.silence

    def check(self) -> None:
        if not self._close.alive:
            raise EngineDeadError("the engine's ranks have ended")
        if select.select(self.watched, [], [], 0)[0]:
            reason = self._reason()
            self.close()
            raise reason or EngineDeadError("a rank has ended")

    def close(self) -> None:
        for process in self._processes:
            process.end()
        self._close()

    def _reason(self) -> VLMServeError | None:
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            # Other ranks end because of a killed rank.
            for process in sorted(self._processes, key=lambda process: process.hang is None):
                if (reason := process.reason()) is not None:
                    return reason
            time.sleep(0.02)
        return None


class _Process:
    """One rank's process. channel: carries steps, and back the reason why it ends."""

    def __init__(self, config: EngineConfig, folder: Path, directory: Path, rank: int) -> None:
        self.rank = rank
        self.beats = RankBeats()
        self.hang: str | None = None
        self.channel, theirs = socket.socketpair()
        launch = RankLaunch(
            rank=rank,
            channel=theirs.fileno(),
            beats=self.beats.theirs,
            directory=str(directory),
            config=config.model_dump_json(),
            folder=str(folder),
            log_level=max(logging.WARNING, logging.getLogger().getEffectiveLevel()),
            log_format=log_format_in_use(),
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vlmserve.engine.rank"],
                stdin=subprocess.PIPE,
                stdout=_STDERR,
                env=child_environment(),
                pass_fds=[theirs.fileno(), self.beats.theirs],
                process_group=0,
            )
        os.close(self.beats.theirs)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `wait_until_started` reports it
            self.process.stdin.write(msgspec.json.encode(launch) + b"\n")
            self.process.stdin.flush()

    def wait_until_started(self) -> None:
        """Wait until the rank is about to meet the others. Raises ConnectionError if it has ended."""
        if self.channel.recv(1) == b"":
            raise ConnectionError(f"rank {self.rank} has ended")

    def end(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()

    def reason(self) -> VLMServeError | None:
        if self.process.poll() is None and not self._is_ending():
            return None
        if self.hang is not None:
            return EngineDeadError(self.hang)
        said = b""
        with contextlib.suppress(ConnectionResetError):  # it ended with unread data
            while part := self.channel.recv(65536):
                said += part
        if said := said.lstrip(STARTED):
            failure = msgspec.msgpack.decode(said, type=Failure)
            return Failure(failure.kind, f"rank {self.rank}: {failure.message}", failure.param).error()
        try:
            code = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return EngineDeadError(f"rank {self.rank} has ended")
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return EngineDeadError(f"rank {self.rank} ended {how}")

    def _is_ending(self) -> bool:
        """Return whether the process sent a `Failure` or closed its channel. It may still run for seconds."""
        if not select.select([self.channel], [], [], 0)[0]:
            return False
        try:
            return self.channel.recv(len(STARTED) + 1, socket.MSG_PEEK) != STARTED
        except ConnectionResetError:
            return True


class _Killer:
    """Kills a rank that hangs, so that communication with it fails. A stopped process ignores other signals."""

    def __init__(self, processes: Sequence[_Process]) -> None:
        self._processes = processes

    def __call__(self, index: int, silence: float) -> None:
        process = self._processes[index]
        process.hang = f"rank {process.rank} did not respond for {silence:.0f} s and was killed (--rank-timeout)"
        logger.error("%s", process.hang)
        process.process.kill()


def _end(processes: Sequence[_Process], watch: RankWatch, directory: Path) -> None:
    watch.close()
    for one in processes:
        one.channel.close()
    until = time.monotonic() + GRACE
    for one in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, until - time.monotonic()))
    for one in processes:
        one.end()
    for one in processes:
        try:
            one.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
    shutil.rmtree(directory, ignore_errors=True)
