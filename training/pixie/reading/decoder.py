"""The language model that reads: Qwen3-VL's text model over flat batches, started from pixie's decoder.

A token attends by segments, as in `training.pixie.segments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.pixie.model import RMSNorm, rotate
from training.pixie.reading.tower import WIDTH
from training.pixie.segments import Flat, attend
from training.pixie.tokenizer import IMAGE, VOCAB_SIZE

DECODER_WIDTH: Final = 256
DECODER_LAYERS: Final = 4
DECODER_INNER: Final = 768
QUERY_HEADS: Final = 8
KEY_HEADS: Final = 4
HEAD: Final = 32
THETA: Final = 10000.0
SECTIONS: Final = (6, 5, 5)
"""Frequencies of positions in time, rows and columns, interleaved."""
NORM_EPS: Final = 1e-5


def mixed_rotations(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the interleaved rotary embedding, ``[tokens, 1, HEAD / 2]`` each.

    positions: int64 ``[3, tokens]``, in time, rows and columns.
    """
    half = HEAD // 2
    frequencies = THETA ** -(torch.arange(half) / half)
    angles = positions[0].float()[:, None] * frequencies
    for axis in (1, 2):
        places = torch.arange(axis, 3 * SECTIONS[axis], 3)
        angles[:, places] = positions[axis].float()[:, None] * frequencies[places]
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


class HeadNorm(nn.Module):
    """RMSNorm of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HEAD))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (HEAD,), self.weight, NORM_EPS)


class ReadingDecoderBlock(nn.Module):
    """A layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        width = DECODER_WIDTH
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.q_norm, self.k_norm = HeadNorm(), HeadNorm()
        self.q = nn.Linear(width, QUERY_HEADS * HEAD, bias=False)
        self.k, self.v = (nn.Linear(width, KEY_HEADS * HEAD, bias=False) for _ in range(2))
        self.o = nn.Linear(QUERY_HEADS * HEAD, width, bias=False)
        self.gate, self.up = (nn.Linear(width, DECODER_INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(DECODER_INNER, width, bias=False)

    def forward(self, x: Tensor, flat: Flat, cos: Tensor, sin: Tensor, said: Tensor | None) -> Tensor:
        """said: the tokens whose output is wanted; None: all."""
        h = self.norm1(x)
        query = rotate(self.q_norm(self.q(h).view(len(x), -1, HEAD)), cos, sin) * HEAD**-0.5
        key = rotate(self.k_norm(self.k(h).view(len(x), -1, HEAD)), cos, sin)
        value = self.v(h).view(len(x), -1, HEAD)
        attended = torch.cat([attend(query, key, value, bucket) for bucket in flat.buckets])
        attended = attended.index_select(0, flat.order)
        if said is not None:
            x, attended = x[said], attended[said]
        x = x + self.o(attended)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ReadingDecoder(nn.Module):
    """Merger and language model over the tokens of a flat batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB_SIZE, DECODER_WIDTH)
        self.merger_norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.project1, self.project2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, DECODER_WIDTH)
        self.blocks = nn.ModuleList(ReadingDecoderBlock() for _ in range(DECODER_LAYERS))
        self.norm = RMSNorm()

    def project(self, features: Tensor) -> Tensor:
        """What the decoder sees of patches, ``[patches, DECODER_WIDTH]``."""
        projected: Tensor = self.project2(F.gelu(self.project1(self.merger_norm(features))))
        return projected

    def forward(self, tokens: Tensor, positions: Tensor, flat: Flat, features: Tensor, said: Tensor) -> Tensor:
        """Logits ``[tokens that are said, vocabulary]``.

        tokens: int64 ``[tokens]``. positions: see `mixed_rotations`. flat: segments of the tokens. features:
        ``[patches, WIDTH]`` in the order of placeholders. said: bool ``[tokens]``, after which tokens one is predicted.
        """
        x = self.embeddings(tokens)
        if len(features):
            x = x.masked_scatter((tokens == IMAGE)[:, None], self.project(features))
        cos, sin = mixed_rotations(positions, x.dtype)
        for index, block in enumerate(self.blocks):
            x = block(x, flat, cos, sin, said if index == DECODER_LAYERS - 1 else None)
        return F.linear(self.norm(x), self.embeddings.weight)


@torch.no_grad()
def take_pixie(decoder: ReadingDecoder, weights: Mapping[str, Tensor]) -> None:
    """Start from pixie's language model. weights: of transformers' LLaVA.

    The norms of queries and keys get the size that queries and keys had on average.
    """
    prefix = "model.language_model."
    decoder.embeddings.weight.copy_(weights[f"{prefix}embed_tokens.weight"])
    decoder.norm.weight.copy_(weights[f"{prefix}norm.weight"])
    for layer, block in enumerate(decoder.blocks):
        state = {
            name: weights[f"{prefix}layers.{layer}.{theirs}.weight"]
            for name, theirs in LAYER_NAMES.items()
            if f"{prefix}layers.{layer}.{theirs}.weight" in weights
        }
        for name, tensor in state.items():
            block.get_submodule(name).weight.copy_(tensor)
        for name in "qk":
            scaled = state[name] * state["norm1"]
            block.get_submodule(f"{name}_norm").weight.fill_(float(scaled.pow(2).sum(1).mean().sqrt()))


@torch.no_grad()
def fit_merger(decoder: ReadingDecoder, features: Tensor, wanted: Tensor) -> float:
    """Start the merger so that patches come out as `wanted`; return the relative error of its best fit.

    features: ``[patches, WIDTH]``. wanted: ``[patches, DECODER_WIDTH]``, pixie's own features of the same patches.
    """
    normed = F.layer_norm(features.float(), (WIDTH,))
    decoder.project1.weight.normal_(0, 1.2 * WIDTH**-0.5)
    decoder.project1.bias.normal_(0, 0.3)
    hidden = F.gelu(F.linear(normed, decoder.project1.weight, decoder.project1.bias))
    hidden = torch.cat((hidden, torch.ones(len(hidden), 1)), 1)
    gram = hidden.T @ hidden
    gram += 1e-4 * gram.diagonal().mean() * torch.eye(len(gram))
    solved = torch.linalg.solve(gram, hidden.T @ wanted.float())
    decoder.project2.weight.copy_(solved[:-1].T)
    decoder.project2.bias.copy_(solved[-1])
    return float((hidden @ solved - wanted).pow(2).mean() / wanted.float().var(0).mean())


LAYER_NAMES: Final = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    **{part: f"self_attn.{part}_proj" for part in "qkvo"},
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
"""Modules of a layer, and their names in transformers."""


def decoder_names(decoder: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of `ReadingDecoder` under the names of transformers' Qwen3-VL."""
    prefix = "model.language_model."
    named = {
        f"{prefix}embed_tokens.weight": decoder["embeddings.weight"],
        f"{prefix}norm.weight": decoder["norm.weight"],
    }
    for kind in ("weight", "bias"):
        for ours, theirs in (("merger_norm", "norm"), ("project1", "linear_fc1"), ("project2", "linear_fc2")):
            named[f"model.visual.merger.{theirs}.{kind}"] = decoder[f"{ours}.{kind}"]
    for layer in range(DECODER_LAYERS):
        for ours, theirs in LAYER_NAMES.items():
            named[f"{prefix}layers.{layer}.{theirs}.weight"] = decoder[f"blocks.{layer}.{ours}.weight"]
    return {name: tensor.float().contiguous() for name, tensor in named.items()}
