"""Checkpoints whose files hold all experts of a layer in one tensor, either way around, or each expert by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_decoder import load
from tests.models.test_families import make
from vlmserve.models.identity import weights_digest
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint

UPS, DOWNS = ".experts.gate_up_proj", ".experts.down_proj"


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("stacked"), "qwen3_moe")


def rewritten(folder: Path, to: Path, *, inputs_first: bool) -> Path:
    """The same checkpoint with inputs first, or with each expert by itself."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        before, _, last = name.rpartition(".")
        if not name.endswith((UPS, DOWNS)):
            tensors[name] = tensor
        elif inputs_first:
            tensors[name] = tensor.transpose(1, 2).contiguous()
        elif name.endswith(DOWNS):
            tensors |= {f"{before}.{number}.{last}.weight": one.clone() for number, one in enumerate(tensor)}
        else:
            for number, one in enumerate(tensor):
                for part, rows in zip(("gate_proj", "up_proj"), one.chunk(2), strict=True):
                    tensors[f"{before}.{number}.{part}.weight"] = rows.clone()
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("inputs_first", [True, False], ids=["inputs first", "one by one"])
def test_layouts_load_the_same_experts(stacked: Path, tmp_path: Path, inputs_first: bool) -> None:
    expected = load(stacked).language_model
    actual = load(rewritten(stacked, tmp_path / "other", inputs_first=inputs_first)).language_model
    tokens = torch.arange(3, 20)
    x = expected.embed(tokens)
    for ours, theirs in zip(actual.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.mlp(x).inputs, theirs.mlp(x).inputs, atol=0, rtol=0)


def test_loading_hashes_stacked_tensors(stacked: Path) -> None:
    checkpoint = Checkpoint(stacked, Description.read(stacked).rename)
    for name in checkpoint.names:
        checkpoint.hash(name)
    assert weights_digest(stacked, checkpoint.digests) == weights_digest(stacked)
