"""The shape of one decoder, as its config.json says it: the differences between families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vlmserve.layer_specs import AttentionSpec, RopeSpec
from vlmserve.types import Bidirectional

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """layer: subtracts the mean and adds a bias as well. offset: is added to the stored weights."""

    eps: float
    layer: bool = False
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class HeadNormSpec:
    """How queries and keys are normed before they are rotated: over each head by weights that all heads share ("head"),
    over each by its own ("each head"), or over all heads of a token together ("row"). bias: whether there is one."""

    over: Literal["head", "each head", "row"]
    norm: NormSpec
    bias: bool = False


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """How queries of positions beyond `context` are multiplied: with the logarithm of their place to this base, or, if
    there is a beta, with 1 and so much of the natural logarithm of 1 and how many whole contexts lie before them."""

    context: int
    beta: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """The shape of one decoder. Sizes in elements; `attention` and `ropes` have one entry a layer.

    ropes: how a layer's queries and keys are rotated; None: not at all. learned_positions: vectors that are added to
    embeddings by their positions; 0: none. norms: where they stand. "pre": before attention and MLP; "output": of what
    these return, before it is added; "sandwich": both; "post": of the sums, with none after the last layer. parallel:
    attention and MLP read the same normed input. gated: the MLP multiplies its activation by a second projection.
    cross_size: width of the states that every layer attends to by cross-attention, between attention and MLP; 0: none.
    bidirectional: which tokens of a prompt attend to each other in both directions; None: none. query_growth: how
    queries grow with their position; None: not at all.
    embedding_scale: what embeddings of tokens are multiplied with. embedding_norm: whether they are normed once
    positions are added. head_transform: whether a dense layer, the activation and a norm come before the output head.
    deepstack: how many of the first layers have features of images added to what they return, see `LayerFeatures`.
    logit_cap: bounds logits as `AttentionSpec.soft_cap` does scores; None: off.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: tuple[AttentionSpec, ...]
    ropes: tuple[RopeSpec | None, ...]
    norm: NormSpec
    activation: str
    tied_embeddings: bool
    max_position: int
    norms: Literal["pre", "output", "sandwich", "post"] = "pre"
    head_norm: HeadNormSpec | None = None
    parallel: bool = False
    gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    head_transform: bool = False
    cross_size: int = 0
    bidirectional: Bidirectional | None = None
    learned_positions: int = 0
    query_growth: QueryGrowth | None = None
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    deepstack: int = 0
    logit_cap: float | None = None
