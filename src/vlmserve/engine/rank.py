"""The process of a following rank: it loads its shard of the model, then runs rank 0's steps."""

from __future__ import annotations

import logging
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from vlmserve.devices.ranks import join, meeting_place
from vlmserve.engine.child import exit_with_parent
from vlmserve.engine.disk import disk_tier
from vlmserve.engine.loading import cache_sizes, load, rank_device
from vlmserve.engine.messages import Failure
from vlmserve.engine.rank_beats import beat
from vlmserve.engine.shared_frames import receive_frames
from vlmserve.errors import VLMServeError
from vlmserve.frames import Buffer, unpack
from vlmserve.garbage import freeze_loaded_objects
from vlmserve.layers.parallel import Ranks
from vlmserve.logs import LogFormat, set_up_logging
from vlmserve.runner.ranks import FollowingRunner, RankMessage
from vlmserve.settings.config import EngineConfig

logger = logging.getLogger(__name__)

STARTED = b"+"
"""A rank sends this after its imports. A `Failure` may follow before it exits."""
_PARENT_ENDS = 1.0
"""Seconds to find out that rank 0 has ended, after communication broke."""


class RankLaunch(msgspec.Struct, frozen=True):
    """The process's settings, one line of JSON. channel, beats: file descriptors. directory: where ranks meet."""

    rank: int
    channel: int
    beats: int
    directory: str
    config: str
    folder: str
    log_level: int
    log_format: LogFormat


def follow(config: EngineConfig, folder: Path, ranks: Ranks, steps: Iterable[Sequence[Buffer]]) -> None:
    """Load this rank's shard, then follow rank 0's packed messages."""
    model = load(config, folder, ranks)
    sizes = cache_sizes(config, model)
    tier = disk_tier(config, model, ranks.rank)
    runner = FollowingRunner(model, sizes.pools, ranks, tier)
    if tier is not None and config.enable_prefix_caching:
        tier.prepare(runner.blocks.populate)
    runner.warm_up()
    for frames in steps:
        runner.follow(unpack(frames, RankMessage))


def main() -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankLaunch)
    set_up_logging(launch.log_format, f"rank {launch.rank}", launch.log_level)
    directory = Path(launch.directory)
    threading.Thread(target=exit_with_parent, args=(directory,), daemon=True).start()
    threading.Thread(target=beat, args=(launch.beats,), daemon=True).start()
    config = EngineConfig.model_validate_json(launch.config)
    with socket.socket(fileno=launch.channel) as channel:
        try:
            device = rank_device(config, launch.rank)
            channel.sendall(STARTED)
            size = config.tensor_parallel_size
            ranks = join(meeting_place(directory / "ranks", size), launch.rank, size, device)
            follow(config, Path(launch.folder), ranks, _steps(channel))
        except VLMServeError as error:
            channel.sendall(msgspec.msgpack.encode(Failure.of(error)))
            return 1
        except Exception:
            if not _has_ended(channel):
                logger.exception("The rank failed")
            return 1
    return 0


def _steps(channel: socket.socket) -> Iterator[Sequence[Buffer]]:
    freeze_loaded_objects()
    while frames := receive_frames(channel):
        yield frames


def _has_ended(channel: socket.socket) -> bool:
    readable, _, _ = select.select([channel], [], [], _PARENT_ENDS)
    return bool(readable) and channel.recv(1, socket.MSG_PEEK) == b""


if __name__ == "__main__":
    sys.exit(main())
