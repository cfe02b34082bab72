"""The Transformers backend: transformers' language models over our paged KV cache.

Our attention replaces theirs (`transformers_attention`), so batching and prefix caching work. A check at load rejects
models with other state or attention: it compares logits of chunked and batched sequences with transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmserve.errors import UnsupportedModelError
from vlmserve.kernels.adapters import AdapterRows
from vlmserve.kernels.attention import AttentionBackend, AttentionContext, BatchMetadata, BidirectionalRows, LayerCache
from vlmserve.kernels.blocks import allocate_layers
from vlmserve.kernels.states import StateCache
from vlmserve.layer_specs import AttentionSpec, CacheBytes, CacheLayout, StateSpec
from vlmserve.models.expert_choices import ExpertChoices
from vlmserve.models.grid_positions import grid_positions
from vlmserve.models.image_rows import ImageRows, LayerFeatures, place_images
from vlmserve.models.transformers_attention import NO_INTERFACE, attending, attention_by_part
from vlmserve.models.transformers_checkpoint import MISFITS, Sample, first_line
from vlmserve.steps import bidirectional_spans
from vlmserve.types import Bidirectional, ImageSpan

CHECKED_LENS = (9, 24)
"""Lengths of the sequences that are compared at load."""
TOLERANCE = {torch.float32: 1e-3}
ROUNDED_TOLERANCE = 0.1
"""Maximum difference of logits, relative to their standard deviation. A wrong model differs by about 1."""

BIDIRECTIONAL_SCOPES: tuple[Bidirectional | None, ...] = (None, "images", "prefix", "prompt")
"""Tokens of a prompt that may attend to each other, in the order of trials."""

ChooseBackend = Callable[[Sequence[AttentionSpec]], AttentionBackend]
"""Chooses a backend for all of these layers."""


class _Finished:
    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


class TransformersModel:
    """A `LanguageModel` that wraps one of transformers'. It takes no adapters.

    sample: an image, for a model that takes images. Raises UnsupportedModelError if its attention cannot be replaced,
    or if its logits differ from transformers'.
    """

    adapter_rows: AdapterRows | None = None
    max_short_len: int | None = None
    state_specs: Sequence[StateSpec] = ()
    grid_positions = True

    def __init__(self, model: Any, backend: ChooseBackend, sample: Sample | None = None) -> None:
        try:
            self._setup(model, backend)
            self._check()
            if sample is not None:
                self._find_bidirectional(sample)
        except (*MISFITS, RuntimeError) as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot run over a flat batch: {first_line(error)}"
            ) from error

    def _setup(self, model: Any, backend: ChooseBackend) -> None:
        self._model = model
        self._body = model.get_decoder()
        self._embeddings = model.get_input_embeddings()
        self.hidden_size = self.image_width = int(self._embeddings.weight.shape[1])
        self.bidirectional: Bidirectional | None = None
        self.attention = self._find_attention()
        self.backend = backend(self.attention)

    def _find_attention(self) -> tuple[AttentionSpec, ...]:
        """Record each layer's spec in a pass over two tokens."""
        specs: list[AttentionSpec] = []
        windows: list[int] = []

        def record(query: Tensor, key: Tensor, value: Tensor, spec: Callable[[], AttentionSpec]) -> Tensor:
            specs.append(spec())
            return torch.zeros_like(query)

        positions = torch.arange(2, device=self._model.device)
        with torch.inference_mode(), attending(record, windows):
            self._hidden(self.embed(positions), positions)
        if not specs:
            raise UnsupportedModelError(NO_INTERFACE)
        if unknown := set(windows) - {spec.window for spec in specs}:
            raise UnsupportedModelError(f"masks have a window of {min(unknown)} tokens, and no layer has one")
        return tuple(specs)

    @property
    def end_token_ids(self) -> frozenset[int]:
        ids = self._model.generation_config.eos_token_id
        return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    @property
    def cache_layout(self) -> CacheLayout:
        return CacheLayout.of(self.attention)

    def longest_context(self, max_position: int) -> int:
        """Bidirectional prompts ignore windows."""
        windows = [spec.window for spec in self.attention if spec.window is not None]
        return min([max_position, *windows]) if self.bidirectional == "prompt" else max_position

    def first_position(self, prompt_len: int) -> int:
        return 0

    def embed(self, token_ids: Tensor) -> Tensor:
        embeddings: Tensor = self._embeddings(token_ids)
        return embeddings

    def allocate_cache(
        self, num_blocks: int, block_size: int, device: torch.device | None = None, layout: CacheLayout | None = None
    ) -> list[LayerCache]:
        allocate, kind = self.backend.allocate, (self._model.dtype, device or self._model.device)
        return allocate_layers(self.attention, lambda spec: allocate(num_blocks, block_size, spec, *kind), layout)

    def cache_bytes(self, block_size: int) -> CacheBytes:
        return CacheBytes.of(
            self.attention, block_size, lambda spec: self.backend.block_bytes(block_size, spec, self._model.dtype)
        )

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
        plan = self.backend.prepare(metadata, caches[0].block_size, self.attention, self._model.dtype)
        layers = zip(caches, self.attention, strict=True)

        def attend(query: Tensor, key: Tensor, value: Tensor, _: object) -> Tensor:
            return self.backend.attend(query, key, value, AttentionContext(*next(layers), metadata, plan))

        with attending(attend):
            hidden = self._hidden(embeddings, positions, features)
        return hidden if wanted is None else hidden[wanted]

    def _hidden(self, embeddings: Tensor, positions: Tensor, features: Sequence[LayerFeatures] = ()) -> Tensor:
        further: dict[str, Any] = {}
        if features:
            masks = torch.zeros(1, len(embeddings), dtype=torch.bool, device=embeddings.device)
            for rows in features:
                masks[0, rows.first : rows.last] = True
            values = torch.cat([rows.values for rows in features])
            further["visual_pos_masks"] = masks
            further["deepstack_visual_embeds"] = torch.split(values, self.hidden_size, 1)
        output = self._body(
            inputs_embeds=embeddings[None], position_ids=positions.unsqueeze(-2), use_cache=False, **further
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        finished = _Finished(hidden[None])
        # Set only for this call: a self-reference would keep the model alive.
        self._body.forward = lambda *_, **__: finished
        try:
            logits: Tensor = self._model(inputs_embeds=finished.last_hidden_state, use_cache=False).logits[0]
        finally:
            del self._body.forward
        return logits.float()

    def _check(self) -> None:
        """Raises UnsupportedModelError if logits over the paged cache differ from transformers'."""
        generator = torch.Generator().manual_seed(0)
        sequences = [torch.randint(self.vocab_size, (length,), generator=generator) for length in CHECKED_LENS]
        with torch.inference_mode():
            choices = ExpertChoices()
            expected = torch.cat([self._their_logits(sequence, choices) for sequence in sequences])
            actual = torch.cat(self._our_logits(sequences, choices))
        self._compare(actual, expected, "its layers keep or attend to more than keys and values")

    @torch.inference_mode()
    def _find_bidirectional(self, sample: Sample) -> None:
        """Find the tokens of a prompt with an image that attend to each other.

        Raises UnsupportedModelError if no scope gives transformers' logits.
        """
        device, image = self._model.device, sample.image
        pixels = torch.tensor(image.pixels, device=device, dtype=self._model.dtype)
        [image_embeddings] = sample.vision.encode([pixels], [image.tiling])
        self.image_width = sample.vision.width
        text = [token for token in range(self.vocab_size) if token != sample.image_token_id][:8]
        shown = [sample.image_token_id] * image.num_tokens
        for place, token in image.text:
            shown[place] = token
        ids = torch.tensor([*text[:5], *shown, *text[5:]])
        placeholders = (ids == sample.image_token_id).to(device)
        types = {name: (placeholders * value).long()[None] for name, value in sample.token_types.items()}
        further = sample.vision.further(image.tiling, device)
        choices = ExpertChoices()
        expected = self._their_logits(ids, choices, pixel_values=pixels, **further, **types)
        span = ImageSpan(image, 5).placement
        places = np.arange(len(ids))
        positions = torch.from_numpy(places if image.grid is None else grid_positions([span], places)).to(device)
        image_rows = [ImageRows(image.key, *run) for run in span.runs(0, len(ids))]
        for ahead in BIDIRECTIONAL_SCOPES:
            embeddings = self.embed(ids.to(device))
            features = place_images(embeddings, image_rows, {image.key: image_embeddings})
            rows = [
                BidirectionalRows(0, first, last - 1, last)
                for first, last in bidirectional_spans([span], len(ids), ahead)
            ]
            metadata, _ = _metadata([(0, len(ids))], len(ids), device, rows)
            with choices.replay([(0, len(ids))]):
                hidden = self.forward(embeddings, positions, metadata, self.allocate_cache(1, len(ids)), features)
            actual = self.logits(hidden)
            if self._logits_agree(actual, expected):
                self.bidirectional = ahead
                return
        self._compare(actual, expected, "its images are more to it than embeddings in a row")

    def _logits_agree(self, actual: Tensor, expected: Tensor) -> bool:
        # An error may be NaN.
        return _distance(actual, expected) <= TOLERANCE.get(self._model.dtype, ROUNDED_TOLERANCE)

    def _compare(self, actual: Tensor, expected: Tensor, reason: str) -> None:
        if not self._logits_agree(actual, expected):
            error = _distance(actual, expected)
            raise UnsupportedModelError(
                f"over a paged cache its logits differ from transformers' own by {error:.2g} of their spread: {reason}"
            )

    def _their_logits(self, sequence: Tensor, choices: ExpertChoices, **image_inputs: Tensor) -> Tensor:
        self._model.set_attn_implementation("eager")
        try:
            inputs = {"input_ids": sequence[None].to(self._model.device), **image_inputs}
            with choices.record():
                logits: Tensor = self._model(**inputs, use_cache=False).logits
        finally:
            self._model.set_attn_implementation(attention_by_part(self._model.config))
        return logits[0].float()

    def _our_logits(self, sequences: Sequence[Tensor], choices: ExpertChoices) -> list[Tensor]:
        """Logits of all sequences in one batch, in three steps; the last computes one token of each."""
        block_size = max(CHECKED_LENS)
        caches = self.allocate_cache(len(sequences), block_size)
        logits: list[list[Tensor]] = [[] for _ in sequences]
        cuts = [(0, len(sequence) // 2, len(sequence) - 1, len(sequence)) for sequence in sequences]
        for step in range(3):
            spans = [(cut[step], cut[step + 1]) for cut in cuts]
            ids = torch.cat([ids[first:last] for ids, (first, last) in zip(sequences, spans, strict=True)])
            metadata, positions = _metadata(spans, block_size, self._model.device)
            with choices.replay(spans):
                hidden = self.forward(self.embed(ids.to(self._model.device)), positions, metadata, caches)
            for rows, part in zip(logits, torch.split(hidden, metadata.query_lens), strict=True):
                rows.append(self.logits(part))
        return [torch.cat(rows) for rows in logits]


def _distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).std() / expected.std())


def _metadata(
    spans: Sequence[tuple[int, int]],
    block_size: int,
    device: torch.device,
    bidirectional: Sequence[BidirectionalRows] = (),
) -> tuple[BatchMetadata, Tensor]:
    """Batch tokens ``first <= i < last`` of each sequence, with their positions. Sequence i has only block i."""
    positions = torch.cat([torch.arange(first, last) for first, last in spans])
    metadata = BatchMetadata.of_chunks(spans, [[block] for block in range(len(spans))], block_size, device)
    return replace(metadata, bidirectional=bidirectional), positions.to(device)
