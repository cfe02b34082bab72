"""Layer-wise forward passes: all prompts pass the first layer, then all pass the second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vlmserve.cache.keys import cross_key
from vlmserve.devices.device import Device, LayerExecutor, LayerStack
from vlmserve.kernels.attention import BatchMetadata, LayerCache
from vlmserve.kernels.blocks import allocate_states
from vlmserve.kernels.states import StateRows
from vlmserve.layer_specs import AttentionSpec
from vlmserve.layers.step import StepContext
from vlmserve.models.cross import CrossStateEncoder
from vlmserve.models.decoder import Decoder
from vlmserve.models.image_rows import LayerFeatures, add_features, place_images
from vlmserve.models.protocols import LanguageModel, LoadedModel, VisionEncoder
from vlmserve.quant.calibration import Observer
from vlmserve.runner.batch import BatchBuilder
from vlmserve.runner.requests import RequestState, ScheduledRequest
from vlmserve.steps import NewRequest
from vlmserve.types import CrossInput, Prompt, SamplingParams

BLOCK_SIZE = 16
TOKENS_AT_ONCE = 2048


class OneLayer:
    """A `LayerExecutor` that runs one layer, on stored states instead of embeddings."""

    def __init__(self) -> None:
        self.layer: Callable[[Tensor, Sequence[LayerCache], StepContext], Tensor] | None = None
        self.states: Tensor | None = None

    def run(self, layers: LayerStack, x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Tensor:
        """Without a layer, return the first layer's input."""
        if self.layer is None:
            return x
        assert self.states is not None
        return self.layer(self.states, caches, step)

    def for_part(self) -> LayerExecutor:
        return self  # `LayerByLayer` adds features


@dataclass(frozen=True)
class Group:
    prompts: list[Prompt]
    scheduled: list[ScheduledRequest]
    num_tokens: int
    num_blocks: int


class LayerByLayer:
    """The states of all prompts between two layers of a decoder.

    prompts: with the weight of each of their tokens. states: the next layer's input, ``[tokens, hidden_size]`` by
    group. cross: inputs of cross-attention by key, ``[states, cross_size]``.
    """

    def __init__(self, decoder: Decoder, executor: OneLayer, device: Device, prompts: Mapping[Prompt, float]) -> None:
        self._weights = prompts
        self._decoder, self._executor = decoder, executor
        self._groups = list(make_groups(decoder, list(prompts)))
        self.cross: dict[bytes, Tensor] = {}
        self._batches = BatchBuilder(BLOCK_SIZE, device, cross_states=self.cross)
        self._most_blocks = max(group.num_blocks for group in self._groups)
        self.states: list[Tensor] = []
        self._features: list[list[LayerFeatures]] = []

    def embed(self, images: Mapping[bytes, Tensor]) -> None:
        self._executor.layer = None
        self.states, self._features = [], []
        for group in self._groups:
            batch = self._batches.build(group.scheduled)
            embeddings = self._decoder.embed(batch.token_ids)
            self._features.append(place_images(embeddings, batch.image_rows, images))
            self.states.append(self._run(group, 0, embeddings))

    def through(
        self, index: int, *, observer: Observer | None = None, image_weight: float = 1.0, keep: bool = True
    ) -> None:
        """image_weight: factor of the observer's weights for image tokens. keep: replace the states by the outputs."""
        self._executor.layer = partial(self._decoder.through_layer, index)
        for number, group in enumerate(self._groups):
            if observer is not None:
                observer.row_weights = self._row_weights(group, image_weight)
            self._executor.states = self.states[number]
            output = self._run(group, index)
            if index < self._decoder.spec.deepstack:
                add_features(output, self._features[number], index)
            if keep:
                self.states[number] = output

    def _run(self, group: Group, index: int, embeddings: Tensor | None = None) -> Tensor:
        decoder = self._decoder
        batch = self._batches.build(group.scheduled)
        layers, mixer = decoder.spec.attention, decoder.spec.mixers[index]
        # Layers run one after another, so they may share the cache.
        spec, blocks = (mixer, self._most_blocks) if isinstance(mixer, AttentionSpec) else (layers[0], 1)
        cache = decoder.backend.allocate(blocks, BLOCK_SIZE, spec, decoder.dtype, decoder.device)
        if embeddings is None:
            embeddings = torch.zeros(
                len(batch.token_ids), decoder.hidden_size, dtype=decoder.dtype, device=decoder.device
            )
        caches, states = [cache] * len(layers), allocate_states(decoder.state_specs, 1, decoder.dtype, decoder.device)
        return decoder.forward(embeddings, batch.positions, _whole(batch.metadata), caches, states=states)

    def _row_weights(self, group: Group, image_weight: float) -> Tensor | None:
        batch = self._batches.build(group.scheduled)
        counted = [self._weights[prompt] for prompt in group.prompts]
        if all(weight == 1 for weight in counted) and (image_weight == 1 or not batch.image_rows):
            return None
        lengths = torch.tensor([len(prompt.token_ids) for prompt in group.prompts])
        weights = torch.tensor(counted).repeat_interleave(lengths).to(self._decoder.device)
        for rows in batch.image_rows:
            weights[rows.first : rows.last] *= image_weight
        return weights


def hidden_states(model: LoadedModel, group: Group) -> Tensor:
    """Final hidden states, ``[tokens, hidden_size]``."""
    decoder = model.language_model
    images: dict[bytes, Tensor] = {}
    if model.vision is not None:
        images = dict(encode_images(model.vision, model.device, group.prompts, model.dtype))
    cross: dict[bytes, Tensor] = {}
    for one in (prompt.cross for prompt in group.prompts if prompt.cross is not None):
        assert model.cross is not None
        cross[key_of(one)] = model.cross.encode([images[one.image.key]], [one.token_ids])[0]
    batch = BatchBuilder(BLOCK_SIZE, model.device, cross_states=cross).build(group.scheduled)
    caches = decoder.allocate_cache(group.num_blocks, BLOCK_SIZE)
    embeddings = decoder.embed(batch.token_ids)
    features = place_images(embeddings, batch.image_rows, images)
    states = allocate_states(decoder.state_specs, 1, model.dtype, model.device.torch_device)
    return decoder.forward(embeddings, batch.positions, _whole(batch.metadata), caches, features, states=states)


def _whole(metadata: BatchMetadata) -> BatchMetadata:
    """Mark whole prompts, for layers with recurrent states."""
    return replace(metadata, states=StateRows.of_prompts(metadata.query_lens, metadata.query_starts.device))


def make_groups(decoder: LanguageModel, prompts: Sequence[Prompt]) -> Iterator[Group]:
    """A group has about `TOKENS_AT_ONCE` tokens and cross-attention states."""
    group, attended = Group([], [], 0, 0), 0
    # The attention kernels expect requests with one token first.
    for number, prompt in enumerate(sorted(prompts, key=lambda prompt: len(prompt.token_ids))):
        length = len(prompt.token_ids)
        attended += 0 if prompt.cross is None else prompt.cross.num_states
        if group.prompts and group.num_tokens + length + attended > TOKENS_AT_ONCE:
            yield group
            group, attended = Group([], [], 0, 0), 0 if prompt.cross is None else prompt.cross.num_states
        last = group.num_blocks + -(-length // BLOCK_SIZE)
        scheduled = _scheduled(decoder, prompt, number, range(group.num_blocks, last))
        group = Group([*group.prompts, prompt], [*group.scheduled, scheduled], group.num_tokens + length, last)
    yield group


def _scheduled(decoder: LanguageModel, prompt: Prompt, number: int, block_ids: range) -> ScheduledRequest:
    length = len(prompt.token_ids)
    request = NewRequest(
        request_id=str(number),
        start=0,
        num_tokens=length,
        num_prompt_tokens=length,
        token_ids=list(prompt.token_ids),
        block_ids=[list(block_ids)],
        params=SamplingParams(),
        seed=0,
        max_len=length + 1,
        end_token_ids=[],
        images=tuple(span.placement for span in prompt.images),
        cross_key=None if prompt.cross is None else key_of(prompt.cross),
    )
    return ScheduledRequest(RequestState(request, decoder), 0, length, [], 0)


def encode_images(
    vision: VisionEncoder, device: Device, prompts: Sequence[Prompt], dtype: torch.dtype
) -> Iterator[tuple[bytes, Tensor]]:
    images = {image.key: image for prompt in prompts for image in prompt.image_inputs}
    for key, image in images.items():
        pixels = device.upload_pixels(image.pixels, dtype, image.levels)
        yield key, vision.encode([pixels], [image.tiling])[0]


def cross_sources(
    cross: CrossStateEncoder, prompts: Sequence[Prompt], images: Mapping[bytes, Tensor]
) -> Iterator[tuple[bytes, Tensor]]:
    """Yield key and source of each distinct input. images: embeddings by key."""
    inputs = {key_of(prompt.cross): prompt.cross for prompt in prompts if prompt.cross is not None}
    for key, one in inputs.items():
        yield key, cross.sources([images[one.image.key]], [one.token_ids])[0]


def key_of(cross: CrossInput) -> bytes:
    return cross_key(cross.image.key, cross.token_ids)
