"""How much of each adapter a token gets (X-LoRA: https://arxiv.org/abs/2402.07148)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.adapters.xlora_config import XLoraConfig


@dataclass(frozen=True)
class Mixture:
    """A classifier: from a token's final hidden state to the scalings of adapters in each layer.

    products: weights and biases, float32, in order. num_layers: that have scalings of their own; 1: all have the same.
    labels: what people call the adapters, in the order of the scalings.
    """

    config: XLoraConfig
    products: Sequence[tuple[Tensor, Tensor | None]]
    num_layers: int
    labels: tuple[str, ...] = ()

    @property
    def num_columns(self) -> int:
        """Scalings of a token: those of a layer's adapters lie side by side."""
        return self.num_layers * len(self.config.names)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for product in self.products for tensor in product if tensor is not None)

    def keeping(self, outputs: Sequence[int], config: XLoraConfig, labels: Sequence[str]) -> Mixture:
        """The classifier without its outputs for other adapters. config, labels: of those that it keeps."""

        def rows(tensor: Tensor) -> Tensor:
            return tensor.view(self.num_layers, -1, *tensor.shape[1:])[:, list(outputs)].flatten(0, 1)

        weight, bias = self.products[-1]
        products = [*self.products[:-1], (rows(weight), None if bias is None else rows(bias))]
        return replace(self, config=config, products=products, labels=tuple(labels))

    def to(self, device: torch.device) -> Mixture:
        """The same on a device."""
        products = [(weight.to(device), None if bias is None else bias.to(device)) for weight, bias in self.products]
        return replace(self, products=products)

    def scalings(self, hidden: Tensor) -> Tensor:
        """``[tokens, hidden_size]`` final hidden states of the scaling pass to float32 ``[tokens, num_columns]``."""
        x = hidden.float()
        for number, (weight, bias) in enumerate(self.products):
            x = F.linear(x.relu() if number and self.config.relu else x, weight, bias)
        x = x.view(len(x), self.num_layers, -1)
        if self.config.softmax:
            x = torch.softmax(x if self.config.temperature == 1 else x / self.config.temperature, -1)
        return self._selected(x).flatten(1)

    def means(self, scalings: Tensor) -> Tensor:
        """``[tokens, adapters]``: the layers' mean of `scalings`."""
        return scalings if self.num_layers == 1 else scalings.view(len(scalings), self.num_layers, -1).mean(1)

    @cached_property
    def of_scaling_pass(self) -> Tensor | None:
        """float32 ``[num_columns]``: scalings of every token in the scaling pass; None: all are 0, so that it is a pass
        of the base model."""
        # On the host: devices may decide ties differently.
        count, value = len(self.config.names), self.config.pass_value
        constant = torch.full((1, self.num_layers, count), 1 / count if value is None else value)
        scalings = self._selected(constant).flatten()
        return scalings.to(self.products[0][0].device) if scalings.any() else None

    def _selected(self, scalings: Tensor) -> Tensor:
        """``[tokens, layers, adapters]`` with 0 for adapters that do not belong to the `top_k`. What is left is scaled
        to a sum of 1 only by `softmax_topk`."""
        if self.config.top_k is not None:
            kept = scalings.topk(self.config.top_k, dim=-1).indices
            scalings = scalings * torch.zeros_like(scalings).scatter_(-1, kept, 1.0)
        if self.config.softmax_topk:
            nothing = scalings == 0
            scalings = torch.softmax(scalings.masked_fill(nothing, -torch.inf), -1).masked_fill(nothing, 0.0)
        return scalings
