"""LLaVA (https://arxiv.org/abs/2304.08485, https://arxiv.org/abs/2310.03744): a vision tower whose features a small
network projects into the language model's embedding space. Implements `VisionEncoder`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlmserve.errors import InvalidImageError, UnsupportedModelError
from vlmserve.layers.linear import Linear
from vlmserve.models.vision.clip import ClipSpec, ClipTower

# LLaVA-1.5's tower and options, which its published configs partly leave out.
VISION_DEFAULTS: Mapping[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
IMAGE_TOKEN_ID = 32000


class Projector(nn.Module):
    """Two linear layers with an activation between; inner: features there, `size` if None."""

    def __init__(
        self,
        in_size: int,
        size: int,
        act: str,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        inner: int | None = None,
    ) -> None:
        super().__init__()
        inner = inner or size
        self.linear_1 = Linear(in_size, inner, bias=bias, dtype=dtype, device=device, act=act)
        self.linear_2 = Linear(inner, size, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear_2(self.linear_1(x))
        return output


class LlavaVision(nn.Module):
    """Tower and projector of a LLaVA config; modules are named as checkpoints name them.

    Raises UnsupportedModelError for a tower, activation or selection strategy that is not implemented.
    """

    def __init__(
        self, config: Mapping[str, Any], hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        strategy = config.get("vision_feature_select_strategy", "default")
        if strategy not in ("default", "full"):
            raise UnsupportedModelError(f"vision_feature_select_strategy {strategy!r} is not supported")
        chosen = config.get("vision_feature_layer", -2)
        layers = [chosen] if isinstance(chosen, int) else list(chosen)
        spec = ClipSpec.from_config(config.get("vision_config") or VISION_DEFAULTS)
        self.vision_tower = ClipTower(spec, layers, dtype=dtype, device=device)
        self.multi_modal_projector = Projector(
            spec.hidden_size * len(layers),
            hidden_size,
            config.get("projector_hidden_act", "gelu"),
            bias=config.get("multimodal_projector_bias", True),
            dtype=dtype,
            device=device,
        )
        self.skipped_tokens = 1 if strategy == "default" else 0
        self.dtype = dtype

    def check(self, shape: tuple[int, ...], num_tokens: int) -> None:
        """Check that pixels of a shape become that many embeddings; raises InvalidImageError if they do not."""
        spec = self.vision_tower.spec
        expected = (spec.num_channels, spec.image_size, spec.image_size)
        if len(shape) != 4 or shape[1:] != expected:
            raise InvalidImageError(f"the vision tower takes pictures of {expected}, not of {tuple(shape[1:])}")
        embeddings = shape[0] * (spec.num_patches + 1 - self.skipped_tokens)
        if embeddings != num_tokens:
            raise InvalidImageError(f"the picture makes {embeddings} embeddings and has {num_tokens} placeholders")

    def encode(self, pixels: list[Tensor]) -> list[Tensor]:
        """Embeddings of pictures, in one call.

        pixels: one float tensor ``[tiles, channels, height, width]`` a picture, on the model's device.
        Returns one ``[num_tokens, hidden_size]`` tensor a picture, ready to replace its placeholders' embeddings.
        """
        if not pixels:
            return []
        features = self.vision_tower(torch.cat(pixels).to(self.dtype))[:, self.skipped_tokens :]
        embeddings = self.multi_modal_projector(features)
        return [picture.flatten(0, 1) for picture in embeddings.split([len(tiles) for tiles in pixels])]
