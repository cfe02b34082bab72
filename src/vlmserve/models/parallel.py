"""A decoder's share of one rank, and what in it takes part in exchanges with the others."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from vlmserve.errors import ConfigurationError
from vlmserve.families.spec import ArchSpec
from vlmserve.layer_specs import AttentionSpec
from vlmserve.layers.attention import Attention, CrossAttention
from vlmserve.layers.cut import Shard, Share
from vlmserve.layers.linear import OutputLinear
from vlmserve.layers.norm import NormOfEachHead, NormOfRow
from vlmserve.layers.parallel import (
    ParallelEmbedding,
    ParallelNormOfRow,
    ParallelOutputLinear,
    ParallelTiedEmbedding,
    Ranks,
    RowParallelLinear,
    scaled,
    shares,
)
from vlmserve.models.decoder import Decoder
from vlmserve.models.decoder_layer import DecoderLayer


def share_of(spec: ArchSpec, ranks: Ranks) -> ArchSpec:
    """The decoder of one rank, with its part of the heads and of the MLP; the vocabulary is still the whole one.

    Raises ConfigurationError for sizes that ranks do not divide.
    """
    _divides(spec.intermediate_size, ranks, "inner elements of its MLP")
    attention = tuple(_share_of_heads(one, ranks) for one in spec.attention)
    if spec.vocab_size < ranks.size:
        raise ConfigurationError(f"--tensor-parallel-size {ranks.size}: the model has {spec.vocab_size} tokens only")
    return replace(spec, attention=attention, intermediate_size=spec.intermediate_size // ranks.size)


def split_decoder(decoder: Decoder, whole: ArchSpec, ranks: Ranks) -> None:
    """Have a decoder that was built by `share_of` take part in exchanges, and know which weights are its own.

    whole: the spec of the model. To be called before weights are loaded.
    """
    for layer, heads in zip(decoder.layers, whole.attention, strict=True):
        _split_layer(cast(DecoderLayer, layer), heads, whole, ranks)
    if decoder.cross_states is not None:
        rows = [scaled(_key_heads(one, ranks), one.head_size) for one in whole.attention for _ in ("keys", "values")]
        decoder.cross_states.shard = Shard(tuple(rows))
    kind = ParallelTiedEmbedding if whole.tied_embeddings else ParallelEmbedding
    dtype, device = decoder.dtype, decoder.device
    decoder.embed_tokens = kind(whole.vocab_size, whole.hidden_size, ranks, dtype=dtype, device=device)
    if isinstance(decoder.lm_head, OutputLinear):
        decoder.lm_head = ParallelOutputLinear(
            whole.hidden_size, whole.vocab_size, ranks, bias=whole.head_bias, dtype=dtype, device=device
        )


def _split_layer(layer: DecoderLayer, heads: AttentionSpec, whole: ArchSpec, ranks: Ranks) -> None:
    device = layer.self_attn.o_proj.weight.device
    _split_attention(layer.self_attn, heads, ranks)
    if layer.cross_attn is not None:
        _split_cross_attention(layer.cross_attn, heads, ranks)
    inner = shares(whole.intermediate_size, ranks)
    if whole.gated:
        layer.mlp.gate_up_proj.shard = Shard((inner, inner))
    else:
        layer.mlp.up_proj.shard = Shard((inner,))
    layer.mlp.down_proj = RowParallelLinear(layer.mlp.down_proj, inner, ranks, device=device)


def _split_attention(attention: Attention, heads: AttentionSpec, ranks: Ranks) -> None:
    device = attention.o_proj.weight.device
    key_heads = _key_heads(heads, ranks)
    queries = scaled(shares(heads.num_heads, ranks), heads.head_size)
    keys = scaled(key_heads, heads.head_size)
    attention.qkv_proj.shard = Shard((queries, keys, keys))
    attention.o_proj = RowParallelLinear(attention.o_proj, queries, ranks, device=device)
    if isinstance(attention.q_norm, NormOfEachHead) and isinstance(attention.k_norm, NormOfEachHead):
        attention.q_norm.first_head = queries.first // heads.head_size
        attention.k_norm.first_head = key_heads.first
    if isinstance(attention.q_norm, NormOfRow) and isinstance(attention.k_norm, NormOfRow):
        copies = max(1, ranks.size // heads.num_kv_heads)
        attention.q_norm = ParallelNormOfRow(attention.q_norm, queries, 1, ranks, device=device)
        attention.k_norm = ParallelNormOfRow(attention.k_norm, keys, copies, ranks, device=device)


def _split_cross_attention(attention: CrossAttention, heads: AttentionSpec, ranks: Ranks) -> None:
    queries = scaled(shares(heads.num_heads, ranks), heads.head_size)
    attention.q_proj.shard = Shard((queries,))
    attention.o_proj = RowParallelLinear(attention.o_proj, queries, ranks, device=attention.o_proj.weight.device)


def _key_heads(heads: AttentionSpec, ranks: Ranks) -> Share:
    """Which heads of keys and values a rank has: with fewer of them than ranks, several ranks have the same one."""
    if heads.num_kv_heads >= ranks.size:
        return shares(heads.num_kv_heads, ranks)
    first = ranks.rank * heads.num_kv_heads // ranks.size
    return Share(first, first + 1, heads.num_kv_heads)


def _share_of_heads(heads: AttentionSpec, ranks: Ranks) -> AttentionSpec:
    _divides(heads.num_heads, ranks, "attention heads")
    if heads.num_kv_heads % ranks.size and ranks.size % heads.num_kv_heads:
        raise ConfigurationError(
            f"--tensor-parallel-size {ranks.size}: the model has {heads.num_kv_heads} heads of keys and values, of "
            "which the size must be a divisor or a multiple"
        )
    queries, keys = shares(heads.num_heads, ranks), _key_heads(heads, ranks)
    return replace(
        heads,
        num_heads=queries.last - queries.first,
        num_kv_heads=keys.last - keys.first,
        sinks=None if heads.sinks is None else heads.sinks[queries.first : queries.last],
    )


def _divides(whole: int, ranks: Ranks, what: str) -> None:
    if whole % ranks.size:
        raise ConfigurationError(
            f"--tensor-parallel-size {ranks.size}: the model has {whole} {what}, of which the size must be a divisor"
        )
