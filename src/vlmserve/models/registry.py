"""Loads a checkpoint into memory."""

from __future__ import annotations

import json
import logging
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from vlmserve.devices.choice import open_device, type_for_torch
from vlmserve.devices.device import EagerExecutor, LayerExecutor
from vlmserve.errors import ConfigurationError, MissingWeightsError, ModelLoadError, UnsupportedModelError
from vlmserve.families.family import LanguageFamily, VisionFamily, rename
from vlmserve.families.registry import architecture, decoder_spec, language_family, vision_family
from vlmserve.families.retrievers import without_nesting
from vlmserve.families.spec import ArchSpec
from vlmserve.gguf.config import read_config
from vlmserve.gguf.pair import language_model
from vlmserve.gguf_header import read_header
from vlmserve.kernels.attention import AttentionBackend
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import META, without_memory
from vlmserve.layers.parallel import Ranks
from vlmserve.models.adaptable import AdaptableModel
from vlmserve.models.cross import CrossStateEncoder, make_text_encoder
from vlmserve.models.decoder import Decoder
from vlmserve.models.filling import Filling
from vlmserve.models.identity import model_identity
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.mtp import PREFIX, has_mtp_layer, mtp_name
from vlmserve.models.output_layers import OutputLayers
from vlmserve.models.parallel import share_of, split_decoder
from vlmserve.models.protocols import LanguageModel, LoadedModel, VisionEncoder
from vlmserve.models.sizes import broken, check_parameters, check_sizes
from vlmserve.models.transformers_backend import TransformersModel
from vlmserve.models.transformers_checkpoint import TransformersCheckpoint
from vlmserve.models.weights import Checkpoint, canonical_name
from vlmserve.models.weights_cache import WeightsCache
from vlmserve.prompt.pooling import read_vectors
from vlmserve.quant.formats.stored import OLD_FILES, stored_layouts
from vlmserve.quant.memory import weight_bytes
from vlmserve.quant.model import log_expected_memory

logger = logging.getLogger(__name__)

Check = Callable[[LanguageModel, int], None]
"""Gets a language model and its maximum context in tokens. Raises ConfigurationError for settings that do not fit."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    folder: Path,
    settings: LoadSettings,
    *,
    ranks: Ranks | None = None,
    check: Check = lambda language_model, max_position: None,
    cache: WeightsCache | None = None,
) -> LoadedModel:
    """Load a checkpoint in Hugging Face layout, a GGUF file, or the folder of a GGUF pair.

    ranks: load this rank's shard. check: called with the decoder and the maximum context before weights are read.
    cache: packed weights of earlier starts.

    Raises like `check`; ModelLoadError for a broken configuration or file; UnsupportedModelError for an unknown
    architecture or option; MissingWeightsError for missing files or tensors; ConfigurationError for a model that the
    ranks cannot share.
    """
    with broken(folder):
        if settings.implementation == "transformers" and ranks is None:
            return _load_with_transformers(folder, settings)
        try:
            return _load(folder, settings, check, ranks, cache)
        except UnsupportedModelError as error:
            if ranks is not None:
                raise UnsupportedModelError(f"{error}; --model-impl transformers runs on one device only") from None
            if settings.implementation == "vlmserve" or language_model(folder) is not None:
                raise
            logger.info("vlmserve has no implementation: %s", error)
            try:
                return _load_with_transformers(folder, settings)
            except MissingWeightsError:
                raise
            except ModelLoadError as other:
                raise UnsupportedModelError(f"{error}; by --model-impl transformers: {other}") from other


def _load(
    folder: Path, settings: LoadSettings, check: Check, ranks: Ranks | None, cache: WeightsCache | None
) -> LoadedModel:
    description = Description.read(folder)
    checkpoint = Checkpoint(folder, description.rename)
    packed, device = description.quantization, settings.device
    if packed and settings.quantization is not None:
        raise ConfigurationError("the checkpoint is quantized already: leave --quantize out, or load the original one")
    with description.errors():
        spec = with_mtp(description.spec(checkpoint), checkpoint, settings, ranks)
        layouts = stored_layouts(packed) if packed else []
        stated = settings.dtype or description.dtype(checkpoint)
        on, wanted = open_device(device, settings.kernels, stated, automatic=settings.dtype is None)
        own = spec if ranks is None else share_of(spec, ranks)
        backend = on.attention(own.attention, wanted, cache_type=settings.cache_type)
        # Compiled programs and graphs cannot contain exchanges between ranks or choices of the host.
        chooses_on_host = any(spec.experts) and not on.chooses_experts
        executor = on.executor() if ranks is None and not chooses_on_host else EagerExecutor()
        with nullcontext() if on.overcommits else without_memory():
            parts = description.build(spec, backend, executor, dtype=wanted, device=device, ranks=ranks)
        model, decoder = parts.modules, parts.language_model
        # Counts the whole model. On a CPU, untouched pages take no memory.
        whole = model if ranks is None else description.build(spec, backend, dtype=wanted, device=META).modules
        num_parameters = sum(parameter.numel() for parameter in whole.parameters())
        check_parameters(num_parameters, checkpoint.files(), folder)
        del whole
    check(decoder, spec.max_position)
    blocks = language_model(folder) is not None
    keeps_blocks = blocks and on.keeps_packed and settings.dtype != torch.float32 and settings.quantization is None
    settings = replace(settings, dtype=wanted, kernels=on.kernels, implementation="vlmserve")
    logs = logger.isEnabledFor(logging.INFO) and not packed and not blocks
    expected = log_expected_memory(model, on, settings.quantization) if logs else None
    filling = Filling(checkpoint, on, settings, layouts, keeps_blocks, cache if ranks is None else None)
    identity = filling.fill(model, decoder)
    size = weight_bytes(model)
    said = "" if expected is None else f"; {expected / 1e6:.1f} MB were expected"
    logger.info("weights: %.1f MB in memory%s", size / 1e6, said)
    adaptable = None
    if parts.cross is None and ranks is None:
        adaptable = AdaptableModel(model, checkpoint, layouts, settings.quantization, wanted, device)
    return LoadedModel(
        architecture=description.architecture,
        language_model=decoder,
        vision=parts.vision,
        image_token_id=description.image_token_id,
        end_token_ids=_end_token_ids(folder, description.config, description.text_config),
        max_position=spec.max_position,
        dtype=wanted,
        device=on,
        backend=backend,
        num_parameters=num_parameters,
        weight_bytes=size,
        identity=identity,
        cross=parts.cross,
        adaptable=adaptable,
        ranks=ranks,
        output_layers=OutputLayers.read(read_vectors(folder).layers, checkpoint, spec.hidden_size, device),
        predictor=None if decoder.mtp is None else decoder,
    )


class Parts(NamedTuple):
    """`modules` holds all modules, by names of weights."""

    modules: nn.Module
    language_model: Decoder
    vision: VisionEncoder | None
    cross: CrossStateEncoder | None


@dataclass(frozen=True)
class Description:
    """A checkpoint's config.json or GGUF file, and its family."""

    folder: Path
    """Or the GGUF file."""
    config: Mapping[str, Any]
    text_config: Mapping[str, Any]
    architecture: str
    vision: VisionFamily | None

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Raises ModelLoadError for a broken configuration, UnsupportedModelError for an unknown architecture."""
        config = read_config(read_header(folder)) if folder.is_file() else read_json(folder / "config.json")
        check_sizes(config, folder if folder.is_file() else folder / "config.json")
        return cls.of(folder, without_nesting(config))

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any]) -> Description:
        vision = vision_family(config)
        text_config = config if vision is None else vision.text_config(config)
        return cls(folder, config, text_config, architecture(config), vision)

    @classmethod
    def read_plain(cls, folder: Path) -> Description:
        """Like `read`. Raises ConfigurationError for a quantized checkpoint."""
        description = cls.read(folder)
        if description.quantization:
            raise ConfigurationError(f"{folder} is quantized already")
        return description

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Convert errors of a bad configuration to ModelLoadError."""
        try:
            yield
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            source = language_model(self.folder) or self.folder / "config.json"
            raise ModelLoadError(f"{source} does not describe a model: {error!r}") from error

    @property
    def image_token_id(self) -> int | None:
        return None if self.vision is None else self.vision.placeholder(self.config)

    @property
    def family(self) -> LanguageFamily:
        """Raises UnsupportedModelError if unknown."""
        return language_family(self.text_config)

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """Raises ModelLoadError if the settings are not an object."""
        for config in (self.config, self.text_config):
            if found := config.get("quantization_config") or config.get("compression_config"):
                if not isinstance(found, Mapping):
                    raise ModelLoadError(f"config.json: quantization_config is {found!r:.100}, not an object")
                return found
        for name, method in OLD_FILES.items():
            if (self.folder / name).is_file():
                return {"quant_method": method, **read_json(self.folder / name)}
        return None

    def dtype(self, checkpoint: Checkpoint) -> torch.dtype:
        for source in (self.config, self.text_config):
            for key in ("dtype", "torch_dtype"):
                if (name := str(source.get(key)).removeprefix("torch.")) in DTYPES:
                    return DTYPES[name]
        return checkpoint.dtype()

    def rename(self, name: str) -> str:
        name = canonical_name(rename(name, () if self.vision is None else self.vision.names), self.family.rename)
        num_layers = self.text_config.get("num_hidden_layers", self.family.defaults.get("num_hidden_layers"))
        return mtp_name(name, num_layers) if isinstance(num_layers, int) else name

    def spec(self, checkpoint: Checkpoint) -> ArchSpec:
        family = self.vision
        spec = decoder_spec(self.text_config)
        if self.text_config is not self.config:
            # In nested configs, the outer one says whether embeddings are tied.
            tied = self.config.get("tie_word_embeddings", family is not None and family.tied)
            spec = replace(spec, tied_embeddings=bool(tied))
        if family is not None:
            spec = replace(spec, bidirectional=family.bidirectional or spec.bidirectional)
        if spec.bidirectional == "prompt":
            # Bidirectional prompts ignore windows.
            windows = [layer.window for layer in spec.attention if layer.window is not None]
            spec = replace(spec, max_position=min([spec.max_position, *windows]))
        return _tie_as_stored(spec, self.text_config, checkpoint)

    def build(
        self,
        spec: ArchSpec,
        backend: AttentionBackend,
        executor: LayerExecutor | None = None,
        *,
        ranks: Ranks | None = None,
        **factory: Unpack[Factory],
    ) -> Parts:
        modules = nn.Module()
        own = spec if ranks is None else share_of(spec, ranks)
        modules.language_model = decoder = Decoder(own, backend, executor, **factory)
        if ranks is not None:
            split_decoder(decoder, spec, ranks)
        family = self.vision
        if family is None:
            return Parts(modules, decoder, None, None)
        tower = pkgutil.resolve_name(family.tower)(self.config, spec.hidden_size, **factory)
        named = tower.named_children() if family.tower_name is None else [(family.tower_name, tower)]
        for name, module in named:
            modules.add_module(name, module)
        if not spec.cross_size:
            return Parts(modules, decoder, tower, None)
        text_encoder = None
        if family.reads_question:
            modules.text_encoder = text_encoder = make_text_encoder(spec, **factory)
        return Parts(modules, decoder, tower, CrossStateEncoder(decoder, text_encoder))


def _load_with_transformers(folder: Path, settings: LoadSettings) -> LoadedModel:
    if language_model(folder) is not None:
        raise ConfigurationError("--model-impl transformers reads folders, not GGUF files")
    for flag, value in (("--quantize", settings.quantization), ("--input-bits", settings.input_bits)):
        if value is not None:
            raise ConfigurationError(f"{flag} is for vlmserve's own implementations; this model runs by transformers'")
    check_sizes(read_json(folder / "config.json"), folder / "config.json")
    checkpoint = TransformersCheckpoint(folder)
    config = checkpoint.config
    stated = settings.dtype or config.dtype or Checkpoint(folder, str).dtype()
    if (fast := type_for_torch(settings.device, stated)) != stated:
        logger.info("this CPU computes transformers' layers slowly in %s: the model runs in %s", stated, fast)
    on, wanted = open_device(settings.device, settings.kernels, fast, automatic=settings.dtype is None)
    choose = partial(on.attention, dtype=wanted)
    theirs = checkpoint.load(wanted, settings.device)
    sample = checkpoint.sample(theirs)
    model = TransformersModel(theirs, choose, sample)
    if settings.cache_type != "auto":
        # After the check, which compares logits without a quantized cache.
        model.backend = choose(model.attention, cache_type=settings.cache_type)
    logger.info("%s runs by transformers' implementation, which is slower than vlmserve's own", type(theirs).__name__)
    return LoadedModel(
        architecture=type(theirs).__name__,
        language_model=model,
        vision=None if sample is None else sample.vision,
        image_token_id=checkpoint.image_token_id,
        end_token_ids=model.end_token_ids,
        max_position=model.longest_context(checkpoint.max_position),
        dtype=wanted,
        device=on,
        backend=model.backend,
        num_parameters=theirs.num_parameters(),
        weight_bytes=sum(parameter.nbytes for parameter in theirs.parameters()),
        identity=model_identity(folder, replace(settings, dtype=wanted, implementation="transformers")),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelLoadError if the file is missing or no JSON object."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return content


def with_mtp(spec: ArchSpec, checkpoint: Checkpoint, settings: LoadSettings, ranks: Ranks | None) -> ArchSpec:
    """The spec with the layer for multi-token prediction, if this process may draft with it."""
    if not settings.drafts or not any(name.startswith(PREFIX) for name in checkpoint.names):
        return spec
    if ranks is None and has_mtp_layer(spec, checkpoint.names, checkpoint.shapes):
        return replace(spec, mtp=True)
    reason = "its format or shapes differ from the other layers" if ranks is None else "several ranks share the model"
    logger.info("speculation: the checkpoint's layer for multi-token prediction (MTP) is not used, because %s", reason)
    return spec


def _tie_as_stored(spec: ArchSpec, text_config: Mapping[str, Any], checkpoint: Checkpoint) -> ArchSpec:
    """Correct `tied_embeddings` by the tensors, because some configs are wrong."""
    head, embeddings = "language_model.lm_head.weight", "language_model.embed_tokens.weight"
    if head not in checkpoint.names:
        if (checkpoint.folder / "modules.json").is_file() or read_vectors(checkpoint.folder).layers:
            # Embedding models need no head; a tied one takes no memory.
            return replace(spec, tied_embeddings=True)
        return replace(spec, tied_embeddings=spec.tied_embeddings or bool(text_config.get("tie_word_embeddings")))
    if spec.tied_embeddings and embeddings in checkpoint.names:
        return replace(spec, tied_embeddings=torch.equal(checkpoint.read(head), checkpoint.read(embeddings)))
    return spec


def _end_token_ids(folder: Path, config: Mapping[str, Any], text_config: Mapping[str, Any]) -> frozenset[int]:
    path = folder / "generation_config.json"
    generation_config = read_json(path) if path.is_file() else {}
    family = language_family(text_config)
    further = frozenset(family.more_ends({**family.defaults, **text_config}))
    for source in (generation_config, config, text_config, family.defaults):
        ids = source.get(family.end_token)
        if ids is not None:
            return further | frozenset([ids] if isinstance(ids, int) else ids)
    return further
