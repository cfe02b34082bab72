"""A layer that drafts: multi-token prediction (MTP, https://arxiv.org/abs/2412.19437), as in Qwen3.5 and GLM-4.5V.

Row `i` reads the decoder's final state of token `i` and the embedding of token ``i + 1``, and predicts token ``i + 2``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from vlmserve.families.spec import ArchSpec
from vlmserve.kernels.attention import AttentionBackend, LayerCache
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear
from vlmserve.layers.residual import ResidualStream
from vlmserve.layers.step import StepContext
from vlmserve.models.blocks.block import make_norm
from vlmserve.models.decoder_layer import DecoderLayer

PREFIX = "language_model.mtp."
"""Prefix of canonical tensor names."""
_EXTRA_LAYER = re.compile(r"language_model\.layers\.(\d+)\.(.+)")
_OF_EXTRA_LAYER = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}
"""Names in checkpoints that store the layer after the last one of the decoder."""


def mtp_name(name: str, num_layers: int) -> str:
    """Convert a canonical name in layer `num_layers`, the first one after the decoder's. Its copies of embeddings and
    head stay unused.
    """
    found = _EXTRA_LAYER.fullmatch(name)
    if found is None or int(found[1]) != num_layers:
        return name
    path, _, kind = found[2].rpartition(".")
    own = _OF_EXTRA_LAYER.get(path)
    return f"{PREFIX}layers.0.{found[2]}" if own is None else f"{PREFIX}{own}.{kind}"


class MTPLayer(nn.Module):
    """Shares the decoder's embeddings and head. Its keys and values are in the last of the decoder's caches."""

    def __init__(self, spec: ArchSpec, rope: int | None, backend: AttentionBackend, **factory: Unpack[Factory]) -> None:
        """rope: index of the step's rotary embedding."""
        super().__init__()
        size, own = spec.hidden_size, spec.with_mtp_layer()
        self.pre_fc_norm_embedding = make_norm(spec.norm, size, **factory)
        self.pre_fc_norm_hidden = make_norm(spec.norm, size, **factory)
        self.fc = Linear(2 * size, size, bias=False, **factory)
        self.layers = nn.ModuleList([DecoderLayer(own, len(own.mixers) - 1, rope, backend, **factory)])
        self.norm = make_norm(spec.norm, size, **factory)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, caches: Sequence[LayerCache], step: StepContext, wanted: Tensor
    ) -> Tensor:
        """Write keys and values of all rows. Returns normed states of the `wanted` rows, for the head and the next row.

        embeddings: of the next tokens, ``[tokens, hidden_size]``. hidden: final, normed states of the tokens.
        """
        joined = torch.cat((self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)), 1)
        stream = ResidualStream(self.fc(joined))
        cast(DecoderLayer, self.layers[0])(stream, caches, step, wanted)
        return stream.normed(self.norm) if len(wanted) else stream.rows


def has_mtp_layer(
    spec: ArchSpec, names: Collection[str], shapes: Callable[[Collection[str]], Mapping[str, list[int]]]
) -> bool:
    """Return whether a checkpoint has an MTP layer of the same shapes as the last layer with attention.

    names: canonical tensor names. shapes: reads shapes of named tensors. Quantized checkpoints with another format in
    this layer do not qualify.
    """
    before, size = f"language_model.layers.{spec.last_attention}.", spec.hidden_size
    in_layer = {name: f"{PREFIX}layers.0.{name.removeprefix(before)}" for name in names if name.startswith(before)}
    wanted = {f"{PREFIX}{name}.weight": [size] for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    wanted[f"{PREFIX}fc.weight"] = [size, 2 * size]
    if not {*in_layer.values(), *wanted} <= {*names}:
        return False
    found = shapes([*in_layer, *in_layer.values(), *wanted])
    wanted |= {own: found[name] for name, own in in_layer.items()}
    return all(found[name] == shape for name, shape in wanted.items())
