"""transformers' image processors of LFM2-VL and others without torchvision."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from inspect import signature
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional
from transformers import BatchFeature

from tests.module_stubs import replaced_modules

Resize = Callable[[torch.Tensor, int, int], torch.Tensor]


class BaseImageProcessor:
    """Resizes and normalizes in place of transformers' base class, whose name its documentation needs."""

    resized: Resize

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        for name, value in settings.items():
            setattr(self, name, value)

    def __call__(self, images: Any, **options: Any) -> BatchFeature:
        flat = [images] if isinstance(images, Image.Image) else [image for some in images for image in _listed(some)]
        pixels = [torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) for image in flat]
        own = {name: getattr(self, name) for name in signature(self._preprocess).parameters if hasattr(self, name)}
        return self._preprocess(pixels, **{"return_tensors": "pt", "disable_grouping": None, **own, **options})

    def _preprocess(self, images: list[torch.Tensor], **options: Any) -> BatchFeature:
        """Subclasses do the work."""
        raise NotImplementedError

    def fetch_images(self, images: Any) -> Any:
        return images

    def resize(self, image: torch.Tensor, size: Any, **_: Any) -> torch.Tensor:
        return torch.stack([type(self).resized(own, size.height, size.width) for own in image])

    def rescale_and_normalize(
        self, images: torch.Tensor, rescale: bool, factor: float, normalize: bool, mean: Any, std: Any
    ) -> torch.Tensor:
        levels = images.float() * (factor if rescale else 1.0)
        mean, std = (torch.as_tensor(value, dtype=torch.float32).expand(3)[:, None, None] for value in (mean, std))
        return (levels - mean) / std if normalize else levels


def _listed(images: Any) -> Sequence[Any]:
    return images if isinstance(images, list | tuple) else [images]


def with_pillow(
    image: torch.Tensor, height: int, width: int, resample: Image.Resampling = Image.Resampling.BILINEAR
) -> torch.Tensor:
    """A uint8 image ``[3, height, width]`` in another size."""
    levels = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((width, height), resample)
    return torch.from_numpy(np.array(levels)).permute(2, 0, 1)


def with_torch(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The same as torchvision resizes it."""
    return functional.interpolate(image[None], (height, width), mode="bilinear", antialias=True)[0]


def image_processor(resized: Resize = with_pillow, **settings: Any) -> Any:
    """transformers' `Lfm2VlImageProcessor` with these settings."""
    return processor_class("lfm2_vl", "Lfm2VlImageProcessor", resized)(**settings)


def processor_class(module: str, name: str, resized: Resize) -> Any:
    """A class of a module of transformers' models, which resizes images this way."""
    backends = ModuleType("backends")
    backends.TorchvisionBackend = BaseImageProcessor  # type: ignore[attr-defined]
    v2 = ModuleType("v2")
    v2.functional = ModuleType("functional")  # type: ignore[attr-defined]
    vars(v2.functional).update(vars(functional), InterpolationMode=int)
    stubs = {name: ModuleType(name) for name in ("torchvision", "torchvision.transforms")}
    stubs |= {"torchvision.transforms.v2": v2, "transformers.image_processing_backends": backends}
    with replaced_modules(stubs):
        imported = importlib.import_module(f"transformers.models.{module}.image_processing_{module}")
    return type("Processor", (getattr(imported, name),), {"resized": staticmethod(resized)})


def squares_of(inputs: Any, side: int, merge: int = 2) -> np.ndarray:
    """Pixels ``[squares, 3, side, side]`` of all parts of a processor's images, each row by row."""
    parts, patch = [], side // merge
    for patches, (down, across) in zip(inputs["pixel_values"], inputs["spatial_shapes"].tolist(), strict=True):
        grid = patches[: down * across].view(down // merge, merge, across // merge, merge, patch, patch, 3)
        parts.append(grid.permute(0, 2, 6, 1, 4, 3, 5).reshape(-1, 3, side, side).numpy())
    return np.concatenate(parts)
