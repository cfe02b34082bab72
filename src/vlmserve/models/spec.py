"""The shape of one decoder, as its config.json says it: what tells one family from another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vlmserve.kernels.attention import AttentionSpec
from vlmserve.layers.rope import RopeSpec
from vlmserve.types import SeesAhead

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """layer: subtracts the mean and adds a bias as well. offset: is added to the stored weights."""

    eps: float
    layer: bool = False
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class HeadNormSpec:
    """How queries and keys are normed before they turn: over each head by weights that all heads share ("head"), over
    each by its own ("each head"), or over all heads of a token together ("row"). bias: whether there is one."""

    over: Literal["head", "each head", "row"]
    norm: NormSpec
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """The shape of one decoder. Sizes in elements; `attention` and `ropes` have one entry a layer.

    ropes: how a layer's queries and keys turn; None: not at all. learned_positions: vectors that are added to
    embeddings by their positions; 0: none. norms: "before" attention and MLP, "after" them, "around" them, or of the
    "sums" of their outputs and inputs, with none behind the last layer. parallel: both read the same normed input.
    gated: the MLP multiplies its activation by a second projection. cross_size: width of the states, no part of the
    sequence, that every layer looks at between attention and MLP; 0: none. sees_ahead: which tokens of a prompt see
    each other; None: none see what comes after them. log_context: from so many positions on, queries are multiplied
    with the logarithm of their position to this base; None: none are. embedding_scale: what embeddings of tokens are
    multiplied with. embedding_norm: whether they are normed once positions are added. head_transform: whether a dense
    layer, the activation and a norm come before the output head. logit_cap: bounds logits as `AttentionSpec.soft_cap`
    does scores; None: off.
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
    norms: Literal["before", "after", "around", "sums"] = "before"
    head_norm: HeadNormSpec | None = None
    parallel: bool = False
    gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    head_transform: bool = False
    cross_size: int = 0
    sees_ahead: SeesAhead | None = None
    learned_positions: int = 0
    log_context: int | None = None
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    logit_cap: float | None = None
