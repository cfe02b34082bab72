"""Vision of Pixtral (https://arxiv.org/abs/2410.07073) and Mistral Small 3, for images of any size."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.families.registry import decoder_spec, vision_family
from vlmserve.kernels.ranges import Ranges
from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear, MergedLinear
from vlmserve.layers.norm import RMSNorm
from vlmserve.layers.residual import ResidualStream
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.blocks.mlp import MLP
from vlmserve.models.vision.clip import ClipSpec, PatchEmbedding
from vlmserve.models.vision.llava import Projector
from vlmserve.models.vision.rotation import patch_angles, rotated
from vlmserve.models.vision.staged import LayerParts, SquaresVision, StagedLayer, with_following
from vlmserve.types import TowerInputs

KINDS = ("pixtral",)
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
_THETA = 10000.0
KEPT_PATCHES = 2**15
"""Maximum patches whose angles are cached by image size, besides the last image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralSpec:
    shape: ClipSpec
    theta: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PixtralSpec:
        shape = ClipSpec.from_config(config, KINDS, DEFAULTS)
        if shape.hidden_size // shape.num_heads % 4:
            raise ModelLoadError("config.json: the head size of the vision tower must be a multiple of 4")
        parameters = config.get("rope_parameters") or {}
        return cls(shape=shape, theta=parameters.get("rope_theta") or config.get("rope_theta") or _THETA)


class PixtralAttention(nn.Module):
    def __init__(self, spec: ClipSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), spec.hidden_size)
        self.qkv_proj = MergedLinear(spec.hidden_size, parts, bias=False, **factory)
        self.o_proj = Linear(spec.hidden_size, spec.hidden_size, bias=False, **factory)
        self.attention = EncoderAttention(spec.hidden_size, spec.num_heads, dtype=factory["dtype"])


class PixtralLayer(StagedLayer):
    def __init__(self, spec: ClipSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps, **factory)
        self.attention = PixtralAttention(spec, **factory)
        self.ffn_norm = RMSNorm(spec.hidden_size, spec.norm_eps, **factory)
        size, inner, act = spec.hidden_size, spec.intermediate_size, spec.activation
        self.feed_forward = MLP(size, inner, act, gated=True, bias=False, **factory)

    @cached_property
    def parts(self) -> LayerParts:
        attn = self.attention
        return LayerParts(
            self.attention_norm, attn.qkv_proj, attn.attention, attn.o_proj, self.ffn_norm, self.feed_forward
        )

    def before_attention(self, normed: Tensor, *angles: Tensor) -> Tensor:
        return rotated(self.attention.attention, self.attention.qkv_proj(normed), *angles)


class PixtralTower(nn.Module):
    """Images of whole patches to states, row by row. Module names match checkpoints."""

    def __init__(self, spec: PixtralSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.spec = spec.shape
        self._theta = spec.theta
        self._kept_angles: OrderedDict[tuple[int, int], tuple[Tensor, Tensor]] = OrderedDict()
        self.patch_conv = PatchEmbedding(spec.shape, **factory)
        self.ln_pre = RMSNorm(spec.shape.hidden_size, spec.shape.norm_eps, **factory)
        self._layers = [PixtralLayer(spec.shape, **factory) for _ in range(spec.shape.num_layers)]
        self.transformer = nn.ModuleDict({"layers": nn.ModuleList(self._layers)})

    def products(self, num_patches: int) -> int:
        return num_patches * self.patch_conv.products + sum(layer.products(num_patches) for layer in self._layers)

    def in_stages(self, pixels: Sequence[Tensor], budget: StageBudget) -> Stages[list[Tensor]]:
        """Images ``[channels, height, width]`` to ``[patches, hidden_size]`` each."""
        together = self._layers[0].attention.attention.range_kernels is not None
        images: list[Tensor] = []
        for some in [pixels] if together else [[image] for image in pixels]:
            images += yield from self._encode(some, budget)
        return images

    def _encode(self, images: Sequence[Tensor], budget: StageBudget) -> Stages[list[Tensor]]:
        spec, device = self.spec, images[0].device
        size = spec.patch_size
        grids = [(image.shape[1] // size, image.shape[2] // size) for image in images]
        cosines, sines = zip(*(self._angles(down, across, device) for down, across in grids), strict=True)
        angles = torch.cat(cosines), torch.cat(sines)
        ranges = Ranges.of([down * across for down, across in grids], device)
        embedded = []
        for pixels, (down, across) in zip(images, grids, strict=True):
            rows = pixels.reshape(spec.num_channels, down, size, -1).transpose(0, 1)
            of_rows = yield from by_rows(self._embedded, across * self.patch_conv.products, budget, rows)
            embedded.append(of_rows.flatten(0, 1))
        stream = ResidualStream(torch.cat(embedded))
        for layer, following in with_following(self._layers):
            stream = yield from layer.in_stages(stream, ranges, budget, following, *angles)
        return list(torch.split(stream.rows, ranges.lengths))

    def _angles(self, down: int, across: int, device: torch.device) -> tuple[Tensor, Tensor]:
        grid = down, across
        if grid not in self._kept_angles:
            head_size = self.spec.hidden_size // self.spec.num_heads
            frequencies = 1.0 / self._theta ** (torch.arange(0, head_size, 2).float() / head_size)
            row, column = torch.meshgrid(torch.arange(down), torch.arange(across), indexing="ij")
            self._kept_angles[grid] = patch_angles(
                row.flatten(), column.flatten(), frequencies[::2], frequencies[1::2], device
            )
        self._kept_angles.move_to_end(grid)
        while len(self._kept_angles) > 1 and sum(map(math.prod, self._kept_angles)) > KEPT_PATCHES:
            self._kept_angles.popitem(last=False)
        return self._kept_angles[grid]

    def _embedded(self, rows: Tensor) -> Tensor:
        normed: Tensor = self.ln_pre(self.patch_conv(rows))
        return normed


class MergingProjector(Projector):
    """`Projector` of squares of patches. It norms each patch, then merges the square into one row."""

    def __init__(
        self, size: int, merge: int, output_size: int, act: str, norm_eps: float, *, bias: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(size, output_size, act, bias=bias, dtype=dtype, device=device)
        self.norm = RMSNorm(size, norm_eps, dtype=dtype, device=device)
        merging = Linear(size * merge**2, size, bias=False, dtype=dtype, device=device)
        self.patch_merger = nn.ModuleDict({"merging_layer": merging})

    @property
    def products(self) -> int:
        return super().products + self._merging.products

    def forward(self, x: Tensor) -> Tensor:
        """``[squares, merge^2, size]`` to ``[squares, output_size]``."""
        # Channels first, as in a convolution's weight.
        together = self.norm(x).transpose(1, 2).flatten(1)
        return super().forward(self._merging(together))

    @property
    def _merging(self) -> Linear:
        return self.patch_merger["merging_layer"]  # type: ignore[return-value]


class PixtralVision(SquaresVision):
    """Tower and projector of a config. Module names match checkpoints."""

    has_dynamic_resolution = True

    def __init__(
        self, config: Mapping[str, Any], hidden_size: int, *, norm_eps: float | None = None, **factory: Unpack[Factory]
    ) -> None:
        """norm_eps: of the norm before merging; None: no merging, as in Pixtral 12B."""
        super().__init__(**factory)
        if (chosen := config.get("vision_feature_layer", -1 if norm_eps is not None else -2)) not in (-1, [-1]):
            raise UnsupportedModelError(
                f"Pixtral with vision_feature_layer {chosen!r} is not supported, only with the last layer (-1)"
            )
        spec = PixtralSpec.from_config(config.get("vision_config") or {})
        size, act = spec.shape.hidden_size, config.get("projector_hidden_act", "gelu")
        self.vision_tower = PixtralTower(spec, **factory)
        self.multi_modal_projector: Projector
        if norm_eps is None:
            strategy = config.get("vision_feature_select_strategy", "default")
            if strategy != "full":
                raise UnsupportedModelError(
                    f"Pixtral with vision_feature_select_strategy {strategy!r} is not supported, only with 'full'"
                )
            self._merge, bias = 1, config.get("multimodal_projector_bias", True)
            self.multi_modal_projector = Projector(size, hidden_size, act, bias=bias, **factory)
        else:
            self._merge, bias = config.get("spatial_merge_size", 2), config.get("multimodal_projector_bias", False)
            if not isinstance(self._merge, int) or self._merge < 1:
                raise ModelLoadError(f"config.json: spatial_merge_size is {self._merge!r}, not a number of patches")
            self.multi_modal_projector = MergingProjector(
                size, self._merge, hidden_size, act, norm_eps, bias=bias, **factory
            )
        self._merges = norm_eps is not None
        self.side, self.channels = spec.shape.patch_size * self._merge, spec.shape.num_channels

    @classmethod
    def merging(cls, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> PixtralVision:
        """With Mistral Small 3's projector, whose norm has the decoder's epsilon."""
        family = vision_family(config)
        assert family is not None
        eps = decoder_spec(family.text_config(config)).norm.eps
        return cls(config, hidden_size, norm_eps=eps, **factory)

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        embeddings = self.embeddings(shape)
        patches = embeddings * self._merge**2
        return self.vision_tower.products(patches) + embeddings * self.multi_modal_projector.products

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        states = yield from self.vision_tower.in_stages([image[0].to(self.dtype) for image in pixels], budget)
        projector, merge = self.multi_modal_projector, self._merge
        images = []
        for x, image in zip(states, pixels, strict=True):
            if self._merges:
                down, across = (edge // self.side for edge in image.shape[2:])
                squares = x.view(down, merge, across, merge, -1).transpose(1, 2)
                x = squares.reshape(down * across, merge**2, -1)
            images.append((yield from by_rows(projector, projector.products, budget, x)))
        return images
