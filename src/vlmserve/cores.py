"""How many CPU cores there are to use, who gets them, and how long a thread that waits keeps its own.

torch's threads work in step: each product waits for the slowest of them, so one that shares its core with an image's
decoder holds up all. On a small machine everything shares; on a large one the engine leaves some cores to the server's
process.

A thread of torch that waits for the others of its team spins before it sleeps, which is faster than waking up. OpenMP
spins for milliseconds: as soon as anything else computes on the same cores, the threads that spin hold up the ones that
they wait for, and a product takes thirty times as long. Spinning for some 20 microseconds is as fast on an idle
machine. The native kernels have threads of their own (`kernels/csrc/threads.cpp`), which do not wait for a late one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from vlmserve.cgroups import ControlGroups, read

SHARED_BY_ALL = 4
"""Up to so many cores, leaving one free costs more than sharing it."""
SPIN_VARIABLE = "GOMP_SPINCOUNT"
MAX_SPINS = 2000
"""How often a waiting thread looks before it sleeps, at most. GNU OpenMP's default is 300,000."""


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Let threads of GNU OpenMP spin no longer than `MAX_SPINS`, whatever the environment says.

    It reads its environment once, when it is loaded: this has to come before the first import of torch.
    """
    if not spinning_is_bounded(environment):
        environment[SPIN_VARIABLE] = str(MAX_SPINS)


def spinning_is_bounded(environment: Mapping[str, str]) -> bool:
    """Whether GNU OpenMP, loaded in this environment, spins no longer than `MAX_SPINS`."""
    spins = environment.get(SPIN_VARIABLE, "").strip()
    if not spins:
        return environment.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"
    return spins.isdecimal() and int(spins) <= MAX_SPINS  # not "infinite", "30k"


def usable_cores(groups: ControlGroups | None = None) -> int:
    """Logical cores that this process may run on at a time: those it is bound to, and those its container is given."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_quota(folder) for folder in (groups or ControlGroups()).folders("cpu"))
    return min([cores, *(math.ceil(quota) for quota in quotas if quota is not None)])


def _quota(folder: Path) -> float | None:
    """Cores that a control group is given, if it is limited."""
    allowed, _, period = read(folder / "cpu.max").partition(" ")
    if not allowed:
        allowed, period = read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
    try:
        quota = int(allowed) / int(period)
    except ValueError:  # "max", or no such file
        return None
    return quota if quota > 0 else None


def engine_threads(cores: int | None = None, threads_per_core: int | None = None) -> int:
    """Threads of the engine on so many logical cores; default: those of this machine."""
    cores = usable_cores() if cores is None else cores
    if cores <= SHARED_BY_ALL:
        return cores
    if threads_per_core is None:
        import psutil  # not above: every command reads the settings, which this module is part of

        threads_per_core = (psutil.cpu_count() or 1) // (psutil.cpu_count(logical=False) or 1)
    if threads_per_core > 1:
        # The two threads of a core share what products need; the second ones are left to everything else.
        return cores // threads_per_core
    return cores - max(1, cores // 16)


def media_threads(cores: int | None = None) -> int:
    """Threads that decode and resize images on so many logical cores; default: those of this machine."""
    cores = usable_cores() if cores is None else cores
    return min(8, max(2, cores // 8))
