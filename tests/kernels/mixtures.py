"""What mixtures of experts compute, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.families.spec import ExpertsSpec


class Mixture:
    """Weights of a router and its experts, from which kernels' weights are made.

    experts: by number, gate_up ``[2 * inner_size, size]`` and down ``[size, inner_size]`` as a kernel rounds them.
    """

    def __init__(self, spec: ExpertsSpec, size: int) -> None:
        torch.manual_seed(0)
        self.spec = spec
        self.router = torch.randn(spec.count, size) / 4
        self.correction = torch.randn(spec.count) if spec.correction else None
        self.norm, self.input_norm, self.factors = (
            None if spec.router_norm is None else 0.5 + torch.rand(length) for length in (size, size, spec.count)
        )
        self.experts: dict[int, tuple[Tensor, Tensor]] = {}

    def expected(self, x: Tensor) -> Tensor:
        dtype, spec, x = x.dtype, self.spec, x.double()
        read = x
        if self.norm is not None and self.input_norm is not None:
            assert spec.router_norm is not None
            unit = x / (x.square().mean(1, keepdim=True) + spec.router_norm.eps).sqrt()
            x, read = (unit * self.input_norm.double()).to(dtype).double(), unit * self.norm.double()
        logits = read @ self.router.double().T
        scores = logits.softmax(1) if spec.scores == "softmax" else logits.sigmoid()
        chosen = (scores if self.correction is None else scores + self.correction).topk(spec.top_k).indices
        weights = scores.gather(1, chosen)
        if spec.renormalized:
            weights /= weights.sum(1, keepdim=True)
        if self.factors is not None:
            weights *= self.factors.double()[chosen]
        factors = torch.zeros_like(scores).scatter(1, chosen, weights * spec.scale)
        output = torch.zeros_like(x)
        for number, (up, down) in self.experts.items():
            gate, value = (x @ up.T).chunk(2, 1)
            output += factors[:, number, None] * ((F.silu(gate) * value) @ down.T)
        return output
