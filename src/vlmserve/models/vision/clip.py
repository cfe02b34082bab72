"""CLIP's vision transformer (https://arxiv.org/abs/2103.00020) as in LLaVA: without pooling or last norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Embedding, Linear, MergedLinear, empty_parameter
from vlmserve.layers.norm import LayerNorm, RMSNorm
from vlmserve.layers.residual import ResidualStream
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.blocks.mlp import MLP
from vlmserve.models.vision.staged import LayerParts, StagedLayer, through_layers, with_following

DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSpec:
    """image_size, patch_size: pixels along each side."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    activation: str
    norm_eps: float

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        kinds: Sequence[str] = ("clip_vision_model",),
        defaults: Mapping[str, Any] = DEFAULTS,
    ) -> ClipSpec:
        """Read a ``vision_config``. kinds: accepted model types. defaults: of missing settings.

        Raises UnsupportedModelError for other towers, ModelLoadError for impossible sizes.
        """
        if (kind := config.get("model_type", kinds[0])) not in kinds:
            raise UnsupportedModelError(f"vision tower {kind!r} is not supported; supported is {', '.join(kinds)}")
        config = {**defaults, **config}
        if not isinstance(config["image_size"], int) or not isinstance(config["patch_size"], int):
            raise UnsupportedModelError("a vision tower for images or patches that are not square is not supported")
        if config["hidden_size"] % config["num_attention_heads"]:
            raise ModelLoadError("config.json: the vision tower's heads do not divide its width")
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_channels=config["num_channels"],
            image_size=config["image_size"],
            patch_size=config["patch_size"],
            activation=config["hidden_act"],
            norm_eps=config["layer_norm_eps"],
        )

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.num_channels, self.image_size, self.image_size


class PatchEmbedding(Linear):
    """``[images, channels, height, width]`` to ``[images, patches, hidden_size]``, row by row.

    A convolution without overlap, computed as a matmul. Partial patches at the right and lower edge are dropped.
    """

    def __init__(
        self, spec: ClipSpec, *, bias: bool = False, as_matrix: bool = False, **factory: Unpack[Factory]
    ) -> None:
        """as_matrix: the checkpoint's weight is a matrix."""
        patch = (spec.num_channels, spec.patch_size, spec.patch_size)
        super().__init__(math.prod(patch), spec.hidden_size, bias=bias, **factory)
        if not as_matrix:
            self.weight = empty_parameter(spec.hidden_size, *patch, **factory)
        self.patch_size = spec.patch_size

    def forward(self, pixels: Tensor, residual: Tensor | None = None) -> Tensor:  # type: ignore[override]
        images, channels, height, width = pixels.shape
        size = self.patch_size
        down, across = height // size, width // size
        pixels = pixels[:, :, : down * size, : across * size].reshape(images, channels, down, size, across, size)
        patches = pixels.permute(0, 2, 4, 1, 3, 5).reshape(images, down * across, channels * size * size)
        return super().forward(patches, residual)


class ClipEmbeddings(nn.Module):
    def __init__(self, spec: ClipSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.class_embedding = empty_parameter(spec.hidden_size, **factory)
        self.patch_embedding = PatchEmbedding(spec, **factory)
        self.position_embedding = Embedding(spec.num_patches + 1, spec.hidden_size, **factory)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels)
        tokens = torch.cat((self.class_embedding.expand(len(patches), 1, -1), patches), 1)
        return tokens + self.position_embedding.weight


class BiasedEmbeddings(nn.Module):
    """Class token and patches with a bias, with positions."""

    def __init__(self, spec: ClipSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.class_embedding = empty_parameter(1, 1, spec.hidden_size, **factory)
        self.patch_embedding = PatchEmbedding(spec, bias=True, **factory)
        self.position_embedding = empty_parameter(1, spec.num_patches + 1, spec.hidden_size, **factory)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels)
        return torch.cat((self.class_embedding.expand(len(patches), 1, -1), patches), 1) + self.position_embedding


class ClipAttention(nn.Module):
    def __init__(self, spec: ClipSpec, *, qkv_bias: bool = True, **factory: Unpack[Factory]) -> None:
        super().__init__()
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), spec.hidden_size)
        self.qkv_proj = MergedLinear(spec.hidden_size, parts, bias=qkv_bias, **factory)
        self.out_proj = Linear(spec.hidden_size, spec.hidden_size, bias=True, **factory)
        self.attention = EncoderAttention(spec.hidden_size, spec.num_heads, dtype=factory["dtype"])


class ClipLayer(StagedLayer):
    """norm: before attention and MLP. qkv_bias: queries, keys and values have biases."""

    def __init__(
        self,
        spec: ClipSpec,
        *,
        norm: type[LayerNorm] | type[RMSNorm] = LayerNorm,
        qkv_bias: bool = True,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.layer_norm1 = norm(spec.hidden_size, spec.norm_eps, **factory)
        self.self_attn = ClipAttention(spec, qkv_bias=qkv_bias, **factory)
        self.layer_norm2 = norm(spec.hidden_size, spec.norm_eps, **factory)
        size, inner, names = spec.hidden_size, spec.intermediate_size, ("fc1", "fc2")
        self.mlp = MLP(size, inner, spec.activation, names=names, **factory)

    @cached_property
    def parts(self) -> LayerParts:
        attn = self.self_attn
        return LayerParts(self.layer_norm1, attn.qkv_proj, attn.attention, attn.out_proj, self.layer_norm2, self.mlp)


class EncoderTower(nn.Module):
    """Images to states, ``[images, tokens, hidden_size]``. Module names match CLIP's checkpoints.

    class_tokens: tokens before the patches. last_norm: a norm follows the layers.
    """

    def __init__(
        self,
        spec: ClipSpec,
        embeddings: nn.Module,
        layers: Sequence[ClipLayer],
        *,
        class_tokens: int = 1,
        last_norm: bool = False,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.spec, self.embeddings = spec, embeddings
        self._class_tokens = class_tokens
        self._layers = list(layers)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.post_layernorm = LayerNorm(spec.hidden_size, spec.norm_eps, **factory) if last_norm else None

    def products(self, num_patches: int) -> int:
        layers = sum(layer.products(num_patches + self._class_tokens) for layer in self._layers)
        return num_patches * self._patch_products + layers

    def in_stages(self, pixels: Tensor, budget: StageBudget) -> Stages[Tensor]:
        num_patches = (pixels.shape[2] // self.spec.patch_size) * (pixels.shape[3] // self.spec.patch_size)
        x = yield from by_rows(self._embedded, num_patches * self._patch_products, budget, pixels)
        x = yield from self._through(x, budget)
        return x if self.post_layernorm is None else self.post_layernorm(x)

    @property
    def _patch_products(self) -> int:
        return self.embeddings.patch_embedding.products  # type: ignore[union-attr, return-value]

    def _embedded(self, pixels: Tensor) -> Tensor:
        embedded: Tensor = self.embeddings(pixels)
        return embedded

    def _through(self, x: Tensor, budget: StageBudget) -> Stages[Tensor]:
        return through_layers(self._layers, x, budget)


class ClipTower(EncoderTower):
    """Images to the hidden states of chosen layers, ``[images, 1 + patches, hidden_size * feature layers]``.

    feature_layers: indices into the hidden states: 0 is the embeddings, i the output of layer i, negative ones count
    from the end; ModelLoadError if out of range. Higher layers are neither allocated nor computed.
    """

    def __init__(self, spec: ClipSpec, feature_layers: Sequence[int], **factory: Unpack[Factory]) -> None:
        states = spec.num_layers + 1
        if not feature_layers or not all(-states <= layer < states for layer in feature_layers):
            raise ModelLoadError(
                f"config.json: vision_feature_layer {list(feature_layers)} does not fit {spec.num_layers} layers"
            )
        wanted = [layer % states for layer in feature_layers]
        layers = [ClipLayer(spec, **factory) for _ in range(max(wanted))]
        super().__init__(spec, ClipEmbeddings(spec, **factory), layers, **factory)
        # Misspelt in every published checkpoint.
        self.pre_layrnorm = LayerNorm(spec.hidden_size, spec.norm_eps, **factory)
        self.feature_layers = wanted

    def _embedded(self, pixels: Tensor) -> Tensor:
        normed: Tensor = self.pre_layrnorm(self.embeddings(pixels))
        return normed

    def _through(self, x: Tensor, budget: StageBudget) -> Stages[Tensor]:
        states = {0: x}
        stream = ResidualStream(x.flatten(0, 1))
        for number, (layer, following) in enumerate(with_following(self._layers), 1):
            stream = yield from layer.in_stages(stream, len(x), budget, following)
            if number in self.feature_layers:
                states[number] = stream.rows.view_as(x)
        return torch.cat([states[layer] for layer in self.feature_layers], -1)
