"""The interface between the runner and a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from vlmserve.devices.device import Device
from vlmserve.kernels.adapters import AdapterRows
from vlmserve.kernels.attention import AttentionBackend, BatchMetadata, LayerCache
from vlmserve.kernels.states import StateCache
from vlmserve.layer_specs import CacheBytes, CacheLayout, StateSpec
from vlmserve.layers.parallel import Ranks
from vlmserve.layers.stages import StageBudget, Stages
from vlmserve.models.adaptable import AdaptableModel
from vlmserve.models.image_rows import LayerFeatures
from vlmserve.models.output_layers import OutputLayers
from vlmserve.types import Bidirectional, CrossInput, TowerInputs


class VisionEncoder(Protocol):
    """A vision tower with its projector."""

    @property
    def example_shape(self) -> tuple[int, ...] | None:
        """Of the pixels of a small image; None: only the model's own processor can make one."""
        ...

    @property
    def larger_shape(self) -> tuple[int, ...] | None:
        """Shape of the pixels of a larger image; None: all images have one size, or there is no example."""
        ...

    def check(self, shape: tuple[int, ...], num_tokens: int, tiling: TowerInputs | None = None) -> None:
        """Check that pixels ``[tiles, channels, height, width]`` of that shape become that many embeddings.

        Raises InvalidImageError if they do not.
        """
        ...

    def encode(self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None] = ()) -> list[Tensor]:
        """Embeddings of images, in one call.

        pixels: one float tensor ``[tiles, channels, height, width]`` an image, on the model's device.
        tilings: how the tiles of each lie, for a model that puts their embeddings in order, or whatever else it needs.
        Returns one ``[num_tokens, image_width]`` tensor an image: what replaces its placeholders' embeddings, and
        beside that `LayerFeatures.values` if the decoder's layers take any.
        """
        ...

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int:
        """Multiplications that it takes to encode pixels of a shape that `check` lets pass."""
        ...

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        """`encode` in stages as large as the budget allows, as far as it can be divided so finely."""
        ...


@runtime_checkable
class TileEncoder(VisionEncoder, Protocol):
    """A tower whose images consist of tiles of one size, each of which is computed by itself."""

    def encode_tiles(self, tiles: Tensor) -> Tensor:
        """``[tiles, channels, height, width]`` to ``[tiles, embeddings of each, image_width]``. Reads nothing but
        these, so that a device may repeat it over the same memory."""
        ...

    def arranged(self, images: list[Tensor], tilings: Sequence[TowerInputs | None]) -> list[Tensor]:
        """What `VisionEncoder.encode` returns, from the embeddings of each image's tiles."""
        ...


class CrossEncoder(Protocol):
    """Makes the states that a decoder's cross-attention reads.

    feature_size: elements of one of an image's features. state_size: of the keys and values that the decoder's layers
    make of one state.
    """

    feature_size: int
    state_size: int

    def check(self, cross: CrossInput) -> None:
        """Raises InvalidRequestError for an input whose text does not fit the model."""
        ...

    def encode(self, features: Sequence[Tensor], texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """`CrossRows.states` of each input, from what a `VisionEncoder` made of its image and its text's ids."""
        ...


class LanguageModel(Protocol):
    """A decoder over a flat batch and a paged KV cache.

    adapter_rows: which rows of the batch have which adapter; None: the model has no slots for adapters.
    """

    adapter_rows: AdapterRows | None
    state_specs: Sequence[StateSpec]
    """The layers with states."""
    grid_positions: bool
    """Positions of images count frames, rows and columns."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def image_width(self) -> int:
        """Elements of an image's embedding: `hidden_size`, and as many again for each layer that takes features."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """``[tokens]`` int64 to ``[tokens, hidden_size]``."""
        ...

    @property
    def cache_layout(self) -> CacheLayout:
        """Which layers share tensors of the KV cache."""
        ...

    @property
    def max_short_len(self) -> int | None:
        """Sequences of more tokens are computed in another way, at positions after these; None: no such limit."""
        ...

    def first_position(self, prompt_len: int) -> int:
        """Where the positions of a sequence with a prompt of that length begin: 0, unless its length decides how all of
        it is computed."""
        ...

    @property
    def bidirectional(self) -> Bidirectional | None:
        """Which tokens of a prompt attend to each other, so that they must be computed in one step; None: none."""
        ...

    def allocate_cache(
        self, num_blocks: int, block_size: int, device: torch.device | None = None, layout: CacheLayout | None = None
    ) -> list[LayerCache]:
        """The KV cache of all layers with attention, on the model's device or another one. layout: see
        `allocate_layers`."""
        ...

    def cache_bytes(self, block_size: int) -> CacheBytes:
        """Bytes of the KV cache of all layers."""
        ...

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        metadata: BatchMetadata,
        caches: list[LayerCache],
        features: Sequence[LayerFeatures] = (),
        wanted: Tensor | None = None,
        states: Sequence[StateCache] = (),
    ) -> Tensor:
        """``[tokens, hidden_size]`` and int64 positions ``[tokens]`` to final (normed) hidden states.

        Positions of sequences of more than `max_short_len` tokens begin there, all others at `first_position`.
        features: what images add to the outputs of the first layers. wanted: int64, the rows whose states are
        returned; None: all. states: one for each of `state_specs`; `BatchMetadata.states` says which slots rows use.
        """
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``[rows, hidden_size]`` to float32 ``[rows, vocab_size]``; out: contiguous memory that it may take."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory.

    end_token_ids: token ids that end an answer, from generation_config.json or config.json.
    image_token_id: the placeholder, if the model takes images. max_position: the longest context its positions allow.
    weight_bytes: memory of the weights. identity: the digest of `model_identity`. cross: of a decoder that attends to
    images by cross-attention, so that their embeddings stand in no prompt. adaptable: for adapters; None: its
    implementation takes none. ranks: that share the decoder; None: all of it is here. output_layers: of vectors.
    """

    architecture: str
    language_model: LanguageModel
    vision: VisionEncoder | None
    image_token_id: int | None
    end_token_ids: frozenset[int]
    max_position: int
    dtype: torch.dtype
    device: Device
    backend: AttentionBackend
    num_parameters: int
    weight_bytes: int
    identity: bytes
    cross: CrossEncoder | None = None
    adaptable: AdaptableModel | None = None
    ranks: Ranks | None = None
    output_layers: OutputLayers | None = None

    @property
    def embedding_size(self) -> int:
        """Elements of a vector."""
        return self.language_model.hidden_size if self.output_layers is None else self.output_layers.size
