"""A small model that drafts for a decoder and reads its keys and values: Gemma 4's assistant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.families.registry import ASSISTANTS, decoder_spec, language_family
from vlmserve.families.spec import ArchSpec
from vlmserve.kernels.attention import AttentionBackend, BatchMetadata, LayerCache
from vlmserve.layer_specs import AttentionSpec
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear
from vlmserve.models.decoder import Decoder
from vlmserve.models.filling import Filling
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import read_json
from vlmserve.models.sizes import broken, check_sizes
from vlmserve.models.weights import Checkpoint, canonical_name
from vlmserve.quant.memory import own_bytes, weight_bytes

EXAMPLE = "google/gemma-4-E2B-it-assistant"
_ORDER = "masked_embedding.token_ordering"


class Assistant(nn.Module):
    """Predicts the token after the newest one from that token's embedding, the final state of the token before it, and
    the keys and values of all tokens before it. It has no cache.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        spec: ArchSpec,
        sources: Sequence[int],
        backend: AttentionBackend,
        **factory: Unpack[Factory],
    ) -> None:
        """sources: see `protocols.Assistant`."""
        super().__init__()
        width = config["backbone_hidden_size"]
        self.sources = sources
        self.identity = b""
        self.language_model = Decoder(spec, backend, **factory)
        self.pre_projection = Linear(2 * width, spec.hidden_size, bias=False, **factory)
        self.post_projection = Linear(spec.hidden_size, width, bias=False, **factory)
        self.masked_embedding = None
        if config.get("use_ordered_embeddings"):
            count, chosen = config["num_centroids"], config["centroid_intermediate_top_k"]
            self.masked_embedding = Clusters(spec, count, chosen, **factory)

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self)

    @property
    def read_bytes(self) -> int:
        if self.masked_embedding is None:
            return self.weight_bytes
        table = own_bytes(self.language_model.embed_tokens)
        return self.weight_bytes - table + int(table * self.masked_embedding.share)

    def draft(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        metadata: BatchMetadata,
        caches: list[LayerCache],
    ) -> tuple[Tensor, Tensor]:
        x = self.pre_projection(torch.cat((embeddings, hidden), 1))
        rows = self.language_model(x, positions, metadata, caches)
        if self.masked_embedding is None:
            tokens = self.language_model.logits(rows).argmax(1)
        else:
            tokens = self.masked_embedding(rows, self.language_model)
        return self.post_projection(rows), tokens


class Clusters(nn.Module):
    """Compares a state with the tokens of the clusters that suit it best."""

    order: Tensor
    """The tokens of each cluster, int64 ``[clusters, tokens]``."""

    def __init__(self, spec: ArchSpec, count: int, chosen: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        if spec.vocab_size % count or not 0 < chosen <= count:
            raise ModelLoadError(f"config.json: {count} clusters of {spec.vocab_size} tokens, {chosen} chosen")
        self._chosen = chosen
        self.share = chosen / count
        """Share of all tokens that a draft compares."""
        self.centroids = Linear(spec.hidden_size, count, bias=False, **factory)
        self.order = torch.zeros(count, spec.vocab_size // count, dtype=torch.int64)

    def forward(self, rows: Tensor, decoder: Decoder) -> Tensor:
        """Return the most likely tokens."""
        tokens = self.order[self.centroids(rows).topk(self._chosen, 1).indices].flatten(1)
        weights = decoder.embed_tokens(tokens.flatten()).view(*tokens.shape, -1)
        best = torch.bmm(weights, rows[..., None]).argmax(1)
        return tokens.gather(1, best).flatten()


def read_assistant(folder: Path) -> dict[str, Any]:
    """Return the config of an assistant. Raises ModelLoadError for a broken one, UnsupportedModelError for another kind
    of model.
    """
    if folder.is_file():
        raise UnsupportedModelError("assistants are read from folders in Hugging Face layout, not from GGUF files")
    with broken(folder):
        config = read_json(folder / "config.json")
        check_sizes(config, folder / "config.json")
        if (kind := config.get("model_type")) not in ASSISTANTS:
            raise UnsupportedModelError(
                f"it does not draft for another model: its model_type is {kind!r}; supported are Gemma 4's assistants, "
                f"such as {EXAMPLE}"
            )
        text = config["text_config"]
        return {**config, "text_config": {**text, "num_kv_shared_layers": text["num_hidden_layers"]}}


def load_assistant(folder: Path, config: Mapping[str, Any], model: LoadedModel, settings: LoadSettings) -> Assistant:
    """Load an assistant. config: see `read_assistant`. Raises ModelLoadError if it does not fit the model, and like
    `Checkpoint`.
    """
    with broken(folder):
        text = config["text_config"]
        spec = replace(decoder_spec(text), tied_embeddings=True)
        sources = fitting_sources(config, spec, model)
        checkpoint = Checkpoint(folder, lambda name: canonical_name(name, language_family(text).rename))
        factory: Factory = {"dtype": model.dtype, "device": model.device.torch_device}
        backend = model.device.attention(spec.attention, model.dtype, cache_type=settings.cache_type)
        assistant = Assistant(config, spec, sources, backend, **factory)
        plain = replace(
            settings, dtype=model.dtype, kernels=model.device.kernels, quantization=None, implementation="vlmserve"
        )
        assistant.identity = Filling(checkpoint, model.device, plain).fill(assistant, assistant.language_model)
        if (clusters := assistant.masked_embedding) is not None:
            order = checkpoint.read(_ORDER).long().view_as(clusters.order)
            if not 0 <= int(order.min()) <= int(order.max()) < spec.vocab_size:
                raise ModelLoadError(f"{_ORDER} has tokens outside the vocabulary")
            clusters.order = order
        return assistant


def fitting_sources(config: Mapping[str, Any], spec: ArchSpec, model: LoadedModel) -> list[int]:
    """Return `protocols.Assistant.sources`. Raises ModelLoadError unless the assistant fits the model."""
    decoder = model.language_model
    if not isinstance(decoder, Decoder):
        raise ModelLoadError("it needs a model with vlmserve's own layers, not --model-impl transformers")
    width = config["backbone_hidden_size"]
    if width != decoder.hidden_size or spec.vocab_size != decoder.vocab_size:
        raise ModelLoadError(
            f"it drafts for a model of width {width} with {spec.vocab_size:,} tokens, and this one has width "
            f"{decoder.hidden_size} and {decoder.vocab_size:,}; take the assistant of the same model, such as "
            f"{EXAMPLE} for Gemma 4 E2B"
        )
    return sources_of(spec.attention, decoder.spec.attention)


def sources_of(layers: Sequence[AttentionSpec], decoder: Sequence[AttentionSpec]) -> list[int]:
    """Return the layer of a decoder whose keys and values each layer of its assistant reads: the last one of its kind.

    Raises ModelLoadError if there is none.
    """
    last = {layer.window is None: number for number, layer in enumerate(decoder) if layer.shares_with is None}
    found = []
    for layer in layers:
        number = last.get(layer.window is None)
        source = None if number is None else decoder[number]
        same = source is not None and (source.num_kv_heads, source.head_size, source.window) == (
            layer.num_kv_heads, layer.head_size, layer.window,
        )  # fmt: skip
        if number is None or not same:
            raise ModelLoadError(
                "it reads keys and values of other shapes than this model has; take the assistant of the same model, "
                f"such as {EXAMPLE} for Gemma 4 E2B"
            )
        found.append(number)
    return found
