"""KV blocks and pixels that cross beside what the device computes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.engine.test_memory import out_of_memory
from tests.lazy_stream import LazyStream
from vlmserve.devices import offload
from vlmserve.devices.offload import PinnedBlocks, PlainBlocks, block_bytes
from vlmserve.devices.pixels import PixelRing
from vlmserve.kernels.attention import LayerCache
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layer_specs import AttentionSpec

CPU = torch.device("cpu")
SPECS = [AttentionSpec(2, 1, 6, 1.0), AttentionSpec(2, 2, 5, 1.0)]


def caches(backend: TorchReference, count: int) -> list[LayerCache]:
    return [backend.allocate(count, 3, spec, torch.bfloat16, CPU) for spec in SPECS]


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("lacks_memory", [False, True])
def test_blocks_come_back_as_they_were_saved(
    quantized: bool, lazy: bool, lacks_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "STAGED_BYTES", 1000)
    if lacks_memory:
        monkeypatch.setattr(offload, "to_device", out_of_memory)
    backend, draw = TorchReference(cache_type="int8" if quantized else "auto"), random.Random(0)
    ours, theirs = caches(backend, 8), caches(backend, 8)
    pinned = PinnedBlocks(ours, torch.zeros(6, block_bytes(ours), dtype=torch.uint8), LazyStream(lazy=lazy))
    plain = PlainBlocks(theirs, caches(backend, 6))
    assert 1 < 1000 // block_bytes(ours) < 5, "several blocks at a time, and not all"
    for number in range(60):
        # What a step computes.
        for our, their in zip(ours, theirs, strict=True):
            for one, other in zip(our.tensors, their.tensors, strict=True):
                one[number % 8] = other[number % 8] = number % 100 + 1
        count = draw.randint(1, 6)
        blocks, places = draw.sample(range(8), count), draw.sample(range(6), count)
        for host in (pinned, plain):
            if number % 3 < 2:
                host.save(blocks, places)
            else:
                host.load(places, blocks)
        for our, their in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, our.tensors, their.tensors))


@pytest.mark.parametrize("lazy", [False, True])
def test_images_arrive_through_few_buffers(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmserve.devices.pixels.FIRST_BYTES", 64)
    stream = LazyStream(lazy=lazy)
    # The device computes nothing yet: nobody waits for a copy but the host, for memory.
    monkeypatch.setattr(stream, "let_compute_wait", lambda _: None)
    ring = PixelRing(stream, count=2, pinned=False)
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, (1, 3, side, side), np.uint8) for side in (4, 2, 9, 4, 4)]
    images.append(draw.standard_normal((1, 3, 2, 2), np.float32))
    uploaded = [ring.upload(image) for image in images]
    stream.record().synchronize()
    for image, tensor in zip(images, uploaded, strict=True):
        assert torch.equal(tensor, torch.from_numpy(image))
