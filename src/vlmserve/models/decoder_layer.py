from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Unpack, cast

from torch import Tensor, nn

from vlmserve.families.spec import ArchSpec
from vlmserve.kernels.attention import AttentionBackend, LayerCache
from vlmserve.layer_specs import AttentionSpec, ConvolutionSpec
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear, empty_parameter
from vlmserve.layers.parallel import Ranks
from vlmserve.layers.residual import ResidualStream
from vlmserve.layers.step import StepContext
from vlmserve.models.blocks.attention import Attention
from vlmserve.models.blocks.beside import ExpertsBeside
from vlmserve.models.blocks.block import Block, make_norm
from vlmserve.models.blocks.convolution import ShortConvolution
from vlmserve.models.blocks.cross import CrossAttention
from vlmserve.models.blocks.delta import GatedDelta
from vlmserve.models.blocks.experts import Experts
from vlmserve.models.blocks.mlp import MLP
from vlmserve.models.blocks.per_layer import PerLayerInput
from vlmserve.quant.calibration import Fold


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward block, with cross-attention between them if the family has it."""

    def __init__(
        self, spec: ArchSpec, index: int, rope: int | None, backend: AttentionBackend, **factory: Unpack[Factory]
    ) -> None:
        super().__init__()
        norm = partial(make_norm, spec.norm, spec.hidden_size, **factory)
        of_inputs, of_outputs = spec.norms in ("pre", "sandwich"), spec.norms != "pre"
        self.attention_norm = norm() if of_inputs else None
        output_norm = partial(make_norm, spec.output_norm or spec.norm, spec.hidden_size, **factory)
        self.attention_output_norm = output_norm() if of_outputs else None
        self.mlp_norm = norm() if of_inputs and not spec.parallel else None
        self.mlp_output_norm = output_norm() if of_outputs else None
        mixer, before = spec.mixers[index], spec.mixers[:index]
        self._has_attention = isinstance(mixer, AttentionSpec)
        self._number = sum(isinstance(one, AttentionSpec) == self._has_attention for one in before)
        self._mixer = "self_attn"
        if isinstance(mixer, AttentionSpec):
            self.self_attn = Attention(spec, index, backend, rope=rope, **factory)
        elif isinstance(mixer, ConvolutionSpec):
            self._mixer = "conv"
            self.conv = ShortConvolution(mixer, spec.hidden_size, **factory)
        else:
            self._mixer = "linear_attn"
            self.linear_attn = GatedDelta(mixer, spec.hidden_size, spec.norm.eps, **factory)
        self.cross_norm = norm() if of_inputs and spec.cross_size else None
        self.cross_output_norm = output_norm() if of_outputs and spec.cross_size else None
        self.cross_attn = CrossAttention(spec, index, **factory) if spec.cross_size else None
        self.mlp = _feed_forward(spec, index, **factory)
        self.beside = None
        if (experts := spec.experts_of(index)) is not None and experts.router_norm is not None:
            self.beside = ExpertsBeside(spec, experts, **factory)
        self._parallel = spec.parallel
        self.per_layer = self.per_layer_norm = None
        if (own := spec.per_layer) is not None:
            self.per_layer = PerLayerInput(spec, own.size, **factory)
            self.per_layer_norm = norm()
            self._embeddings = slice(index * own.size, (index + 1) * own.size)
        self.layer_scalar = empty_parameter(1, **factory) if spec.layer_scalar else None

    def forward(
        self,
        stream: ResidualStream,
        caches: Sequence[LayerCache],
        step: StepContext,
        wanted: Tensor | None = None,
        embeddings: Tensor | None = None,
    ) -> None:
        """caches: of all attention layers. wanted: int64 rows to compute. embeddings: per-layer."""
        mixer: Block = self._modules[self._mixer]  # type: ignore[assignment]
        x = stream.normed(self.attention_norm, None if self._parallel else mixer.reader)
        cache = caches[self._number] if self._has_attention else step.states[self._number]
        stream.add(mixer(x, cache, step), self.attention_output_norm)
        if wanted is not None:
            stream.narrow(wanted)
            if not len(wanted):
                return
            x = cast(Tensor, x)[wanted] if self._parallel else x
            if step.adapters is not None:
                step.adapters.narrow(wanted)
            embeddings = None if embeddings is None else embeddings[wanted]
        if self.cross_attn is not None:
            crossed = self.cross_attn(stream.normed(self.cross_norm), step.metadata.cross)
            stream.add(crossed, self.cross_output_norm)
        if not self._parallel:
            x = stream.normed(self.mlp_norm, self.mlp.reader)
        fed = self.mlp(x)
        stream.add(fed if self.beside is None else self.beside(fed, stream.rows), self.mlp_output_norm)
        if self.per_layer is not None:
            assert embeddings is not None
            own = embeddings[:, self._embeddings]
            stream.add(self.per_layer(stream.normed(None), own), self.per_layer_norm)
        if self.layer_scalar is not None:
            stream.scale(self.layer_scalar)

    def split(self, whole: ArchSpec, index: int, ranks: Ranks) -> None:
        for block in self.children():
            if isinstance(block, Block):
                block.split(whole, index, ranks)

    def folds(self) -> Iterator[Fold]:
        """Yield linear layers whose inputs can be scaled, by name in this layer. Norms fold the factors of their
        readers."""
        both = self._readers(self._mixer) + (self._readers("mlp") if self._parallel else ())
        for norm, readers in ((self.attention_norm, both), (self.mlp_norm, self._readers("mlp"))):
            if norm is not None:
                linears = {name: self.get_submodule(name) for name in readers}
                plain = {name: one for name, one in linears.items() if isinstance(one, Linear) and one.stays_plain}
                yield Fold(readers, plain, norm)
        for name, block in self.named_children():
            if isinstance(block, Block):
                yield from block.folds(name)

    def _readers(self, name: str) -> tuple[str, ...]:
        block = self.get_submodule(name)
        assert isinstance(block, Block)
        return tuple(f"{name}.{reader}" for reader in block.readers)


def _feed_forward(spec: ArchSpec, index: int, **factory: Unpack[Factory]) -> MLP | Experts:
    if (experts := spec.experts_of(index)) is not None and experts.router_norm is None:
        return Experts(experts, spec.hidden_size, spec.activation, **factory)
    size, inner, act = spec.hidden_size, spec.inner_size(index), spec.activation
    return MLP(size, inner, act, gated=spec.gated, bias=spec.mlp_bias, **factory)
