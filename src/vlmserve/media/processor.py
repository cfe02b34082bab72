"""Pictures to the pixel tensors that a vision tower reads, equal to transformers' own (PIL) image processors."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from PIL import Image

from vlmserve.errors import UnsupportedModelError
from vlmserve.types import Pixels

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)
_CLIP_DEFAULTS: dict[str, Any] = {
    "resample": Image.Resampling.BICUBIC,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
}
_SQUARE_DEFAULTS: dict[str, Any] = {
    "resample": Image.Resampling.BICUBIC,
    "size": {"height": 224, "width": 224},
    "do_center_crop": False,
    "image_mean": _HALF,
    "image_std": _HALF,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "CLIP": _CLIP_DEFAULTS,
    "Llava": _CLIP_DEFAULTS,
    "Siglip": _SQUARE_DEFAULTS,
    "ViT": _SQUARE_DEFAULTS | {"resample": Image.Resampling.BILINEAR},
}
_SUFFIXES = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
_TYPES = {family + suffix: family for family in _FAMILIES for suffix in _SUFFIXES}

_TOWERS = {
    "clip_vision_model": {"image_size": 224, "patch_size": 32, "class_tokens": 1},
    "siglip_vision_model": {"image_size": 224, "patch_size": 16, "class_tokens": 0},
}
"""Vision towers' sizes where config.json does not say, and how many tokens stand before the patches."""
_LLAVA_TOWER = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}

_MAX_INTERMEDIATE_PIXELS = 16_000_000
"""Resized pictures with more pixels are never made; only what is kept of them is computed."""


@dataclass(frozen=True)
class PixelRecipe:
    """Every setting that changes pixels. size: the keys and values of the checkpoint's own ``size``."""

    resize: tuple[tuple[str, int], ...] | None
    resample: int
    crop: tuple[int, int] | None
    pad_color: tuple[int, int, int] | None
    rescale: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None


class ImageProcessor:
    """Preprocesses pictures for one checkpoint.

    height, width: of its pixels. num_tokens: placeholders that a picture takes.
    fingerprint: 32-byte digest of all that decides pixels.
    Raises UnsupportedModelError for a processor or vision tower that is not implemented.
    """

    def __init__(self, config: dict[str, Any], settings: dict[str, Any]) -> None:
        """config: of config.json. settings: of preprocessor_config.json, or the image processor's section."""
        self._recipe = _recipe(settings)
        self.height, self.width = self._output_size()
        self.num_tokens = self._count_tokens(config)
        described = json.dumps(["pixels v1", asdict(self._recipe)], sort_keys=True)
        self.fingerprint = blake3(described.encode()).digest()
        self._levels = _level_table(self._recipe)

    def process(self, image: Image.Image) -> Pixels:
        """Float32 ``[1, 3, height, width]`` of a picture of any size and mode."""
        rgb = to_rgb(image)
        if self._recipe.pad_color is not None:
            rgb = self._pad_to_square(rgb, self._recipe.pad_color)
        rgb = self._resize_and_crop(rgb)
        levels = np.asarray(rgb)
        pixels = np.empty((1, 3, self.height, self.width), dtype=np.float32)
        for channel in range(3):
            np.take(self._levels[channel], levels[:, :, channel], out=pixels[0, channel])
        return pixels

    def _output_size(self) -> tuple[int, int]:
        size = dict(self._recipe.resize or ())
        if self._recipe.crop is not None:
            return self._recipe.crop
        if "height" in size:
            return size["height"], size["width"]
        if self._recipe.pad_color is not None and "shortest_edge" in size:
            return size["shortest_edge"], size["shortest_edge"]
        raise UnsupportedModelError("the image processor makes pictures of different sizes, which is not supported")

    def _count_tokens(self, config: dict[str, Any]) -> int:
        vision = config.get("vision_config") or {}
        if config.get("model_type") == "llava" and not vision:
            vision = _LLAVA_TOWER
        kind = vision.get("model_type", "clip_vision_model")
        if kind not in _TOWERS:
            raise UnsupportedModelError(f"the vision tower {kind!r} is not supported; supported: {', '.join(_TOWERS)}")
        tower = {**_TOWERS[kind], **vision}
        if (self.height, self.width) != (tower["image_size"], tower["image_size"]):
            raise UnsupportedModelError(
                f"the image processor makes pictures of {self.height} x {self.width} pixels, "
                f"but the vision tower reads {tower['image_size']} x {tower['image_size']}"
            )
        dropped = 1 if config.get("vision_feature_select_strategy", "default") == "default" else 0
        side = int(tower["image_size"]) // int(tower["patch_size"])
        return side * side + int(tower["class_tokens"]) - dropped

    def _pad_to_square(self, image: Image.Image, color: tuple[int, int, int]) -> Image.Image:
        width, height = image.size
        longest = max(width, height)
        if longest * longest > _MAX_INTERMEDIATE_PIXELS:
            scale = 2 * max(self.height, self.width) / longest
            image = image.resize((max(1, round(width * scale)), max(1, round(height * scale))), self._recipe.resample)
            width, height = image.size
            longest = max(width, height)
        if width == height:
            return image
        square = Image.new("RGB", (longest, longest), color)
        square.paste(image, ((longest - width) // 2, (longest - height) // 2))
        return square

    def _resize_and_crop(self, image: Image.Image) -> Image.Image:
        if self._recipe.resize is not None:
            width, height = _resized(image.size, dict(self._recipe.resize))
            if self._recipe.crop is not None and width * height > _MAX_INTERMEDIATE_PIXELS:
                return self._resize_cropped(image, width, height)
            image = image.resize((width, height), self._recipe.resample)
        return image if self._recipe.crop is None else _center_crop(image, *self._recipe.crop)

    def _resize_cropped(self, image: Image.Image, width: int, height: int) -> Image.Image:
        """What a center crop keeps of the picture resized to `width` x `height`, without resizing the rest."""
        assert self._recipe.crop is not None
        kept_height, kept_width = (
            min(kept, all_) for kept, all_ in zip(self._recipe.crop, (height, width), strict=True)
        )
        x_start, x_stop, left, right = _source_range(image.width, width, kept_width)
        y_start, y_stop, top, bottom = _source_range(image.height, height, kept_height)
        part = image.crop((x_start, y_start, x_stop, y_stop))
        kept = part.resize((kept_width, kept_height), self._recipe.resample, box=(left, top, right, bottom))
        return _center_crop(kept, *self._recipe.crop)


def to_rgb(image: Image.Image) -> Image.Image:
    """`image` as RGB: transparency on white, 16-bit gray scaled to 8 bits."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba).convert("RGB")
    if image.mode.startswith("I;16"):
        # Pillow's own conversion would clip nearly all of the range to white.
        levels = np.asarray(image).astype(np.uint16) >> 8
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _source_range(source: int, resized: int, kept: int) -> tuple[int, int, float, float]:
    """Where the middle `kept` of `resized` pixels come from: the source's range with a margin for the resampling
    filter, and the exact bounds inside of that range."""
    scale = source / resized
    first = (resized - kept) // 2
    margin = 4 * max(scale, 1.0)
    start = max(0, math.floor(first * scale - margin))
    stop = min(source, math.ceil((first + kept) * scale + margin))
    return start, stop, first * scale - start, min((first + kept) * scale - start, stop - start)


def _resized(size: tuple[int, int], target: dict[str, int]) -> tuple[int, int]:
    width, height = size
    if "shortest_edge" not in target:
        return target["width"], target["height"]
    shortest = target["shortest_edge"]
    longest = int(shortest * max(size) / min(size))
    return (shortest, longest) if width <= height else (longest, shortest)


def _center_crop(image: Image.Image, height: int, width: int) -> Image.Image:
    # Rounding differs between pictures that are too large and too small, as it does in transformers.
    left, top = (image.width - width) // 2, (image.height - height) // 2
    if left >= 0 and top >= 0:
        return image.crop((left, top, left + width, top + height))
    canvas_width, canvas_height = max(width, image.width), max(height, image.height)
    x, y = math.ceil((canvas_width - image.width) / 2), math.ceil((canvas_height - image.height) / 2)
    left, top = left + x, top + y
    canvas = Image.new("RGB", (width, height))
    canvas.paste(image, (x - left, y - top))
    return canvas


def _level_table(recipe: PixelRecipe) -> npt.NDArray[np.float32]:
    """What each of the 256 levels of each of the 3 channels becomes."""
    levels = np.arange(256, dtype=np.float32)
    if recipe.rescale is not None:
        levels = (np.arange(256, dtype=np.float64) * recipe.rescale).astype(np.float32)
    table = np.repeat(levels[None], 3, axis=0)
    if recipe.mean is not None and recipe.std is not None:
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (recipe.mean, recipe.std))
        table = (table - mean) / std
    return table


def _recipe(settings: dict[str, Any]) -> PixelRecipe:
    name = settings.get("image_processor_type") or settings.get("feature_extractor_type") or "CLIPImageProcessor"
    if name not in _TYPES:
        supported = ", ".join(f"{family}ImageProcessor" for family in _FAMILIES)
        raise UnsupportedModelError(f"the image processor {name!r} is not supported; supported: {supported}")
    family = _TYPES[name]
    switches = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_pad": False, "rescale_factor": 1 / 255}
    values = {**switches, "crop_size": 224, **_FAMILIES[family]}
    values |= {key: value for key, value in settings.items() if value is not None}
    if values["do_pad"] and family != "Llava":
        raise UnsupportedModelError(f"do_pad is not supported for {name}")
    mean, std = (_per_channel(values[key]) for key in ("image_mean", "image_std"))
    return PixelRecipe(
        resize=tuple(sorted(_size(values["size"], square=family not in ("CLIP", "Llava")).items()))
        if values["do_resize"]
        else None,
        resample=int(values["resample"]),
        crop=_crop_size(values["crop_size"]) if values["do_center_crop"] else None,
        pad_color=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)) if values["do_pad"] else None,
        rescale=float(values["rescale_factor"]) if values["do_rescale"] else None,
        mean=mean if values["do_normalize"] else None,
        std=std if values["do_normalize"] else None,
    )


def _per_channel(value: Any) -> tuple[float, float, float]:
    values = [float(level) for level in value] if isinstance(value, list | tuple) else [float(value)] * 3
    if len(values) != 3:
        raise UnsupportedModelError(f"the image processor has {len(values)} channels; only 3 are supported")
    return values[0], values[1], values[2]


def _size(value: Any, *, square: bool) -> dict[str, int]:
    if isinstance(value, int):
        return {"height": value, "width": value} if square else {"shortest_edge": value}
    if isinstance(value, list | tuple) and len(value) == 2:
        return {"height": int(value[0]), "width": int(value[1])}
    if isinstance(value, dict):
        size = {key: int(edge) for key, edge in value.items() if edge is not None}
        if size.keys() in ({"height", "width"}, {"shortest_edge"}):
            return size
    raise UnsupportedModelError(f"the image processor's size {value!r} is not supported")


def _crop_size(value: Any) -> tuple[int, int]:
    size = _size(value, square=True)
    edge = size.get("shortest_edge", 0)
    return size.get("height", edge), size.get("width", edge)
