"""Language models that transformers implements and vlmserve does not: its code over our paged KV cache.

transformers lets models replace attention (https://huggingface.co/docs/transformers/attention_interface). Our attention
reads and writes the paged cache, so batches of many sequences and prefix hits work as with every other model.
A check at load finds models with other state or other attention: it computes a few sequences in pieces and side by
side, and compares the logits with transformers' own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from torch import Tensor, nn

from vlmserve.errors import MissingWeightsError, ModelLoadError, UnsupportedModelError
from vlmserve.kernels.adapters import AdapterRows
from vlmserve.kernels.attention import AttentionBackend, AttentionContext, BatchMetadata, BidirectionalRows, LayerCache
from vlmserve.layer_specs import AttentionSpec, CacheBytes
from vlmserve.media.images import DecodedImage
from vlmserve.media.transformers_processor import TransformersProcessor
from vlmserve.models.expert_choices import ExpertChoices
from vlmserve.models.grid_positions import grid_positions
from vlmserve.models.image_rows import ImageRows, LayerFeatures, place_images
from vlmserve.models.transformers_vision import TransformersVision
from vlmserve.types import KEY_BYTES, Bidirectional, ImageInput, ImageSpan, bidirectional_spans

logger = logging.getLogger(__name__)

NAME = "vlmserve"
"""Of our attention among transformers' implementations."""
SAMPLE_SIZE = (60, 90)
"""Height and width of the image that is compared at load."""
NO_INTERFACE = "its layers do not attend by transformers' attention interface"
CHECKED_LENS = (9, 24)
"""Tokens of the sequences that are compared at load."""
TOLERANCE = {torch.float32: 1e-3}
ROUNDED_TOLERANCE = 0.1
"""How far apart logits may be, as shares of their standard deviation; those of a wrong model are as far as that is."""
EXTENDING_ROPES = ("dynamic", "longrope")
"""Rotary scalings that a whole batch switches on once one sequence in it is long."""

_MISFITS = (ValueError, TypeError, AttributeError, LookupError)
"""Errors of code that runs on a model that does not fit it."""

BIDIRECTIONAL_SCOPES: tuple[Bidirectional | None, ...] = (None, "images", "prefix", "prompt")
"""Which tokens of a prompt may attend to each other, in the order in which they are tried."""

Attend = Callable[[Tensor, Tensor, Tensor, Callable[[], AttentionSpec]], Tensor]
"""Of queries, keys, values, and a function that says how the layer attends."""
_attend: ContextVar[Attend | None] = ContextVar("attend", default=None)
_masked: ContextVar[list[int] | None] = ContextVar("masked", default=None)
"""A list that collects the windows of the masks that transformers would make, or None."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for attention: ``[1, heads, tokens, size]`` each to ``[1, tokens, heads, size]``."""
    attend = _attend.get()
    if attend is None:
        raise UnsupportedModelError(f"{type(module).__name__} attends outside of the language model")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} has a mask or a bias of its own")
    head_size, value_size = query.shape[-1], value.shape[-1]
    if value_size > head_size:
        raise UnsupportedModelError(f"{type(module).__name__} has values that are wider than its keys")
    num_heads, num_kv_heads = query.shape[1], key.shape[1]

    def spec() -> AttentionSpec:
        return AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=head_size**-0.5 if scaling is None else float(scaling),
            window=sliding_window or getattr(module, "sliding_window", None),
            soft_cap=softcap,
            sinks=None if s_aux is None else tuple(s_aux.tolist()),
        )

    if value_size < head_size:  # as in latent attention
        value = nn.functional.pad(value, (0, head_size - value_size))
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    output = attend(query, key, value, spec).view(1, -1, num_heads, head_size)
    return output[..., :value_size], None


def _mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> None:
    """Called by transformers for masks, which our attention does not need; records their windows."""
    if local_size is None or (windows := _masked.get()) is None:
        return
    first, later = torch.tensor(1), torch.tensor(local_size)
    if not bool(mask_function(0, 0, later, first)):
        raise UnsupportedModelError(f"attention in chunks of {local_size} tokens is not supported")
    windows.append(local_size)


@contextlib.contextmanager
def _attending(attend: Attend, windows: list[int] | None = None) -> Iterator[None]:
    tokens = _attend.set(attend), _masked.set(windows)
    try:
        yield
    finally:
        _attend.reset(tokens[0])
        _masked.reset(tokens[1])


ChooseBackend = Callable[[Sequence[AttentionSpec]], AttentionBackend]
"""The backend that serves all of these layers."""


class _Finished:
    """The output of layers that ran before: hidden states, and nothing else that a model may ask for."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


class TransformersModel:
    """A `LanguageModel` made of one of transformers'. It takes no adapters.

    backend: chooses the attention backend. sample: an image, for a model that takes images.
    Raises UnsupportedModelError if its attention cannot be replaced, or if its logits differ from transformers'.
    """

    adapter_rows: AdapterRows | None = None

    def __init__(self, model: Any, backend: ChooseBackend, sample: Sample | None = None) -> None:
        try:
            self._setup(model, backend)
            self._check()
            if sample is not None:
                self._find_bidirectional(sample)
        except (*_MISFITS, RuntimeError) as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot run over a flat batch: {_first_line(error)}"
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
        """The attention of each layer, observed in a pass over two tokens."""
        specs: list[AttentionSpec] = []
        windows: list[int] = []

        def record(query: Tensor, key: Tensor, value: Tensor, spec: Callable[[], AttentionSpec]) -> Tensor:
            specs.append(spec())
            return torch.zeros_like(query)

        positions = torch.arange(2, device=self._model.device)
        with torch.inference_mode(), _attending(record, windows):
            self._hidden(self.embed(positions), positions)
        if not specs:
            raise UnsupportedModelError(NO_INTERFACE)
        if unknown := set(windows) - {spec.window for spec in specs}:
            raise UnsupportedModelError(f"masks have a window of {min(unknown)} tokens, and no layer has one")
        return tuple(specs)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ids = self._model.generation_config.eos_token_id
        return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    @property
    def window(self) -> int | None:
        """How many positions a token attends to at most, itself included; None: all, in some layer."""
        windows = [spec.window for spec in self.attention if spec.window is not None]
        return max(windows) if len(windows) == len(self.attention) else None

    def longest_context(self, max_position: int) -> int:
        """The longest context with transformers' results, where bidirectional prompts ignore windows."""
        windows = [spec.window for spec in self.attention if spec.window is not None]
        return min([max_position, *windows]) if self.bidirectional == "prompt" else max_position

    @property
    def max_short_len(self) -> int | None:
        return None

    def first_position(self, prompt_len: int) -> int:
        return 0

    def embed(self, token_ids: Tensor) -> Tensor:
        """``[tokens]`` int64 to ``[tokens, hidden_size]``, not yet scaled where the model scales them."""
        embeddings: Tensor = self._embeddings(token_ids)
        return embeddings

    def allocate_cache(self, num_blocks: int, block_size: int, device: torch.device | None = None) -> list[LayerCache]:
        """The KV cache of all layers, on the model's device or another one."""
        place = device or self._model.device
        return [
            self.backend.allocate(num_blocks, block_size, spec, self._model.dtype, place) for spec in self.attention
        ]

    def cache_bytes(self, block_size: int) -> CacheBytes:
        """Bytes of the KV cache of all layers."""
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
    ) -> Tensor:
        """``[tokens, hidden_size]`` and int64 positions ``[tokens]`` or ``[3, tokens]`` to final hidden states.
        features, wanted: see `LanguageModel.forward`."""
        plan = self.backend.prepare(metadata, caches[0].block_size, self.attention, self._model.dtype)
        layers = zip(caches, self.attention, strict=True)

        def attend(query: Tensor, key: Tensor, value: Tensor, _: object) -> Tensor:
            return self.backend.attend(query, key, value, AttentionContext(*next(layers), metadata, plan))

        with _attending(attend):
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
        """``[rows, hidden_size]`` to float32 ``[rows, vocab_size]``: what the model does after its layers."""
        finished = _Finished(hidden[None])
        # For this call only: a model that refers to itself is not freed with its last user.
        self._body.forward = lambda *_, **__: finished
        try:
            logits: Tensor = self._model(inputs_embeds=finished.last_hidden_state, use_cache=False).logits[0]
        finally:
            del self._body.forward
        return logits.float()

    def _check(self) -> None:
        """Raises UnsupportedModelError if sequences that are computed here have other logits than transformers'."""
        generator = torch.Generator().manual_seed(0)
        sequences = [torch.randint(self.vocab_size, (length,), generator=generator) for length in CHECKED_LENS]
        with torch.inference_mode():
            choices = ExpertChoices()
            expected = torch.cat([self._their_logits(sequence, choices) for sequence in sequences])
            actual = torch.cat(self._our_logits(sequences, choices))
        self._compare(actual, expected, "its layers keep or attend to more than keys and values")

    @torch.inference_mode()
    def _find_bidirectional(self, sample: Sample) -> None:
        """Find out which tokens attend to each other in a prompt with an image.

        Raises UnsupportedModelError if its logits are other than by transformers' own whichever they are.
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
            self._model.set_attn_implementation(_ours_in(self._model.config))
        return logits[0].float()

    def _our_logits(self, sequences: Sequence[Tensor], choices: ExpertChoices) -> list[Tensor]:
        """Of all sequences together, in three steps, of which the last computes one token of each."""
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
    """How far apart logits are, as a share of their standard deviation."""
    return float((actual - expected).std() / expected.std())


def _ours_in(config: Any) -> dict[str, str]:
    """Our attention in the language model, torch's in a vision tower."""
    return {"": NAME, **{name: NAME if name == "text_config" else "sdpa" for name in config.sub_configs}}


@dataclass(frozen=True)
class Sample:
    """An image as the model's processor leaves it, to try a model with. token_types: of its placeholders, by the names
    of the model's inputs."""

    image: ImageInput
    token_types: dict[str, int]
    image_token_id: int
    vision: TransformersVision


def _metadata(
    spans: Sequence[tuple[int, int]],
    block_size: int,
    device: torch.device,
    bidirectional: Sequence[BidirectionalRows] = (),
) -> tuple[BatchMetadata, Tensor]:
    """A batch of the tokens from `first` to `last` of each sequence, whose only block has its number; and positions."""
    positions = torch.cat([torch.arange(first, last) for first, last in spans])
    metadata = BatchMetadata.of_chunks(spans, [[block] for block in range(len(spans))], block_size, device)
    return replace(metadata, bidirectional=bidirectional), positions.to(device)


@dataclass(frozen=True)
class TransformersCheckpoint:
    """A folder as transformers reads it. Code in checkpoints never runs."""

    folder: Path

    @cached_property
    def config(self) -> Any:
        """Raises UnsupportedModelError for a model that transformers does not know."""
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except (*_MISFITS, OSError, ImportError, StrictDataclassError) as error:
            raise UnsupportedModelError(f"transformers does not know it either: {_first_line(error)}") from error
        if getattr(config, "quantization_config", None) is not None:
            raise UnsupportedModelError("quantized checkpoints are only for vlmserve's own implementations")
        return config

    @property
    def max_position(self) -> int:
        """The longest context. Raises UnsupportedModelError where the config does not say."""
        text_config = self.config.get_text_config()
        longest = getattr(text_config, "max_position_embeddings", None)
        if not isinstance(longest, int):
            raise UnsupportedModelError("its config does not say how many positions it has (max_position_embeddings)")
        rope = getattr(text_config, "rope_parameters", None) or {}
        original = rope.get("original_max_position_embeddings") or getattr(
            text_config, "original_max_position_embeddings", None
        )
        if rope.get("rope_type") in EXTENDING_ROPES and isinstance(original, int) and original < longest:
            logger.info(
                "a context of %d instead of %d tokens: a longer request would change others in its batch",
                original,
                longest,
            )
            return original
        return longest

    @property
    def image_token_id(self) -> int | None:
        """The placeholder, if the model takes images. Raises UnsupportedModelError where it names none."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        if type(self.config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return None
        names = ("image_token_id", "image_token_index")
        found = next((value for name in names if isinstance(value := getattr(self.config, name, None), int)), None)
        if found is None:
            raise UnsupportedModelError("its config names no token that stands for images (image_token_id)")
        return found

    def module_names(self) -> list[str]:
        """Of all modules, in transformers' order. Raises UnsupportedModelError for a model that it does not know."""
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        auto = AutoModelForCausalLM if self.image_token_id is None else AutoModelForImageTextToText
        try:
            with torch.device("meta"):
                return [name for name, _ in auto.from_config(self.config).named_modules()]
        except (*_MISFITS, ImportError) as error:
            raise UnsupportedModelError(f"transformers does not make this model: {_first_line(error)}") from error

    def sample(self, model: Any) -> Sample | None:
        """An image to check the model with, if it takes images."""
        if self.image_token_id is None:
            return None
        noise = np.random.default_rng(0).integers(0, 256, (*SAMPLE_SIZE, 3), np.uint8)
        processor = TransformersProcessor(self.folder, self.image_token_id)
        sample_image = DecodedImage.whole(Image.fromarray(noise))
        pixels, placeholders = processor.prepare(sample_image)
        image = ImageInput(bytes(KEY_BYTES), pixels, **placeholders._asdict())
        return Sample(image, processor.token_types(sample_image), self.image_token_id, TransformersVision(model))

    def load(self, dtype: torch.dtype, device: torch.device) -> Any:
        """The model with its weights. Raises UnsupportedModelError, MissingWeightsError or ModelLoadError."""
        from transformers import (
            AttentionInterface,
            AttentionMaskInterface,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
        )

        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, _mask)
        auto = AutoModelForCausalLM if self.image_token_id is None else AutoModelForImageTextToText
        try:
            model, report = auto.from_pretrained(
                self.folder, config=self.config, dtype=dtype, attn_implementation=_ours_in(self.config),
                local_files_only=True, trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
        except (*_MISFITS, ImportError) as error:
            # Some have a table of their own.
            named = isinstance(error, KeyError) and error.args == (NAME,)
            reason = NO_INTERFACE if named else f"transformers cannot load it as a language model: {_first_line(error)}"
            raise UnsupportedModelError(reason) from error
        except (OSError, RuntimeError) as error:
            raise ModelLoadError(f"transformers cannot load {self.folder}: {_first_line(error)}") from error
        if missing := sorted(report["missing_keys"]):
            raise MissingWeightsError(f"{self.folder} has no tensor {missing[0]}" + _and_more(len(missing) - 1))
        if not model._can_set_attn_implementation():
            raise UnsupportedModelError(NO_INTERFACE)
        return model.eval().requires_grad_(False).to(device)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _and_more(count: int) -> str:
    return f", and {count} more are missing" if count else ""
