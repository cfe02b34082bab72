"""Turns images into pixel tensors for vision towers.

Unless their modules say otherwise, processors equal Transformers' PIL processors. Only JPEGs that shrink to less than a
quarter in each direction differ, because their decoder omits frequencies that resizing removes. They differ by 0.2 of
255 levels on average, the most detailed ones by 1.0. `exact_pixels` decodes every pixel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypedDict, TypeVar

import msgspec
import numpy as np
from blake3 import blake3
from PIL import Image

from vlmserve.errors import UnsupportedModelError
from vlmserve.families.registry import vision_config, vision_family
from vlmserve.levels import Levels
from vlmserve.media.budget import ImageBudget
from vlmserve.media.image_files import ImageFiles
from vlmserve.media.images import DecodedImage
from vlmserve.types import Canvas, Pixels, TowerInputs

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CLIP_LEVELS: dict[str, Any] = {
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "resample": Image.Resampling.BICUBIC,
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
}
"""Defaults of processors with CLIP's pixel normalization."""
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
    "Gemma3": _SQUARE_DEFAULTS | {"resample": Image.Resampling.BILINEAR},
    "Blip": _SQUARE_DEFAULTS
    | {"size": {"height": 384, "width": 384}, "image_mean": _CLIP_MEAN, "image_std": _CLIP_STD},
    "ViT": _SQUARE_DEFAULTS | {"resample": Image.Resampling.BILINEAR},
}
_SUFFIXES = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
_TYPES = {family + suffix: family for family in _FAMILIES for suffix in _SUFFIXES}

_TOWERS: dict[str, dict[str, Any]] = {
    "clip_vision_model": {"image_size": 224, "patch_size": 32, "class_tokens": 1},
    "siglip_vision_model": {"image_size": 224, "patch_size": 16, "class_tokens": 0},
    "blip_vision_model": {"image_size": 384, "patch_size": 16, "class_tokens": 1, "strategy": "full"},
}
"""Defaults of vision towers: sizes, tokens before the patches, and whether the first token is dropped ("default") or
kept ("full")."""

MAX_INTERMEDIATE_PIXELS = 16_000_000
"""Larger resized images are not made; only the cropped part is computed."""


class Placeholders(NamedTuple):
    """As in `ImageInput`."""

    num_tokens: int
    grid: tuple[int, int, int] | Canvas | None = None
    tiling: TowerInputs | None = None
    text: tuple[tuple[int, int], ...] = ()
    end_id: int | None = None
    has_label: bool = True


class ImageProcessor(Protocol):
    fingerprint: bytes
    """32-byte digest of everything that affects pixels."""
    levels: Levels | None
    """As in `ImageInput`."""

    def within(self, budget: ImageBudget) -> Self:
        """Raises InvalidRequestError for a budget that model or server does not allow."""
        ...

    def reduction(self, size: tuple[int, int]) -> float:
        """Pixels of the image for each wanted pixel, along the side where they are fewer; 1.0: decode every pixel."""
        ...

    def prepare(self, decoded: DecodedImage) -> tuple[Pixels, Placeholders]:
        """Return ``[tiles, 3, height, width]``, uint8 with `levels`, else float32, and its placeholders.

        Raises InvalidImageError for a shape that the model cannot take.
        """
        ...

    def view(self, size: tuple[int, int], pixels: Pixels, placeholders: Placeholders) -> View: ...

    def label(self, index: int) -> Sequence[int]:
        """Token ids before the prompt's image `index`, from 0."""
        return ()


class PixelProcessor(ImageProcessor, Protocol):
    """Derives placeholders from pixels."""

    def prepare(self, decoded: DecodedImage) -> tuple[Pixels, Placeholders]:
        pixels = self.process(decoded)
        return pixels, self.placeholders(pixels, decoded.size)

    def process(self, decoded: DecodedImage) -> Pixels:
        """uint8 ``[tiles, 3, height, width]``. Raises as `prepare` does."""
        ...

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        """size: the image's width and height."""
        ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings that affect pixels."""

    resample: int
    levels: Levels


R = TypeVar("R", bound=Recipe)


class RecipeProcessor(PixelProcessor, Generic[R]):
    """A processor with a recipe.

    Constructors take `config` and `settings` as in `ImageFiles`, and raise UnsupportedModelError for unsupported
    settings, ModelLoadError for contradictory files. exact_pixels: decode every pixel, even if few are kept.
    """

    version: ClassVar[str]
    """Change it when the same recipe produces other pixels."""

    def _follow(self, recipe: R, *, exact_pixels: bool) -> None:
        self._recipe, self._exact_pixels, self.levels = recipe, exact_pixels, recipe.levels
        self.fingerprint = blake3(msgspec.json.encode([self.version, exact_pixels, recipe], order="sorted")).digest()

    def _following(self, recipe: R) -> Self:
        if recipe == self._recipe:
            return self
        other = copy(self)
        other._follow(recipe, exact_pixels=self._exact_pixels)
        return other

    def reduction(self, size: tuple[int, int]) -> float:
        if self._exact_pixels:
            return 1.0
        return min(own / new for own, new in zip(size, self._target(size), strict=True))

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height of the whole image for the model."""
        raise NotImplementedError

    def view(self, size: tuple[int, int], pixels: Pixels, placeholders: Placeholders) -> View:
        return whole_view(size, *self._target(size))


class View(NamedTuple):
    """The part of an image that a model sees."""

    width: int | None
    """In pixels of the model; None: unknown."""
    height: int | None
    box: tuple[float, float, float, float] | None
    """Left, top, right and bottom in the image's own pixels; beyond the image is padding. None: unknown."""


def whole_view(size: tuple[int, int], width: int, height: int) -> View:
    """size: the image's own. width, height: for the model."""
    return View(width, height, (0.0, 0.0, float(size[0]), float(size[1])))


@dataclass(frozen=True)
class PixelRecipe(Recipe):
    resize: tuple[tuple[str, int], ...] | None
    """Items of the checkpoint's ``size``."""
    crop: tuple[int, int] | None
    pad_color: tuple[int, int, int] | None


class FixedSizeProcessor(RecipeProcessor[PixelRecipe]):
    """height, width: of the pixels. num_tokens: placeholders of an image."""

    version = "pixels v2"

    def __init__(self, config: dict[str, Any], settings: dict[str, Any], *, exact_pixels: bool = False) -> None:
        self._follow(_recipe(settings), exact_pixels=exact_pixels)
        self.height, self.width = self._output_size()
        self.num_tokens = self._count_tokens(config)

    @classmethod
    def from_files(cls, files: ImageFiles) -> Self:
        return cls(files.config, files.settings, exact_pixels=files.exact_pixels)

    def within(self, budget: ImageBudget) -> Self:
        budget = budget.settled(self.height * self.width, self.height * self.width)
        budget.check_least(self.height * self.width, self.num_tokens)
        budget.check_most(self.height * self.width)
        return self

    def reduction(self, size: tuple[int, int]) -> float:
        if self._exact_pixels or self._recipe.resize is None:
            return 1.0
        if self._recipe.pad_color is not None:
            size = (max(size), max(size))
        width, height = _resized(size, dict(self._recipe.resize))
        return min(size[0] / width, size[1] / height)

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        return Placeholders(self.num_tokens)

    def view(self, size: tuple[int, int], pixels: Pixels, placeholders: Placeholders) -> View:
        """The whole image, a crop of it, or the image with padding."""
        recipe = self._recipe
        left, top, (width, height) = 0, 0, size
        if recipe.pad_color is not None:
            longest = max(size)
            left, top = -((longest - width) // 2), -((longest - height) // 2)
            width = height = longest
        return cropped_view((width, height), dict(recipe.resize or ()), recipe.crop, (left, top))

    def process(self, decoded: DecodedImage) -> Pixels:
        decoded = replace(decoded, image=to_rgb(decoded.image))
        if self._recipe.pad_color is not None:
            decoded = self._pad_to_square(decoded, self._recipe.pad_color)
        return to_pixels([self._resize_and_crop(decoded)])

    def _output_size(self) -> tuple[int, int]:
        size = dict(self._recipe.resize or ())
        if self._recipe.crop is not None:
            return self._recipe.crop
        if "height" in size:
            return size["height"], size["width"]
        if self._recipe.pad_color is not None and "shortest_edge" in size:
            return size["shortest_edge"], size["shortest_edge"]
        raise UnsupportedModelError("the image processor makes images of different sizes, which is not supported")

    def _count_tokens(self, config: dict[str, Any]) -> int:
        family = vision_family(config)
        vision = vision_config(config)
        own = None if family is None else family.image_tokens(config)
        kind = vision.get("model_type", "clip_vision_model" if own is None else None)
        if own is None and kind not in _TOWERS:
            raise UnsupportedModelError(f"the vision tower {kind!r} is not supported; supported: {', '.join(_TOWERS)}")
        tower = {**_TOWERS.get(kind, {}), **vision}
        edge = tower.get("image_size")
        if edge is not None and (self.height, self.width) != (edge, edge):
            raise UnsupportedModelError(
                f"the image processor makes images of {self.height} x {self.width} pixels, "
                f"but the vision tower reads {edge} x {edge}"
            )
        if own is not None:
            return own
        strategy = config.get("vision_feature_select_strategy", tower.get("strategy", "default"))
        dropped = 1 if strategy == "default" else 0
        side = int(tower["image_size"]) // int(tower["patch_size"])
        return side * side + int(tower["class_tokens"]) - dropped

    def _pad_to_square(self, decoded: DecodedImage, color: tuple[int, int, int]) -> DecodedImage:
        edge = math.ceil(max(decoded.box[2:]))
        if edge * edge > MAX_INTERMEDIATE_PIXELS:
            width, height = decoded.size
            scale = 2 * max(self.height, self.width) / max(width, height)
            size = (max(1, round(width * scale)), max(1, round(height * scale)))
            decoded = DecodedImage.whole(decoded.image.resize(size, self._recipe.resample, decoded.box))
        width, height = decoded.size
        if width == height:
            return decoded
        longest = max(width, height)
        left, upper, right, lower = decoded.box
        across, down = (right - left) / width, (lower - upper) / height
        # The padding's edge lies between two pixels; the box keeps the fraction.
        margin_x, margin_y = (longest - width) // 2 * across, (longest - height) // 2 * down
        x, y = math.ceil(margin_x - left), math.ceil(margin_y - upper)
        left, upper = left + x - margin_x, upper + y - margin_y
        box = (left, upper, left + longest * across, upper + longest * down)
        square = Image.new("RGB", (math.ceil(box[2]), math.ceil(box[3])), color)
        square.paste(decoded.image, (x, y))
        return DecodedImage(square, (longest, longest), box)

    def _resize_and_crop(self, decoded: DecodedImage) -> Image.Image:
        image = decoded.image
        if self._recipe.resize is not None:
            width, height = _resized(decoded.size, dict(self._recipe.resize))
            if self._recipe.crop is not None and (decoded.is_reduced or width * height > MAX_INTERMEDIATE_PIXELS):
                return self._resize_cropped(decoded, width, height)
            image = image.resize((width, height), self._recipe.resample, decoded.box)
        return image if self._recipe.crop is None else _center_crop(image, *self._recipe.crop)

    def _resize_cropped(self, decoded: DecodedImage, width: int, height: int) -> Image.Image:
        """The center crop of the resized image, without resizing the rest."""
        assert self._recipe.crop is not None
        kept_height, kept_width = (
            min(kept, all_) for kept, all_ in zip(self._recipe.crop, (height, width), strict=True)
        )
        image, (left, upper, right, lower) = decoded.image, decoded.box
        x_start, x_stop, x_first, x_last = _source_range((left, right), image.width, width, kept_width)
        y_start, y_stop, y_first, y_last = _source_range((upper, lower), image.height, height, kept_height)
        part = image.crop((x_start, y_start, x_stop, y_stop))
        box = (x_first, y_first, x_last, y_last)
        return _center_crop(part.resize((kept_width, kept_height), self._recipe.resample, box), *self._recipe.crop)


def to_rgb(image: Image.Image) -> Image.Image:
    """Transparency becomes white, 16-bit gray is scaled to 8-bit."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba).convert("RGB")
    if image.mode.startswith("I;16"):
        # Pillow's conversion would clip nearly all of the range to white.
        levels = np.asarray(image).astype(np.uint16) >> 8
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _source_range(bounds: tuple[float, float], length: int, resized: int, kept: int) -> tuple[int, int, float, float]:
    """Source of the middle `kept` of `resized` pixels: pixels with a margin for the resampling filter, and the exact
    bounds within them.

    bounds: of the image in its `length` pixels.
    """
    scale = (bounds[1] - bounds[0]) / resized
    first = bounds[0] + (resized - kept) // 2 * scale
    margin = 4 * max(scale, 1.0)
    start = max(0, math.floor(first - margin))
    stop = min(length, math.ceil(first + kept * scale + margin))
    return start, stop, first - start, min(first + kept * scale - start, stop - start)


def cropped_view(
    size: tuple[int, int],
    target: dict[str, int],
    crop: tuple[int, int] | None,
    start: tuple[int, int] = (0, 0),
) -> View:
    """The view after resizing and center-cropping.

    target: a checkpoint's ``size``; empty: no resizing. crop: height and width. start: origin of the padded image in
    the image's pixels.
    """
    width, height = _resized(size, target) if target else size
    seen_height, seen_width = crop or (height, width)
    across, down = size[0] / width, size[1] / height
    left, top = (width - seen_width) // 2, (height - seen_height) // 2
    box = (
        start[0] + left * across,
        start[1] + top * down,
        start[0] + (left + seen_width) * across,
        start[1] + (top + seen_height) * down,
    )
    return View(seen_width, seen_height, box)


def _resized(size: tuple[int, int], target: dict[str, int]) -> tuple[int, int]:
    width, height = size
    if "shortest_edge" not in target:
        return target["width"], target["height"]
    shortest = target["shortest_edge"]
    longest = int(shortest * max(size) / min(size))
    return (shortest, longest) if width <= height else (longest, shortest)


def _center_crop(image: Image.Image, height: int, width: int) -> Image.Image:
    # Transformers rounds differently for images smaller than the crop.
    left, top = (image.width - width) // 2, (image.height - height) // 2
    if left >= 0 and top >= 0:
        return image.crop((left, top, left + width, top + height))
    canvas_width, canvas_height = max(width, image.width), max(height, image.height)
    x, y = math.ceil((canvas_width - image.width) / 2), math.ceil((canvas_height - image.height) / 2)
    left, top = left + x, top + y
    canvas = Image.new("RGB", (width, height))
    canvas.paste(image, (x - left, y - top))
    return canvas


def to_pixels(images: Sequence[Image.Image]) -> Pixels:
    """``[images, 3, height, width]`` of RGB images of one size."""
    pixels = np.empty((len(images), 3, images[0].height, images[0].width), dtype=np.uint8)
    for image, own in zip(images, pixels, strict=True):
        array = np.asarray(image)
        for channel in range(3):
            own[channel] = array[:, :, channel]
    return pixels


def _recipe(settings: dict[str, Any]) -> PixelRecipe:
    name = settings.get("image_processor_type") or settings.get("feature_extractor_type") or "CLIPImageProcessor"
    if name not in _TYPES:
        supported = ", ".join(f"{family}ImageProcessor" for family in _FAMILIES)
        raise UnsupportedModelError(f"the image processor {name!r} is not supported; supported: {supported}")
    family = _TYPES[name]
    switches = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_pad": False, "rescale_factor": 1 / 255}
    values = {**switches, "crop_size": 224, **_FAMILIES[family]}
    values |= given(settings)
    if values.get("do_pan_and_scan"):
        raise UnsupportedModelError(
            "pan and scan is not supported; set do_pan_and_scan to false in the image processor"
        )
    if values["do_pad"] and family != "Llava":
        raise UnsupportedModelError(f"do_pad is not supported for {name}")
    mean = per_channel(values["image_mean"])
    return PixelRecipe(
        resize=tuple(sorted(_size(values["size"], square=family not in ("CLIP", "Llava")).items()))
        if values["do_resize"]
        else None,
        crop=_crop_size(values["crop_size"]) if values["do_center_crop"] else None,
        pad_color=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)) if values["do_pad"] else None,
        **resizing(values),
    )


class Resizing(TypedDict):
    resample: int
    levels: Levels


def resizing(values: dict[str, Any]) -> Resizing:
    mean, std = (per_channel(values[key]) if values["do_normalize"] else None for key in ("image_mean", "image_std"))
    rescale = float(values["rescale_factor"]) if values["do_rescale"] else None
    return Resizing(resample=int(values["resample"]), levels=Levels(rescale, mean, std))


def given(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that are not null."""
    return {key: value for key, value in settings.items() if value is not None}


def per_channel(value: Any) -> tuple[float, float, float]:
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
