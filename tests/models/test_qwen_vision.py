"""The vision towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 against transformers, in float32."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from tests.static_ranges import use_ranges
from vlmserve.errors import InvalidImageError
from vlmserve.families.registry import VISION_FAMILIES
from vlmserve.models.vision import qwen
from vlmserve.models.vision.qwen import QwenVisionSpec, QwenVisionTower
from vlmserve.models.weights import weight_slots

CPU = torch.device("cpu")
QWEN2 = Qwen2VLVisionConfig(depth=3, embed_dim=32, hidden_size=24, num_heads=2, mlp_ratio=3, patch_size=4)
QWEN25 = Qwen2_5_VLVisionConfig(
    depth=4, hidden_size=32, intermediate_size=42, num_heads=2, patch_size=4, window_size=16, out_hidden_size=24,
    fullatt_block_indexes=[1, 3],
)  # fmt: skip
QWEN35 = Qwen3_5VisionConfig(
    depth=3, hidden_size=32, intermediate_size=40, num_heads=2, patch_size=4, out_hidden_size=24,
    num_position_embeddings=25,
)  # fmt: skip
QWEN3 = Qwen3VLVisionConfig(
    depth=4, hidden_size=32, intermediate_size=40, num_heads=2, patch_size=4, out_hidden_size=24,
    num_position_embeddings=25, deepstack_visual_indexes=[0, 2],
)  # fmt: skip
TOWERS = {
    "qwen2": (QWEN2, Qwen2VisionTransformerPretrainedModel),
    "qwen2.5": (QWEN25, Qwen2_5_VisionTransformerPretrainedModel),
    "qwen3": (QWEN3, Qwen3VLVisionModel),
    "qwen3.5": (QWEN35, Qwen3_5VisionModel),
}


def ours_of(name: str) -> str:
    """A tensor's name here."""
    for pattern, replacement in VISION_FAMILIES["qwen3_vl"].names:
        name = re.sub(pattern, replacement, f"visual.{name}").removeprefix("visual.")
    return name


@pytest.fixture(params=TOWERS)
def towers(request: pytest.FixtureRequest) -> tuple[QwenVisionTower, nn.Module]:
    """Ours and theirs, with the same random weights."""
    config, model_class = TOWERS[request.param]
    torch.manual_seed(0)
    theirs = model_class(config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = QwenVisionTower(QwenVisionSpec.from_config(config.to_dict(), 24), dtype=torch.float32, device=CPU)
    weights = {ours_of(name): weight for name, weight in theirs.state_dict().items()}
    slots = {name.removeprefix("."): slot for name, slot in weight_slots(ours)}
    assert slots.keys() == weights.keys()
    for name, slot in slots.items():
        slot.copy_(weights[name].view_as(slot))
    return ours, theirs


def patches(pixels: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels as transformers' processor arranges them, and their grid, written out slowly."""
    frames, _, height, width = pixels.shape
    depth, size, merge = config.temporal_patch_size, config.patch_size, config.spatial_merge_size
    if frames % depth:
        pixels = torch.cat([pixels] + [pixels[-1:]] * (depth - frames % depth))
    grid = len(pixels) // depth, height // size, width // size
    rows = []
    for t in range(grid[0]):
        for big_row in range(grid[1] // merge):
            for big_column in range(grid[2] // merge):
                for row in range(big_row * merge, big_row * merge + merge):
                    for column in range(big_column * merge, big_column * merge + merge):
                        block = pixels[t * depth : (t + 1) * depth, :, row * size :, column * size :]
                        rows.append(block[:, :, :size, :size].transpose(0, 1).flatten())
    return torch.stack(rows), torch.tensor([grid])


def flat_patches(pixels: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels of an image as transformers' processor of PaddleOCR-VL arranges them, row by row, and their grid."""
    rows = pixels[0].unfold(1, size, size).unfold(2, size, size).permute(1, 2, 0, 3, 4)
    return rows.flatten(0, 1), torch.tensor([(1, *rows.shape[:2])])


@pytest.mark.parametrize("shape", [(1, 24, 24), (1, 8, 8), (1, 40, 16), (1, 16, 56), (3, 24, 40), (4, 8, 32)], ids=str)
@torch.inference_mode()
def test_embeddings_equal_those_of_transformers(
    towers: tuple[QwenVisionTower, nn.Module], shape: tuple[int, int, int]
) -> None:
    ours, theirs = towers
    pixels = torch.randn(shape[0], 3, *shape[1:], generator=torch.Generator().manual_seed(1))
    rows, grid = patches(pixels, theirs.config)
    output = theirs(rows, grid_thw=grid)
    expected = torch.cat((output.pooler_output, *(output.get("deepstack_features") or ())), 1)
    assert expected.shape[1] == 24 * (1 + len(ours.spec.deepstack))
    (actual,) = ours.encode([pixels])
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    ours.check(tuple(pixels.shape), len(expected))


@torch.inference_mode()
def test_pictures_do_not_see_each_other(towers: tuple[QwenVisionTower, nn.Module]) -> None:
    ours, _ = towers
    images = [torch.randn(1, 3, height, 24) for height in (8, 16, 8)]
    together = ours.encode(images)
    for image, embeddings in zip(images, together, strict=True):
        torch.testing.assert_close(ours.encode([image])[0], embeddings)


@torch.inference_mode()
def test_pictures_of_several_sizes_are_batched(
    towers: tuple[QwenVisionTower, nn.Module],
) -> None:
    ours, _ = towers
    images = [torch.randn(frames, 3, *size) for frames, *size in ((1, 24, 40), (1, 8, 8), (3, 16, 24), (1, 24, 40))]
    expected = ours.encode(images)
    kernels = use_ranges(ours)
    for _ in range(2):
        for embeddings, alone in zip(ours.encode(images), expected, strict=True):
            torch.testing.assert_close(embeddings, alone, atol=1e-5, rtol=1e-5)
    assert [kernel.num_attended for kernel in kernels] == [2] * len(kernels)


@torch.inference_mode()
def test_layouts_of_few_patches_are_kept(
    towers: tuple[QwenVisionTower, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = towers
    monkeypatch.setattr(qwen, "KEPT_PATCHES", 40)
    kept = []
    for height in (8, 16, 24, 16, 800):
        ours.encode([torch.randn(1, 3, height, 16)])
        kept.append([grid[1] for grid in ours.layouts])
    assert kept == [[2], [2, 4], [4, 6], [6, 4], [200]]


@pytest.mark.parametrize("shape", [(1, 3, 24, 20), (1, 4, 24, 24), (3, 24, 24), (0, 3, 8, 8)], ids=str)
def test_pixels_that_do_not_fit_are_refused(towers: tuple[QwenVisionTower, nn.Module], shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidImageError, match="8 pixels"):
        towers[0].check(shape, 9)
    with pytest.raises(InvalidImageError, match="9 embeddings and has 8"):
        towers[0].check((1, 3, 24, 24), 8)
