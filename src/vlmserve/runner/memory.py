"""How much memory the KV cache may take."""

from __future__ import annotations

import psutil
import torch

from vlmserve.errors import ConfigurationError

CPU_SHARE = 0.5
"""Of the memory that is free once the model is loaded; the rest is for activations and everybody else."""


def free_memory(device: torch.device, fraction: float) -> int:
    """Bytes that the KV cache may take on a device, once the model is loaded.

    fraction: share of a GPU's memory that weights, activations and cache may use in all.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - total * (1 - fraction))
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() * fraction) - torch.mps.driver_allocated_memory()
    return int(psutil.virtual_memory().available * CPU_SHARE)


def num_kv_blocks(*, budget: int, bytes_per_block: int, block_size: int, max_model_len: int, max_num_seqs: int) -> int:
    """Blocks that fit into `budget` bytes, at most as many as `max_num_seqs` full contexts can fill.

    Raises ConfigurationError if not even one block and the token after it fit.
    """
    useful = max_num_seqs * -(-max_model_len // block_size)
    blocks = min(budget // bytes_per_block, useful)
    if blocks < 1:
        raise ConfigurationError(
            f"the KV cache has {max(budget, 0):,} bytes and a block of {block_size} tokens needs {bytes_per_block:,}; "
            "free memory, set --kv-cache-memory, or take a smaller model or dtype"
        )
    return blocks
