"""The interface between the runner and a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

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
        """Shape of a small image's pixels; None: only the model's own processor can make one."""
        ...

    @property
    def larger_shape(self) -> tuple[int, ...] | None:
        """None: all images have one size, or there is no example."""
        ...

    @property
    def has_dynamic_resolution(self) -> bool:
        """True if one image may fill a step, and its patches attend to each other."""
        ...

    def check(self, shape: tuple[int, ...], num_tokens: int, tiling: TowerInputs | None = None) -> None:
        """Raises InvalidImageError unless pixels ``[tiles, channels, height, width]`` give `num_tokens` embeddings."""
        ...

    def encode(self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None] = ()) -> list[Tensor]:
        """Encode images together.

        pixels: a float tensor ``[tiles, channels, height, width]`` for each image. tilings: arrangement of each image's
        tiles, or other inputs of the model.

        Returns ``[num_tokens, image_width]`` for each image: the embeddings of its placeholders, followed in each row
        by `LayerFeatures.values` if decoder layers take any.
        """
        ...

    def products(self, shape: tuple[int, ...], tiling: TowerInputs | None = None) -> int: ...

    def in_stages(
        self, pixels: list[Tensor], tilings: Sequence[TowerInputs | None], budget: StageBudget
    ) -> Stages[list[Tensor]]:
        """`encode` in stages of up to the budget's size, if possible."""
        ...


@runtime_checkable
class TileEncoder(VisionEncoder, Protocol):
    """A tower of independent tiles of one size."""

    def encode_tiles(self, tiles: Tensor) -> Tensor:
        """``[tiles, channels, height, width]`` to ``[tiles, embeddings of each, image_width]``.

        Reads no other inputs, so that a device may replay it as a graph.
        """
        ...

    def arranged(self, images: list[Tensor], tilings: Sequence[TowerInputs | None]) -> list[Tensor]:
        """Convert embeddings of tiles to the result of `VisionEncoder.encode`."""
        ...


class CrossEncoder(Protocol):
    feature_size: int
    state_size: int

    def check(self, cross: CrossInput) -> None:
        """Raises InvalidRequestError for unsuitable text."""
        ...

    def encode(self, features: Sequence[Tensor], texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return `CrossRows.states` of each input. texts: token ids."""
        ...


class LanguageModel(Protocol):
    """A decoder over a flat batch and a paged KV cache."""

    adapter_rows: AdapterRows | None
    """The adapter slot of each row; None: the model has no slots for adapters."""
    state_specs: Sequence[StateSpec]
    """The layers with states."""
    grid_positions: bool
    """Positions of images count frames, rows and columns."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def image_width(self) -> int:
        """`hidden_size`, plus `hidden_size` for each layer that takes features."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 ``[tokens]`` to ``[tokens, hidden_size]``."""
        ...

    @property
    def cache_layout(self) -> CacheLayout: ...

    @property
    def max_short_len(self) -> int | None:
        """From this position on, longer sequences are computed differently; None: no limit."""
        ...

    def first_position(self, prompt_len: int) -> int:
        """0, unless the prompt's length selects other rotary frequencies."""
        ...

    @property
    def bidirectional(self) -> Bidirectional | None:
        """Tokens of a prompt that attend to each other, and so need one step."""
        ...

    def allocate_cache(
        self, num_blocks: int, block_size: int, device: torch.device | None = None, layout: CacheLayout | None = None
    ) -> list[LayerCache]:
        """layout: see `allocate_layers`."""
        ...

    def cache_bytes(self, block_size: int) -> CacheBytes: ...

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
        """``[tokens, hidden_size]`` and int64 positions ``[tokens]`` to final, normed hidden states.

        Positions begin at `first_position`; in sequences over `max_short_len` tokens, at `max_short_len`. features:
        added by images to the outputs of the first layers. wanted: int64, rows to return; None: all. states: one for
        each of `state_specs`; `BatchMetadata.states` has the slots of rows.
        """
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 ``[rows, vocab_size]``. out: contiguous memory for the result."""
        ...


class Predictor(Protocol):
    """A decoder with a layer for multi-token prediction (MTP)."""

    @property
    def mtp(self) -> nn.Module | None:
        """The layer."""
        ...

    def predict(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        metadata: BatchMetadata,
        caches: list[LayerCache],
        wanted: Tensor,
    ) -> Tensor:
        """Run the layer. See `MTPLayer.forward` and `LanguageModel.forward`."""
        ...


class Assistant(Protocol):
    """A small model that drafts for another one, and reads its keys and values."""

    @property
    def sources(self) -> Sequence[int]:
        """The other model's attention layer whose cache each of the assistant's layers reads."""
        ...

    @property
    def identity(self) -> bytes: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a draft reads."""
        ...

    def draft(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        metadata: BatchMetadata,
        caches: list[LayerCache],
    ) -> tuple[Tensor, Tensor]:
        """Return what the next draft takes for `hidden`, and the most likely tokens, int64 ``[rows]``.

        embeddings: of the newest tokens, ``[rows, hidden_size]`` of the other model. hidden: final, normed states of
        the tokens before them. positions: of the newest tokens, the same for all drafts after them. metadata: contexts
        end before the newest tokens. caches: one for each layer of the assistant.
        """
        ...


@dataclass(frozen=True)
class LoadedModel:
    architecture: str
    language_model: LanguageModel
    vision: VisionEncoder | None
    image_token_id: int | None
    """The placeholder, if the model takes images."""
    end_token_ids: frozenset[int]
    """End an answer, from generation_config.json or config.json."""
    max_position: int
    dtype: torch.dtype
    device: Device
    backend: AttentionBackend
    num_parameters: int
    weight_bytes: int
    identity: bytes
    cross: CrossEncoder | None = None
    """For decoders that read images by cross-attention instead of placeholders."""
    adaptable: AdaptableModel | None = None
    """None: the implementation takes no adapters."""
    ranks: Ranks | None = None
    """Share the decoder; None: it is not sharded."""
    output_layers: OutputLayers | None = None
    predictor: Predictor | None = None
    """The language model, if it drafts."""
    assistant: Assistant | None = None
    """Another model that drafts for this one."""

    @property
    def embedding_size(self) -> int:
        return self.language_model.hidden_size if self.output_layers is None else self.output_layers.size
