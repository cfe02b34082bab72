from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vlmserve.kernels.attention import AttentionBackend
from vlmserve.kernels.blocks import allocate_zeros, populate
from vlmserve.kernels.cpu_attention import CpuAttention, unsupported_reason
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layer_specs import AttentionSpec

CPU = torch.device("cpu")
SPEC = AttentionSpec(num_heads=4, num_kv_heads=4, head_size=64, scale=0.125)


def test_contents_stay_when_memory_is_given() -> None:
    blocks = allocate_zeros((600, 1000), torch.float32, torch.device("cpu"))
    blocks[3] = 7.0
    populate(blocks[1:], 500)
    assert blocks[3].eq(7).all()
    assert blocks.sum() == 7000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", [CpuAttention, TorchReference])
def test_writing_a_block_takes_little_memory(kind: Callable[[], AttentionBackend]) -> None:
    if kind is CpuAttention and (reason := unsupported_reason(SPEC, torch.float32, CPU)) is not None:
        pytest.skip(reason)
    cache = kind().allocate(1000, 16, SPEC, torch.float32, CPU)
    cache.keys[500] = 1.0
    assert 0 < _resident_bytes(cache.keys) < 2 * cache.keys[:1].nbytes


def _resident_bytes(tensor: Tensor) -> int:
    """Memory of the mapping that holds a tensor."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no mapping holds the tensor")
