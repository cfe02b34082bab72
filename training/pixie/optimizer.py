"""Muon for matrices, AdamW for the rest, over float32 copies of parameters in bfloat16 or float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from training.pixie.precision import parameter_dtype

MUON_ITERATIONS = 5
"""In each, torch multiplies bfloat16, whatever the CPU has."""


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """Weights between hidden states; Muon (https://kellerjordan.github.io/posts/muon) is not for the others."""
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
            muon = torch.optim.Muon(
                matrices, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw", ns_steps=MUON_ITERATIONS
            )
            self._optimizers.append(muon)

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
