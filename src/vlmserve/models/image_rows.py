"""What images put into the rows of a batch: embeddings in place of their placeholders', and what is added to these rows
between the decoder's layers (DeepStack, https://arxiv.org/abs/2406.04334)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows ``first <= row < last`` of a batch take an image's embeddings, from its row `offset` on."""

    key: bytes
    first: int
    last: int
    offset: int


@dataclass(frozen=True, slots=True)
class LayerFeatures:
    """What rows ``first <= row < last`` of a batch have added to the outputs of the first layers.

    values: ``[last - first, layers * hidden_size]``: for the first layer, beside it for the second, and so on.
    """

    first: int
    last: int
    values: Tensor


def place_images(
    embeddings: Tensor, image_rows: Sequence[ImageRows], images: Mapping[bytes, Tensor]
) -> list[LayerFeatures]:
    """Put images' embeddings into rows of a batch, ``[tokens, hidden_size]``, in place. Embeddings of layers, which
    may follow in each row, stay.

    images: by key, ``[num_tokens, image_width]`` (`LanguageModel.image_width`). Returns what the layers get of them.
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
    """Add the features for a layer to its output ``[tokens, hidden_size]``, in place."""
    width = x.shape[1]
    for rows in features:
        x[rows.first : rows.last] += rows.values[:, layer * width : (layer + 1) * width]
