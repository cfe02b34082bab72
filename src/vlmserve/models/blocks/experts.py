"""A mixture of experts as the feed-forward block (https://arxiv.org/abs/1701.06538)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.families.spec import ArchSpec, ExpertsSpec
from vlmserve.kernels.operations import ExpertsKernel, GateKernel, LinearKernel, Operations, RouterWeights
from vlmserve.layers.layer import Factory, Layer
from vlmserve.layers.linear import Linear, empty_parameter
from vlmserve.layers.norm import RMSNorm
from vlmserve.layers.parallel import Ranks, shares
from vlmserve.layers.residual import Adding, Unfinished
from vlmserve.models.blocks.block import Block
from vlmserve.models.blocks.mlp import MLP
from vlmserve.quant.calibration import Fold


class Router(nn.Module):
    """Chooses and weighs the experts of each row, always in float32."""

    def __init__(self, spec: ExpertsSpec, size: int, *, device: torch.device) -> None:
        super().__init__()
        self._spec = spec
        self.linear = Linear(size, spec.count, bias=False, dtype=torch.float32, device=device)
        self.linear.stays_plain = True
        self.bias = empty_parameter(spec.count, dtype=torch.float32, device=device) if spec.correction else None
        self.scale = self.per_expert_scale = None
        if spec.router_norm is not None:
            self.scale, self.per_expert_scale = (
                empty_parameter(count, dtype=torch.float32, device=device) for count in (size, spec.count)
            )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (float32) and numbers of each row's experts, both ``[rows, top_k]``."""
        x, norm = x.float(), self._spec.router_norm
        if norm is not None and self.scale is not None:
            size = x.shape[-1]
            x = F.rms_norm(x, (size,), None, norm.eps) * self.scale.data * size**-0.5
        logits = self.linear(x)
        scores = logits.softmax(-1) if self._spec.scores == "softmax" else logits.sigmoid()
        chosen = (scores if self.bias is None else scores + self.bias).topk(self._spec.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        if self._spec.renormalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.per_expert_scale is not None:
            weights = weights * self.per_expert_scale.data[chosen]
        return weights * self._spec.scale, chosen

    def weights(self, product: LinearKernel, norm: RMSNorm | None) -> RouterWeights:
        return RouterWeights(
            product,
            correction=None if self.bias is None else self.bias.data,
            norm=None if self.scale is None else self.scale.data * len(self.scale) ** -0.5,
            input_norm=None if norm is None else norm.weight.data.float() + norm.offset,
            factors=None if self.per_expert_scale is None else self.per_expert_scale.data,
        )


class Experts(Block, Layer):
    """Adds outputs of each row's experts, and of an MLP that all rows share. Only chosen experts' weights are read."""

    readers = ()
    """No reader takes factors of a norm, because all experts would have to share them."""

    def __init__(self, spec: ExpertsSpec, size: int, act: str, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self._spec = spec
        self.router = Router(spec, size, device=factory["device"])
        self.norm: RMSNorm | None = None
        """Norm of the experts' inputs. The router takes rows without it."""
        if (norm := spec.router_norm) is not None:
            self.norm = RMSNorm(size, norm.eps, offset=norm.offset, **factory)
        self.experts = nn.ModuleDict(
            {
                str(number): MLP(size, spec.inner_size, act, gated=True, bias=False, **factory)
                for number in range(spec.count)
            }
        )
        self.shared = self.shared_gate = None
        if spec.shared_size:
            self.shared = MLP(size, spec.shared_size, act, gated=True, bias=False, **factory)
        if spec.shared_gate:
            self.shared_gate = Linear(size, 1, bias=False, **factory)
            self.shared_gate.stays_plain = True
        self._ranks: Ranks | None = None
        self._kernel: ExpertsKernel | None = None
        self._gate: GateKernel | None = None
        for routed in (self.router, self.experts):
            for module in routed.modules():
                if isinstance(module, Linear):
                    module.takes_adapters = False

    def forward(self, x: Tensor) -> Unfinished:
        """Sums are float32 in the order of expert numbers, independent of the batch."""
        return Unfinished(Adding(self._add), x)

    def _add(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self.shared is not None:
            linear, inputs = self.shared(x)
            if self.shared_gate is not None:
                # The last layer has no bias, so gating its inputs equals gating its outputs.
                gate = self._gate or gated
                inputs = gate(inputs, self.shared_gate(x))
            residual = linear(inputs, residual)
        if self._kernel is not None and self._ranks is None:
            return self._kernel(x, residual)
        output = self._sum(x) if self._kernel is None else self._kernel(x, float_output=True)
        if self._ranks is not None:
            output = self._ranks.sum(output)
        return (output if residual is None else output + residual).to(x.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        if self.norm is not None:
            x = self.norm(x)
        output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        sent = chosen.flatten()
        order = sent.argsort(stable=True)
        rows, weights = order // self._spec.top_k, weights.flatten()[order, None]
        last = 0
        for number, count in enumerate(sent.bincount(minlength=self._spec.count).tolist()):
            first, last = last, last + count
            if count and str(number) in self.experts:
                own = rows[first:last]
                expert = cast(MLP, self.experts[str(number)])
                expert.reader.chosen_rows = expert.last.chosen_rows = own
                linear, inputs = expert(x[own])
                output[own] += linear(inputs).float() * weights[first:last]
        return output

    def arrange(self, operations: Operations) -> None:
        for module in self.modules():
            if isinstance(module, Linear):
                module.arrange(operations)
        if self.shared_gate is not None:
            self._gate = operations.output_gate(self.shared_gate.dtype)
        products = [_product(self.router.linear)]
        for _, expert in self._experts():
            products += [_product(expert.reader), _product(expert.last)]
        found = [product for product in products if product is not None]
        if len(products) == 1:
            return  # other ranks have all experts
        if len(found) < len(products):
            self._kernel = operations.experts(self._spec, None, {})
        else:
            experts = dict(zip(map(int, self.experts), zip(found[1::2], found[2::2], strict=True), strict=True))
            self._kernel = operations.experts(self._spec, self.router.weights(found[0], self.norm), experts)

    def _experts(self) -> Iterator[tuple[str, MLP]]:
        for number, expert in self.experts.items():
            assert isinstance(expert, MLP)
            yield number, expert

    def split(self, whole: ArchSpec, index: int, ranks: Ranks) -> None:
        """Keep some whole experts, and a shard of the shared MLP."""
        own, spec = shares(self._spec.count, ranks), whole.experts_of(index)
        assert spec is not None
        self._ranks = ranks
        for number in range(own.whole):
            if not own.first <= number < own.last:
                del self.experts[str(number)]
        if self.shared is not None:
            self.shared.split_inner(spec.shared_size, ranks)

    def folds(self, name: str) -> Iterator[Fold]:
        for number, expert in self._experts():
            yield from expert.folds(f"{name}.experts.{number}")
        if self.shared is not None:
            yield from self.shared.folds(f"{name}.shared")


def gated(x: Tensor, gates: Tensor) -> Tensor:
    """The reference `GateKernel`."""
    return (x.float() * gates.float().sigmoid()).to(x.dtype)


def _product(linear: Linear) -> LinearKernel | None:
    kept = linear.kept()
    return None if kept is None or kept.input_order is not None or kept.order is not None else kept.product
