"""Muon for matrices, AdamW for the rest, over float32 copies of parameters in bfloat16 or float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from training.pixie.precision import parameter_dtype

MUON_ITERATIONS = 5
MUON_COEFFICIENTS = 3.4445, -4.7750, 2.0315
MUON_MOMENTUM = 0.95


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Move the singular values of a matrix towards 1, by Newton and Schulz. dtype: that of the products."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = MUON_COEFFICIENTS
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon) with steps of AdamW's size.

    torch's own multiplies bfloat16 on every CPU; CPUs without instructions for it take 50 times as long.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - MUON_MOMENTUM)
                update = orthogonal(matrix.grad.lerp(momentum, MUON_MOMENTUM), parameter_dtype(matrix.device))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """Weights between hidden states; Muon is not for the others."""
    return parameter.ndim == 2 and ("blocks" in name or "project" in name)


class Optimizer:
    """Trains one module. Its parameters become those of `parameter_dtype`, and their float32 originals live here.

    averages: exponential moving averages of the originals, what is worth exporting.
    """

    def __init__(self, module: nn.Module, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self._module = module
        self.originals = {name: p.detach().float().clone() for name, p in module.named_parameters()}
        self.averages = {name: original.clone() for name, original in self.originals.items()}
        module.to(parameter_dtype(next(module.parameters()).device))
        self._parameters = dict(module.named_parameters())
        matrices = [tensor for name, tensor in self.originals.items() if _is_matrix(name, tensor)]
        others = [tensor for name, tensor in self.originals.items() if not _is_matrix(name, tensor)]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
        ]
        if matrices:
            self._optimizers.append(Muon(matrices, lr=learning_rate, weight_decay=0.01))

    def step(self, scale: float, decay: float) -> None:
        """One step at ``scale * learning_rate`` from the module's gradients; `decay` is that of the averages."""
        for name, parameter in self._parameters.items():
            self.originals[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = scale * self.learning_rate
            optimizer.step()
        with torch.no_grad():
            for name, original in self.originals.items():
                self._parameters[name].copy_(original)
                self.averages[name].lerp_(original, 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        """Everything that training goes on from."""
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        return {"originals": self.originals, "averages": self.averages, "optimizers": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; one without "optimizers" brings weights only."""
        with torch.no_grad():
            for kind, tensors in (("originals", self.originals), ("averages", self.averages)):
                for name, tensor in tensors.items():
                    if name in state[kind]:
                        tensor.copy_(state[kind][name])
            for name, original in self.originals.items():
                self._parameters[name].copy_(original)
        states: Iterable[Any] = state.get("optimizers", ())
        for optimizer, saved in zip(self._optimizers, states, strict=False):
            optimizer.load_state_dict(saved)
