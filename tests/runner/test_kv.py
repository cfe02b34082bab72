"""Blocks of the KV cache that a step clears and copies."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoints import make_llama
from tests.engine.test_memory import out_of_memory
from vlmserve.devices import offload
from vlmserve.kernels import blocks
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import load_model
from vlmserve.runner import kv
from vlmserve.runner.kv import KVTensors, PoolSizes
from vlmserve.steps import BlockCopy, DiskEntry, SchedulerOutput

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = make_llama(tmp_path_factory.mktemp("llama"))
    return load_model(folder, LoadSettings(device=CPU, dtype=torch.float32, kernels="torch"))


def filled(model: LoadedModel) -> KVTensors:
    tensors, random = KVTensors(model, PoolSizes(4, 8)), torch.Generator().manual_seed(0)
    for layer in tensors.layers:
        for tensor in layer.tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=random))
    return tensors


def contents(tensors: KVTensors) -> Tensor:
    return torch.from_numpy(np.array(tensors.block_contents.of(range(8))))


def test_blocks_change_alike_without_spare_memory(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, careful = filled(model), filled(model)
    read = usual.block_contents.of([6, 7])
    copies = [BlockCopy("copy", 1, 2), BlockCopy("copy", 0, 5), BlockCopy("fill", 0, 4), BlockCopy("fill", 1, 3)]
    step = SchedulerOutput(
        blocks_to_zero=[0, 7], block_copies=copies, block_contents=[DiskEntry(b"", one) for one in read]
    )
    usual.prepare(step)
    for name in ("clear_blocks", "to_device"):
        monkeypatch.setattr(kv, name, out_of_memory)
    careful.prepare(step)
    monkeypatch.undo()
    assert torch.equal(contents(careful), contents(usual))
    assert not torch.equal(contents(usual), contents(filled(model)))


def test_written_tensors_are_not_copied_again(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source is overwritten later in the step, and memory runs out after the first tensor."""
    usual, careful, uploads = filled(model), filled(model), itertools.count()
    step = SchedulerOutput(block_copies=[BlockCopy("copy", 1, 2), BlockCopy("copy", 3, 1)])
    usual.prepare(step)

    def lacking(tensor: Tensor, device: torch.device) -> Tensor:
        return tensor if next(uploads) < 2 else out_of_memory()

    for module in (kv, blocks):
        monkeypatch.setattr(module, "to_device", lacking)
    careful.prepare(step)
    monkeypatch.undo()
    assert next(uploads) > 2
    assert torch.equal(contents(careful), contents(usual))


def test_a_copy_reads_what_earlier_ones_wrote(model: LoadedModel) -> None:
    tensors = filled(model)
    before = contents(tensors)
    pairs = [(1, 2), (2, 3), (4, 1), (3, 5), (6, 3), (3, 3), (0, 5), (5, 7)]
    tensors.prepare(SchedulerOutput(block_copies=[BlockCopy("copy", *pair) for pair in pairs]))
    holds = [0, 4, 1, 6, 4, 0, 6, 0]
    assert torch.equal(contents(tensors), before[holds])


def test_contents_are_gathered_in_parts(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = filled(model)
    whole = tensors.block_contents.of([5, 1, 2])
    monkeypatch.setattr(kv, "STAGED_BYTES", 2 * tensors.block_contents.num_bytes)
    assert offload.STAGED_BYTES > kv.STAGED_BYTES
    assert np.array_equal(tensors.block_contents.of([5, 1, 2]), whole)
