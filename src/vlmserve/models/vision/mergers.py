"""Merge squares of a vision tower's patches to embeddings. Module names match checkpoints."""

from __future__ import annotations

from typing import Any, Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import GatedLinear, Linear, empty_parameter
from vlmserve.layers.norm import LayerNorm, RMSNorm
from vlmserve.models.vision.llava import Projector
from vlmserve.models.vision.qwen_spec import QwenVisionSpec

_CONVOLVED_NORM_EPS = 1e-5


def tower_norm(spec: QwenVisionSpec, eps: float | None = None, **factory: Unpack[Factory]) -> RMSNorm | LayerNorm:
    kind = RMSNorm if spec.gated else LayerNorm
    return kind(spec.hidden_size, spec.norm_eps if eps is None else eps, **factory)


class PatchMerger(nn.Module):
    """Squares of patches to embeddings. products: MACs for each."""

    def __init__(self, spec: QwenVisionSpec, *, norms_squares: bool = False, **factory: Unpack[Factory]) -> None:
        """norms_squares: norm all patches of a square together."""
        super().__init__()
        size = spec.hidden_size * spec.merge**2
        self.post_layernorm = tower_norm(spec, **factory) if spec.last_norm else None
        self.ln_q = (
            LayerNorm(size, spec.merger_eps, **factory)
            if norms_squares
            else tower_norm(spec, spec.merger_eps, **factory)
        )
        self._norms_squares = norms_squares
        first = Linear(size, size, bias=True, **factory, act="gelu")
        second = Linear(size, spec.output_size, bias=True, **factory)
        self.mlp = nn.ModuleDict({"0": first, "2": second})
        self._size = size
        self.products = first.products + second.products

    def forward(self, x: Tensor) -> Tensor:
        """``[embeddings, merge^2, hidden_size]`` to ``[embeddings, output_size]``."""
        if self.post_layernorm is not None:
            x = self.post_layernorm(x)
        x = x.flatten(1) if self._norms_squares else x
        output: Tensor = self.mlp["2"](self.mlp["0"](self.ln_q(x).view(-1, self._size)))
        return output


class ProjectingMerger(nn.Module):
    """`PatchMerger` of LFM3-VL: norms each patch and projects each square with two layers."""

    def __init__(self, spec: QwenVisionSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        size = spec.hidden_size
        self.layer_norm = LayerNorm(size, spec.merger_eps, **factory)
        self.projector = Projector(
            size * spec.merge**2, spec.output_size, spec.projector_act, bias=spec.projector_bias, inner=spec.projector,
            **factory
        )  # fmt: skip
        self.products = self.projector.products

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.projector(self.layer_norm(x).flatten(1))
        return output


class SquareConvolution(Linear):
    """``[embeddings, merge^2, hidden_size]`` to ``[embeddings, output_size]``."""

    def __init__(self, spec: QwenVisionSpec, **factory: Unpack[Factory]) -> None:
        size = spec.hidden_size
        super().__init__(size * spec.merge**2, spec.output_size, bias=True, **factory)
        self.weight = empty_parameter(spec.output_size, size, spec.merge, spec.merge, **factory)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:  # type: ignore[override]
        # Channels first, as in a convolution's weight.
        return super().forward(x.transpose(1, 2).flatten(1), residual)


class AdaptingMerger(nn.Module):
    """`PatchMerger` of Muse Glimmer: two layers, each with an activation, a projection, and a norm without weights."""

    def __init__(self, spec: QwenVisionSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        inner = spec.adapter
        assert inner is not None
        kind: dict[str, Any] = {"bias": False, **factory}
        self.post_layernorm = tower_norm(spec, **factory)
        self.fc1 = Linear(spec.hidden_size * spec.merge**2, inner, act=spec.projector_act, **kind)
        self.fc2 = Linear(inner, inner, act=spec.projector_act, **kind)
        self.projection = Linear(inner, spec.output_size, **kind)
        self._eps = spec.merger_eps
        self.products = sum(layer.products for layer in (self.fc1, self.fc2, self.projection))

    def forward(self, x: Tensor) -> Tensor:
        # Channels first, as in a convolution's weight.
        squares = self.post_layernorm(x).transpose(1, 2).flatten(1)
        output: Tensor = self.projection(self.fc2(self.fc1(squares)))
        return F.rms_norm(output, output.shape[-1:], None, self._eps)


class ConvolvingMerger(nn.Module):
    """`PatchMerger` of GLM-4.1V (https://arxiv.org/abs/2507.01006) and GLM-OCR: convolution, projection, gated MLP."""

    def __init__(self, spec: QwenVisionSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        size = spec.output_size
        inner = spec.convolved
        assert inner is not None
        kind: dict[str, Any] = {"bias": False, **factory}
        self.post_layernorm = tower_norm(spec, **factory)
        self.downsample = SquareConvolution(spec, **factory)
        self.proj = Linear(size, size, **kind)
        self.post_projection_norm = LayerNorm(size, _CONVOLVED_NORM_EPS, **factory)
        self.gate_up_proj = GatedLinear(size, {"gate_proj": inner, "up_proj": inner}, spec.activation, **kind)
        self.down_proj = Linear(inner, size, **kind)
        self.products = sum(layer.products for layer in (self.downsample, self.proj, self.gate_up_proj, self.down_proj))

    def forward(self, x: Tensor) -> Tensor:
        convolved = self.downsample(self.post_layernorm(x))
        output: Tensor = self.down_proj(self.gate_up_proj(F.gelu(self.post_projection_norm(self.proj(convolved)))))
        return output
