"""Insert image embeddings into rows of a batch, and features between layers (DeepStack,
https://arxiv.org/abs/2406.04334).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows ``first <= row < last`` of a batch take an image's embeddings from row `offset` on."""

    key: bytes
    first: int
    last: int
    offset: int


@dataclass(frozen=True, slots=True)
class LayerFeatures:
    """Features to add to rows ``first <= row < last`` after each of the first layers."""

    first: int
    last: int
    values: Tensor
    """``[last - first, layers * hidden_size]``, layer by layer."""


def place_images(
    embeddings: Tensor, image_rows: Sequence[ImageRows], images: Mapping[bytes, Tensor]
) -> list[LayerFeatures]:
    """Write image embeddings into rows ``[tokens, hidden_size]`` in place. Returns features for layers.

    Per-layer embeddings in the rows stay. images: ``[num_tokens, image_width]`` by key.
    """
    features = []
    for rows in image_rows:
        image = images[rows.key][rows.offset : rows.offset + rows.last - rows.first]
        width = min(embeddings.shape[1], image.shape[1])
        embeddings[rows.first : rows.last, :width] = image[:, :width]
        if image.shape[1] > width:
            features.append(LayerFeatures(rows.first, rows.last, image[:, width:]))
    return features


def add_features(x: Tensor, features: Sequence[LayerFeatures], layer: int) -> None:
    width = x.shape[1]
    for rows in features:
        x[rows.first : rows.last] += rows.values[:, layer * width : (layer + 1) * width]
