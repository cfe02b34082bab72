"""Ranks through `torch.distributed`: gloo on CPUs, NCCL on NVIDIA GPUs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vlmserve.errors import ConfigurationError

TIMEOUT = timedelta(minutes=30)
"""A rank may load weights from a slow disk while the others wait."""


class ProcessRanks:
    """Processes on one machine, without torch's global group."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        """group: a `ProcessGroupGloo` or `ProcessGroupNCCL`; torch's stubs lack their methods."""
        self._group = group
        self.rank, self.size = rank, size

    def sum(self, tensor: Tensor) -> Tensor:
        self._group.allreduce([tensor], dist.ReduceOp.SUM).wait()
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        self._group.allreduce([tensor], dist.ReduceOp.MAX).wait()
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._group.allgather([parts], [tensor]).wait()
        return parts


def device_of_rank(device: torch.device, rank: int, size: int) -> torch.device:
    """A GPU, or the CPU that all share. Raises ConfigurationError for too few GPUs."""
    if device.type == "cpu":
        return device
    if str(device) != "cuda":
        raise ConfigurationError(f"--tensor-parallel-size {size} needs --device cuda or cpu, not {device}")
    if torch.cuda.device_count() < size:
        raise ConfigurationError(
            f"--tensor-parallel-size {size} needs as many GPUs, and torch sees {torch.cuda.device_count()} here"
        )
    return torch.device("cuda", rank)


def meeting_place(file: Path, size: int) -> Any:
    return dist.FileStore(str(file), size)  # type: ignore[attr-defined]


def join(store: Any, rank: int, size: int, device: torch.device) -> ProcessRanks:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        torch.cuda.set_device(device)
        return ProcessRanks(dist.ProcessGroupNCCL(store, rank, size, options), rank, size)
    gloo: Any = dist.ProcessGroupGloo
    return ProcessRanks(gloo(store, rank, size, _loopback(gloo)), rank, size)


def _loopback(gloo: Any) -> Any:
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    return options
