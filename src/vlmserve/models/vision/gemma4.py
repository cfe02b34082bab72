"""Gemma 4's vision tower and projector, for images of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.kernels.activation import ACTIVATIONS
from vlmserve.kernels.ranges import Ranges
from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear, empty_parameter
from vlmserve.layers.norm import RMSNorm, UnitNorm
from vlmserve.layers.residual import ResidualStream, Unfinished
from vlmserve.layers.stages import StageBudget, Stages, by_rows
from vlmserve.models.vision.rotation import patch_angles, rotated
from vlmserve.models.vision.staged import LayerParts, SquaresVision, StagedLayer, with_following
from vlmserve.types import TowerInputs

_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": False,
}
_THETA = 100.0
CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4VisionSpec:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    eps: float
    pool: int
    """Patches along each side of an embedding."""
    patch_size: int
    positions: int
    """Rows and columns of patches in the position embedding table."""
    theta: float
    clips: bool
    """Linear layers clip inputs and outputs."""
    standardizes: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Gemma4VisionSpec:
        values = {**_DEFAULTS, **config}
        if (kind := values.get("model_type", "gemma4_vision")) != "gemma4_vision":
            raise UnsupportedModelError(f"the vision tower {kind!r} is not supported; supported: gemma4_vision")
        size, heads, head_size = values["hidden_size"], values["num_attention_heads"], values["head_dim"]
        kv_heads = values.get("num_key_value_heads") or heads
        if size != heads * head_size or head_size % 4 or kv_heads != heads or values.get("attention_bias"):
            raise ModelLoadError(
                f"config.json: a vision tower of width {size} with {heads} heads of {head_size}, {kv_heads} of keys is "
                "not supported"
            )
        return cls(
            hidden_size=size,
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=heads,
            activation=values["hidden_activation"],
            eps=values["rms_norm_eps"],
            pool=values["pooling_kernel_size"],
            patch_size=values["patch_size"],
            positions=values["position_embedding_size"],
            theta=(values.get("rope_parameters") or {}).get("rope_theta", _THETA),
            clips=bool(values["use_clipped_linears"]),
            standardizes=bool(values["standardize"]),
        )

    @property
    def side(self) -> int:
        return self.pool * self.patch_size


class ClippedLinear(Linear):
    """A linear layer that may clip its inputs and outputs to the checkpoint's bounds."""

    def __init__(self, inputs: int, outputs: int, *, clips: bool, **factory: Unpack[Factory]) -> None:
        super().__init__(inputs, outputs, bias=False, **factory)
        self._clips = clips
        if clips:
            self.input_min, self.input_max, self.output_min, self.output_max = (
                empty_parameter(1, **factory) for _ in range(4)
            )

    def forward(self, x: Any, residual: Tensor | None = None) -> Tensor:
        if not self._clips:
            return super().forward(x, residual)
        output = super().forward(x.clamp(self.input_min, self.input_max)).clamp_(self.output_min, self.output_max)
        return output if residual is None else output + residual

    @property
    def deferring(self) -> None:
        return None


class Gemma4VisionAttention(nn.Module):
    """Full self-attention within an image, with rotary embeddings by row and column."""

    def __init__(self, spec: Gemma4VisionSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        size = spec.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            ClippedLinear(size, size, clips=spec.clips, **factory) for _ in range(4)
        )
        self._head_size = size // spec.num_heads
        self.q_norm, self.k_norm = (RMSNorm(self._head_size, spec.eps, **factory) for _ in range(2))
        self.v_norm = UnitNorm(self._head_size, spec.eps, device=factory["device"])
        self.attention = EncoderAttention(size, spec.num_heads, dtype=factory["dtype"])
        # Halves of a head rotate by column and by row; kernels pair element i with i + head_size / 2.
        quarters = torch.arange(self._head_size).view(2, 2, -1)
        self._order = quarters.transpose(0, 1).flatten()

    def heads(self, normed: Tensor) -> Tensor:
        """``[patches, size]`` to normed queries, keys and values side by side, not rotated yet."""
        query, key, value = (linear(normed) for linear in (self.q_proj, self.k_proj, self.v_proj))
        shape, order = (len(normed), -1, self._head_size), self._order.to(normed.device)
        # Scores are unscaled, but kernels divide by sqrt(head_size).
        query = self.q_norm(query.view(shape))[..., order] * self._head_size**0.5
        key = self.k_norm(key.view(shape))[..., order]
        return torch.cat((query, key, self.v_norm(value.view(shape))), 1).flatten(1)


class Gemma4VisionMLP(nn.Module):
    def __init__(self, spec: Gemma4VisionSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        size, inner = spec.hidden_size, spec.intermediate_size
        kind: dict[str, Any] = {"clips": spec.clips, **factory}
        self.gate_proj, self.up_proj = ClippedLinear(size, inner, **kind), ClippedLinear(size, inner, **kind)
        self.down_proj = ClippedLinear(inner, size, **kind)
        self._act = ACTIVATIONS[spec.activation]

    @property
    def products(self) -> int:
        return self.gate_proj.products + self.up_proj.products + self.down_proj.products

    def forward(self, x: Tensor) -> Unfinished:
        return Unfinished(self.down_proj, self._act(self.gate_proj(x)) * self.up_proj(x))


class Gemma4VisionLayer(StagedLayer):
    def __init__(self, spec: Gemma4VisionSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.self_attn = Gemma4VisionAttention(spec, **factory)
        self.mlp = Gemma4VisionMLP(spec, **factory)
        names = "input", "post_attention", "pre_feedforward", "post_feedforward"
        for name in names:
            self.add_module(f"{name}_layernorm", RMSNorm(spec.hidden_size, spec.eps, **factory))

    @cached_property
    def parts(self) -> LayerParts:
        attn = self.self_attn
        return LayerParts(
            self._norm("input"), attn.q_proj, attn.attention, attn.o_proj, self._norm("pre_feedforward"), self.mlp
        )

    @cached_property
    def _token_products(self) -> tuple[int, int]:
        attn = self.self_attn
        return 3 * attn.q_proj.products, attn.o_proj.products + self.mlp.products

    def before_attention(self, normed: Tensor, *angles: Tensor) -> Tensor:
        return rotated(self.self_attn.attention, self.self_attn.heads(normed), *angles)

    def after_attention(self, stream: ResidualStream, attended: Tensor) -> None:
        stream.add(Unfinished(self.self_attn.o_proj, attended), self._norm("post_attention"))
        stream.add(self.mlp(stream.normed(self._norm("pre_feedforward"))), self._norm("post_feedforward"))

    def _norm(self, name: str) -> RMSNorm:
        return self._modules[f"{name}_layernorm"]  # type: ignore[return-value]


class PatchEmbedder(nn.Module):
    def __init__(self, spec: Gemma4VisionSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self._patch = spec.patch_size
        inputs = CHANNELS * spec.patch_size**2
        self.input_proj = Linear(inputs, spec.hidden_size, bias=False, **factory)
        shape = 2, spec.positions, spec.hidden_size
        self.position_embedding_table = empty_parameter(*shape, **factory)

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Rows of patches ``[rows, channels, patch_size, width]`` to ``[rows, patches of each, size]``.

        numbers: of the rows in the image.
        """
        down, channels, patch, _ = rows.shape
        patches = rows.view(down, channels, patch, -1, patch).permute(0, 3, 2, 4, 1).flatten(2)
        by_column, by_row = self.position_embedding_table.data
        states: Tensor = self.input_proj(patches)
        states += by_column[: patches.shape[1]] + by_row[numbers][:, None]
        return states


class Gemma4Tower(nn.Module):
    def __init__(self, spec: Gemma4VisionSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embedder = PatchEmbedder(spec, **factory)
        self._layers = [Gemma4VisionLayer(spec, **factory) for _ in range(spec.num_layers)]
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(self._layers)})
        if spec.standardizes:
            self.std_bias = empty_parameter(spec.hidden_size, **factory)
            self.std_scale = empty_parameter(spec.hidden_size, **factory)

    def products(self, num_patches: int) -> int:
        embedding = num_patches * self.patch_embedder.input_proj.products
        return embedding + sum(layer.products(num_patches) for layer in self._layers)

    def in_stages(self, images: Sequence[Tensor], budget: StageBudget) -> Stages[list[Tensor]]:
        """Images ``[channels, height, width]`` to ``[squares, hidden_size]`` each."""
        together = self._layers[0].self_attn.attention.range_kernels is not None
        squares: list[Tensor] = []
        for some in [images] if together else [[image] for image in images]:
            squares += yield from self._encoded(some, budget)
        return squares

    def _encoded(self, images: Sequence[Tensor], budget: StageBudget) -> Stages[list[Tensor]]:
        patch, device = self.spec.patch_size, images[0].device
        grids = [(image.shape[1] // patch, image.shape[2] // patch) for image in images]
        embedded = []
        for image, (down, across) in zip(images, grids, strict=True):
            rows = image.reshape(CHANNELS, down, patch, -1).transpose(0, 1).contiguous()
            products = across * self.patch_embedder.input_proj.products
            numbers = torch.arange(down, device=device)
            embedded.append((yield from by_rows(self.patch_embedder, products, budget, rows, numbers)).flatten(0, 1))
        angles = [self._angles(down, across, device) for down, across in grids]
        cos, sin = (torch.cat(parts) for parts in zip(*angles, strict=True))
        ranges = Ranges.of([down * across for down, across in grids], device)
        stream = ResidualStream(torch.cat(embedded))
        for layer, following in with_following(self._layers):
            stream = yield from layer.in_stages(stream, ranges, budget, following, cos, sin)
        states = torch.split(stream.rows, ranges.lengths)
        return [self._pooled(x, *grid) for x, grid in zip(states, grids, strict=True)]

    def _angles(self, down: int, across: int, device: torch.device) -> tuple[Tensor, Tensor]:
        half = self.spec.hidden_size // self.spec.num_heads // 2
        frequencies = 1.0 / self.spec.theta ** (torch.arange(0, half, 2).float() / half)
        row, column = torch.meshgrid(torch.arange(down), torch.arange(across), indexing="ij")
        return patch_angles(column.flatten(), row.flatten(), frequencies, frequencies, device)

    def _pooled(self, x: Tensor, down: int, across: int) -> Tensor:
        """Average squares to ``[squares, hidden_size]``, scaled in float32."""
        pool, size = self.spec.pool, self.spec.hidden_size
        squares = x.view(down // pool, pool, across // pool, pool, size).float().mean((1, 3)).to(x.dtype)
        states = squares.view(-1, size).float() * size**0.5
        if self.spec.standardizes:
            states = (states - self.std_bias.float()) * self.std_scale.float()
        output: Tensor = states.to(x.dtype)
        return output


class Gemma4Projector(nn.Module):
    def __init__(self, size: int, hidden_size: int, eps: float, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.embedding_projection = Linear(size, hidden_size, bias=False, **factory)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.embedding_projection(F.rms_norm(x, (x.shape[-1],), None, self._eps))
        return output


class Gemma4Vision(SquaresVision):
    """Tower and projector of a config. Module names match checkpoints."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        spec = Gemma4VisionSpec.from_config(config.get("vision_config") or {})
        self.vision_tower = Gemma4Tower(spec, **factory)
        self.multi_modal_projector = Gemma4Projector(spec.hidden_size, hidden_size, spec.eps, **factory)
        self.side, self.most = spec.side, spec.positions * spec.patch_size

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        embeddings, pool = self.embeddings(shape), self.vision_tower.spec.pool
        projection = self.multi_modal_projector.embedding_projection.products
        return self.vision_tower.products(embeddings * pool**2) + embeddings * projection

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        projector, images = self.multi_modal_projector, []
        squares = yield from self.vision_tower.in_stages([image[0].to(self.dtype) for image in pixels], budget)
        for states in squares:
            products = projector.embedding_projection.products
            images.append((yield from by_rows(projector, products, budget, states)))
        return images
