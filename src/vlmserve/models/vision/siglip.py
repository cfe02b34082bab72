"""SigLIP's vision transformer (https://arxiv.org/abs/2303.15343): CLIP's layers without a class token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vlmserve.kernels.transfers import to_device
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Embedding
from vlmserve.models.vision.clip import ClipLayer, ClipSpec, EncoderTower, PatchEmbedding

IDEFICS3_KINDS = ("idefics3_vision", "idefics3", "smolvlm_vision", "smolvlm")
SIGLIP_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
IDEFICS3_DEFAULTS = {**SIGLIP_DEFAULTS, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}


def patch_positions(down: int, across: int, side: int, *, exact: bool = False) -> Tensor:
    """Place each patch in a ``side * side`` table: int64 ``[down * across]``, row by row.

    exact: divide by the number of patches, as MiniCPM-V does. Idefics3 multiplies by the rounded inverse.
    """
    # In float32 as in transformers: rounding decides between two positions.
    boundaries = torch.arange(1 / side, 1.0, 1 / side)

    def places(count: int) -> Tensor:
        steps = torch.arange(count, dtype=torch.float32)
        fractions = steps / count if exact else steps * (1.0 / torch.tensor(count))
        return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)

    return (places(down)[:, None] * side + places(across)).flatten()


class SiglipEmbeddings(nn.Module):
    def __init__(self, spec: ClipSpec, stretched: bool, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.patch_embedding = PatchEmbedding(spec, bias=True, **factory)
        self.position_embedding = Embedding(spec.num_patches, spec.hidden_size, **factory)
        self._patch_size = spec.patch_size
        self._side = spec.image_size // spec.patch_size
        self._stretched = stretched

    def forward(self, pixels: Tensor) -> Tensor:
        positions: Tensor = self.position_embedding.weight
        if self._stretched:
            # Also for images of the table's size: rounding moves some patches.
            down, across = (edge // self._patch_size for edge in pixels.shape[2:])
            places = to_device(patch_positions(down, across, self._side), pixels.device)
            positions = positions[places]
        output: Tensor = self.patch_embedding(pixels) + positions
        return output


class SiglipTower(EncoderTower):
    """Images to normed states of their patches.

    stretched: positions from `patch_positions`; else all images must have the table's size.
    """

    def __init__(self, spec: ClipSpec, *, stretched: bool = False, **factory: Unpack[Factory]) -> None:
        embeddings = SiglipEmbeddings(spec, stretched, **factory)
        layers = [ClipLayer(spec, **factory) for _ in range(spec.num_layers)]
        super().__init__(spec, embeddings, layers, class_tokens=0, last_norm=True, **factory)
