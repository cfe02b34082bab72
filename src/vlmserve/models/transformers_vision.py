"""The vision tower of the Transformers backend."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmserve.errors import InvalidImageError
from vlmserve.layers.stages import StageBudget, Stages
from vlmserve.types import FurtherInputs, TowerInputs

logger = logging.getLogger(__name__)

_TOWERS = {"visual", "vision_model", "vision_tower", "vision_encoder", "image_encoder"}
"""Names of vision towers in models. If none is found, all parameters count."""


class TransformersVision:
    """A `VisionEncoder` around a transformers model with `get_image_features`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._named = inspect.signature(model.get_image_features).parameters.keys()
        self.width: int = model.get_input_embeddings().weight.shape[1]
        """Width of embeddings, including features for the decoder's first layers."""
        towers = (part for name, part in model.named_modules() if name.rsplit(".", 1)[-1] in _TOWERS)
        self._parameters: int = sum(parameter.numel() for parameter in next(towers, model).parameters())

    def check(self, shape: tuple[int, ...], num_tokens: int, tiling: TowerInputs | None = None) -> None:
        """Check only the type of inputs: the model alone knows which pixels it takes."""
        if not isinstance(tiling, FurtherInputs) or tiling.num_embeddings != num_tokens:
            raise InvalidImageError(
                "this model runs by transformers' code, for which its own processor must prepare images: "
                "say --model-impl transformers"
            )

    example_shape = None
    larger_shape = None
    has_dynamic_resolution = False

    def encode(self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None] = ()) -> list[Tensor]:
        """Encode images one by one, because models batch them differently. NaN for an image that fails."""
        return [self._encode(*image) for image in zip(pixels, tilings, strict=True)]

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        """Estimated MACs: one for each parameter and embedding."""
        assert isinstance(tiling, FurtherInputs)
        return tiling.num_embeddings * self._parameters

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        """Each image is one stage, because foreign code cannot be interrupted."""
        images = []
        for image, tiling in zip(pixels, tilings, strict=True):
            while not budget.take(1, self.products(tuple(image.shape), tiling)):
                yield
            images.append(self._encode(image, tiling))
        return images

    def _encode(self, pixels: Tensor, further: TowerInputs | None) -> Tensor:
        assert isinstance(further, FurtherInputs), "`check` lets no other pass"
        named = self.further(further, pixels.device)
        try:
            features = self._model.get_image_features(
                pixel_values=pixels, **{name: value for name, value in named.items() if name in self._named}
            )
            of_layers = getattr(features, "deepstack_features", None) or ()
            parts = [getattr(features, "pooler_output", features), *of_layers]
            embeddings = torch.cat([_rows(part) for part in parts], 1)
            self.width = embeddings.shape[1]
            if len(embeddings) != further.num_embeddings:
                raise ValueError(f"{len(embeddings)} embeddings, where the processor counted others")
        except (ValueError, TypeError, RuntimeError, LookupError):
            # An error in the model's code must fail only this image's request.
            logger.exception("no embeddings of an image of %s", tuple(pixels.shape))
            return pixels.new_full((further.num_embeddings, self.width), float("nan"))
        return embeddings

    @staticmethod
    def further(inputs: TowerInputs | None, device: torch.device) -> dict[str, Tensor]:
        assert isinstance(inputs, FurtherInputs)
        arrays = {
            array.name: np.frombuffer(array.data, array.dtype).reshape(array.shape).copy() for array in inputs.arrays
        }
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def _rows(features: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([_rows(part) for part in features])
