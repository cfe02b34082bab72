"""Shards a decoder across ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from vlmserve.errors import ConfigurationError
from vlmserve.families.spec import ArchSpec
from vlmserve.layer_specs import AttentionSpec, ConvolutionSpec, Mixer
from vlmserve.layers.linear import OutputLinear
from vlmserve.layers.parallel import (
    ParallelEmbedding,
    ParallelOutputLinear,
    ParallelTiedEmbedding,
    Ranks,
    shares,
)
from vlmserve.models.blocks.attention import key_heads
from vlmserve.models.decoder import Decoder
from vlmserve.models.decoder_layer import DecoderLayer


def share_of(spec: ArchSpec, ranks: Ranks) -> ArchSpec:
    """The spec of one rank's shard, with its heads and its part of the MLP but the whole vocabulary.

    Raises ConfigurationError for sizes that the number of ranks does not divide.
    """
    for size in (spec.intermediate_size, *spec.intermediate_sizes):
        _divides(size, ranks, "inner elements of its MLP")
    for experts in filter(None, spec.experts):
        _divides(experts.count, ranks, "experts")
        _divides(experts.shared_size, ranks, "inner elements of its shared experts")
    mixers = tuple(_share_of_mixer(one, ranks) for one in spec.mixers)
    if spec.vocab_size < ranks.size:
        raise ConfigurationError(f"--tensor-parallel-size {ranks.size}: the model has {spec.vocab_size} tokens only")
    return replace(
        spec,
        mixers=mixers,
        intermediate_size=spec.intermediate_size // ranks.size,
        intermediate_sizes=tuple(size // ranks.size for size in spec.intermediate_sizes),
        experts=tuple(
            None if one is None else replace(one, shared_size=one.shared_size // ranks.size) for one in spec.experts
        ),
    )


def split_decoder(decoder: Decoder, whole: ArchSpec, ranks: Ranks) -> None:
    """Connect a decoder built from `share_of` to the other ranks, before weights are loaded.

    whole: the spec of the model.
    """
    for index, layer in enumerate(decoder.layers):
        cast(DecoderLayer, layer).split(whole, index, ranks)
    if decoder.cross_states is not None:
        decoder.cross_states.split(whole, ranks)
    kind = ParallelTiedEmbedding if whole.tied_embeddings else ParallelEmbedding
    dtype, device = decoder.dtype, decoder.device
    decoder.embed_tokens = kind(whole.vocab_size, whole.hidden_size, ranks, dtype=dtype, device=device)
    if isinstance(decoder.lm_head, OutputLinear):
        decoder.lm_head = ParallelOutputLinear(
            whole.hidden_size, whole.vocab_size, ranks, bias=whole.head_bias, dtype=dtype, device=device
        )


def _share_of_mixer(mixer: Mixer, ranks: Ranks) -> Mixer:
    if isinstance(mixer, AttentionSpec):
        return _share_of_heads(mixer, ranks)
    if isinstance(mixer, ConvolutionSpec):
        _divides(mixer.channels, ranks, "channels of its convolutions")
        return replace(mixer, channels=mixer.channels // ranks.size)
    _divides(mixer.num_key_heads, ranks, "key heads of the gated delta rule")
    heads = mixer.num_key_heads // ranks.size, mixer.num_value_heads // ranks.size
    return replace(mixer, num_key_heads=heads[0], num_value_heads=heads[1])


def _share_of_heads(heads: AttentionSpec, ranks: Ranks) -> AttentionSpec:
    _divides(heads.num_heads, ranks, "attention heads")
    if heads.num_kv_heads % ranks.size and ranks.size % heads.num_kv_heads:
        raise ConfigurationError(
            f"--tensor-parallel-size {ranks.size}: the model has {heads.num_kv_heads} key-value heads; use a size that "
            f"divides {heads.num_kv_heads} or is a multiple of it"
        )
    queries, keys = shares(heads.num_heads, ranks), key_heads(heads, ranks)
    return replace(
        heads,
        num_heads=queries.last - queries.first,
        num_kv_heads=keys.last - keys.first,
        sinks=None if heads.sinks is None else heads.sinks[queries.first : queries.last],
    )


def _divides(whole: int, ranks: Ranks, what: str) -> None:
    if whole % ranks.size:
        raise ConfigurationError(
            f"--tensor-parallel-size {ranks.size}: the model has {whole} {what}; use a size that divides {whole}"
        )
