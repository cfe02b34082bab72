"""The vision transformer of SigLIP (https://arxiv.org/abs/2303.15343): CLIP's layers over patches alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlmserve.layers.linear import Embedding
from vlmserve.layers.norm import LayerNorm
from vlmserve.models.vision.clip import ClipLayer, ClipSpec, PatchEmbedding


class SiglipEmbeddings(nn.Module):
    """Pictures to tokens: the patches row by row, each with its position."""

    def __init__(self, spec: ClipSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.patch_embedding = PatchEmbedding(spec, bias=True, dtype=dtype, device=device)
        self.position_embedding = Embedding(spec.num_patches, spec.hidden_size, dtype=dtype, device=device)

    def forward(self, pixels: Tensor) -> Tensor:
        output: Tensor = self.patch_embedding(pixels) + self.position_embedding.weight
        return output


class SiglipTower(nn.Module):
    """``[pictures, channels, height, width]`` to the normed output of all layers, ``[pictures, patches, hidden_size]``.

    Modules are named as checkpoints name them.
    """

    def __init__(self, spec: ClipSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.embeddings = SiglipEmbeddings(spec, dtype=dtype, device=device)
        layers = [ClipLayer(spec, dtype=dtype, device=device) for _ in range(spec.num_layers)]
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.post_layernorm = LayerNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embeddings(pixels)
        for layer in self.encoder["layers"].children():
            x = layer(x)
        output: Tensor = self.post_layernorm(x)
        return output
