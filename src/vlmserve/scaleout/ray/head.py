"""Shut a cluster down after its Ray head has ended.

The head's state is in memory, and nodes end when they find a new head, so it cannot be restarted.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray._private.worker as ray_worker
from ray._private import ray_constants

from vlmserve.engine.preload import process_name
from vlmserve.scaleout.launch import MODULE

logger = logging.getLogger(__name__)

_KILL_GRACE = 5.0
"""Seconds until a killed process is gone."""


def has_ended() -> bool:
    node = ray_worker._global_node
    return node is not None and any(kind == ray_constants.PROCESS_TYPE_GCS_SERVER for kind, _ in node.dead_processes())


def log_folder() -> str:
    return str(ray_worker._global_node.get_logs_dir_path())


def log_messages() -> None:
    """Write Ray's messages to its driver, which Ray prints, into `driver.log`."""
    path = Path(log_folder(), "driver.log")

    def write(message: Mapping[str, Any], ignore_prefix: bool) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in message["lines"])

    ray_worker.print_to_stdstream = write


def drain_members(grace: float) -> None:
    """Let members finish their requests in `grace` seconds; Ray Serve cannot without a head."""
    members = []
    for process in family():
        with contextlib.suppress(psutil.Error):  # it has ended
            if is_member(process):
                process.send_signal(signal.SIGTERM)
                members.append(process)
    _, left = psutil.wait_procs(members, timeout=grace)
    if left:
        logger.warning("%d processes did not end within %g s", len(left), grace)


def is_member(process: psutil.Process) -> bool:
    """True for workers and gateways. Raises psutil.Error if the process has ended."""
    return process.name() == process_name(MODULE) or MODULE in process.cmdline()


def family() -> list[psutil.Process]:
    return list(psutil.Process().children(recursive=True))


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended
            process.kill()
    psutil.wait_procs(processes, timeout=_KILL_GRACE)
