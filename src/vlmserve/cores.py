"""Divides CPU cores among threads, and limits how long waiting threads spin."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from vlmserve.cgroups import ControlGroups, read

SHARED_BY_ALL = 4
"""With up to this many cores, sharing all beats leaving one free."""
SPIN_VARIABLE = "GOMP_SPINCOUNT"
MAX_SPINS = 2000
"""Maximum checks of a waiting thread before it sleeps. GNU OpenMP's default is 300,000."""


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Limit the spinning of GNU OpenMP's threads, before the first import of torch.

    On busy cores, spinning threads slow the threads they wait for: by default, a matmul can take 30x as long.
    """
    if not spinning_is_bounded(environment):
        environment[SPIN_VARIABLE] = str(MAX_SPINS)


def spinning_is_bounded(environment: Mapping[str, str]) -> bool:
    """True if this environment limits spinning to `MAX_SPINS`."""
    spins = environment.get(SPIN_VARIABLE, "").strip()
    if not spins:
        return environment.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"
    return spins.isdecimal() and int(spins) <= MAX_SPINS  # not "infinite", "30k"


def usable_cores(groups: ControlGroups | None = None) -> int:
    """Logical cores within affinity and container limits."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_quota(folder) for folder in (groups or ControlGroups()).folders("cpu"))
    return min([cores, *(math.ceil(quota) for quota in quotas if quota is not None)])


def _quota(folder: Path) -> float | None:
    allowed, _, period = read(folder / "cpu.max").partition(" ")
    if not allowed:
        allowed, period = read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
    try:
        quota = int(allowed) / int(period)
    except ValueError:  # "max", or a missing file
        return None
    return quota if quota > 0 else None


def engine_threads(cores: int | None = None, threads_per_core: int | None = None) -> int:
    """cores: logical (default: this machine's).

    A matmul waits for its slowest thread, so on a large machine the engine leaves cores to the server process.
    """
    cores = usable_cores() if cores is None else cores
    if cores <= SHARED_BY_ALL:
        return cores
    if threads_per_core is None:
        import psutil  # lazy: every command imports this module

        threads_per_core = (psutil.cpu_count() or 1) // (psutil.cpu_count(logical=False) or 1)
    if threads_per_core > 1:
        # A core's two threads share its arithmetic units; leave the second to other work.
        return cores // threads_per_core
    return cores - max(1, cores // 16)


def media_threads(cores: int | None = None) -> int:
    """Threads that decode and resize. cores: as in `engine_threads`."""
    cores = usable_cores() if cores is None else cores
    return min(8, max(2, cores // 8))
