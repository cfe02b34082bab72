"""The layer for multi-token prediction against its formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gguf_files import write_gguf
from tests.models.test_decoder import assert_equal, token_sequences
from tests.models.test_families import make
from tests.models.test_gguf import make as make_text
from tests.mtp_checkpoints import GLMReference, Reference, add_glm_mtp, add_mtp
from tests.ocr_checkpoints import make_glm4v, make_glm_ocr
from tests.paged import BlockTables
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import load_model

CPU = torch.device("cpu")


MAKE: dict[str, Callable[[Path], Path]] = {
    "qwen3.5": lambda folder: add_mtp(make(folder, "qwen3.5")),
    "qwen3.5 with shared keys": lambda folder: add_mtp(make(folder, "qwen3.5 with shared keys")),
    "qwen3.5 in GGUF": lambda folder: add_mtp(make(folder, "qwen3.5")),
    "GLM-4.5": lambda folder: add_glm_mtp(make(folder, "glm4_moe")),
    "GLM-4.5V": lambda folder: add_glm_mtp(make_glm4v(folder, "Glm4vMoe")),
    "GLM-OCR": lambda folder: add_glm_mtp(make_glm_ocr(folder)),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", MAKE)
@torch.inference_mode()
def test_logits_of_mtp_equal_its_formula(tmp_path: Path, name: str) -> None:
    folder = path = MAKE[name](tmp_path)
    if name.endswith("GGUF"):
        path = write_gguf(folder, tmp_path / "model.gguf")
    loaded = load_model(path, LoadSettings(CPU, torch.float32, drafts=True))
    model = loaded.language_model
    reference = GLMReference(folder) if name.startswith("GLM") else Reference(folder)
    sequences = token_sequences(min(300, model.vocab_size), [40, 1, 23])
    embeddings, hidden, states = predicted(loaded, sequences)
    expected = [reference.states(*both) for both in zip(embeddings, hidden, strict=True)]
    assert_equal(states, [one.float() for one in expected])
    logits = [model.logits(one) for one in states]
    assert_equal(logits, [reference.logits(one).float() for one in expected])


def predicted(
    loaded: LoadedModel, sequences: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Embeddings and random hidden states of three sequences, and the layer's states after chunks of them."""
    model, predictor = loaded.language_model, loaded.predictor
    assert predictor is not None
    embeddings = [model.embed(sequence) for sequence in sequences]
    hidden = [torch.randn(one.shape, generator=torch.Generator().manual_seed(len(one))) for one in embeddings]
    tables = BlockTables([len(one) for one in sequences], 4)
    caches = model.allocate_cache(tables.num_blocks, 4)
    states: list[list[torch.Tensor]] = [[] for _ in sequences]
    for chunks in ([(1, 0, 1), (0, 0, 33), (2, 0, 5)], [(0, 33, 1), (2, 5, 1)], [(0, 34, 6), (2, 6, 17)]):
        rows = [slice(before, before + new) for _, before, new in chunks]
        numbers = [number for number, *_ in chunks]
        joined = [torch.cat([of[number][row] for number, row in zip(numbers, rows, strict=True)])
                  for of in (embeddings, hidden)]  # fmt: skip
        positions = torch.cat([torch.arange(row.start, row.stop) for row in rows])
        metadata = replace(tables.metadata(chunks), states=None)
        found = predictor.predict(*joined, positions, metadata, caches, torch.arange(len(positions)))
        for number, part in zip(numbers, found.split([row.stop - row.start for row in rows]), strict=True):
            states[number].append(part)
    return embeddings, hidden, [torch.cat(parts) for parts in states]


@torch.inference_mode()
def test_gguf_of_glm_ocr_has_its_mtp_layer(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "mrope_section": [2, 2, 2]}
    folder = add_mtp(make_text(tmp_path / "folder", "glm4", rope_parameters=rope))
    path = write_gguf(folder, tmp_path / "model.gguf", metadata={"glm4.rope.dimension_sections": [2, 2, 2, 0]})
    sequences, settings = token_sequences(300, [40, 1, 23]), LoadSettings(CPU, torch.float32, drafts=True)
    of_folder, of_file = (predicted(load_model(one, settings), sequences)[2] for one in (folder, path))
    torch.testing.assert_close(of_file, of_folder, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lacking", ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", None])
def test_incomplete_mtp_layers_are_ignored(tmp_path: Path, lacking: str | None, caplog: Any) -> None:
    folder = MAKE["qwen3.5"](tmp_path)
    change(folder, lambda tensors: tensors.pop(str(lacking), None))
    with caplog.at_level("INFO"):
        loaded = load_model(folder, LoadSettings(CPU, torch.float32, drafts=True))
    assert (loaded.predictor is None) == (lacking is not None)
    assert ("(MTP) is not used" in caplog.text) == (lacking is not None)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3.5 in GGUF", "mtp.fc.weight"),
        ("GLM-4.5", "model.layers.3.hnorm.weight"),
        ("GLM-4.5", "model.layers.3.mlp.gate.weight"),
    ],
)
def test_mtp_layers_of_other_shapes_are_ignored(tmp_path: Path, name: str, tensor: str, caplog: Any) -> None:
    folder = path = MAKE[name](tmp_path)
    change(folder, lambda tensors: tensors.update({tensor: torch.cat([tensors[tensor]] * 2)}))
    if name.endswith("GGUF"):
        path = write_gguf(folder, tmp_path / "model.gguf")
    with caplog.at_level("INFO"):
        loaded = load_model(path, LoadSettings(CPU, torch.float32, drafts=True))
    assert loaded.predictor is None
    assert "(MTP) is not used" in caplog.text


def change(folder: Path, act: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    act(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_mtp_layers_load_for_drafts_only(tmp_path: Path) -> None:
    folder = add_mtp(make(tmp_path, "qwen3.5"))
    without, drafting = (
        load_model(folder, LoadSettings(CPU, torch.float32, drafts=drafts)) for drafts in (False, True)
    )
    assert without.predictor is None
    assert without.num_parameters < drafting.num_parameters
    assert len(drafting.language_model.cache_layout.places) == len(without.language_model.cache_layout.places) + 1
