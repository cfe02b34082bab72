"""X-LoRA's scalings: the weight of each adapter for each token (https://arxiv.org/abs/2402.07148)."""

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
    """Maps a token's final hidden state to scalings of adapters in each layer."""

    config: XLoraConfig
    products: Sequence[tuple[Tensor, Tensor | None]]
    """float32 weights and biases of its linear layers, in order."""
    num_layers: int
    """Layers with their own scalings; 1: all layers share them."""
    labels: tuple[str, ...] = ()
    """Adapter names for users, in the order of the scalings."""

    @classmethod
    def constant(cls, hidden_size: int, device: torch.device) -> Mixture:
        """One adapter, always scaled by 1."""
        config = XLoraConfig(
            hidden_size, 1, ("",), softmax=True, softmax_topk=False, temperature=1.0, layerwise=False, top_k=None,
            relu=False, pass_value=None, weight=1.0,
        )  # fmt: skip
        return cls(config, [(torch.zeros(1, hidden_size, device=device), None)], num_layers=1)

    @property
    def num_columns(self) -> int:
        """Scalings of a token, layer after layer."""
        return self.num_layers * len(self.config.names)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for product in self.products for tensor in product if tensor is not None)

    def keeping(self, outputs: Sequence[int], config: XLoraConfig, labels: Sequence[str]) -> Mixture:
        """outputs: of the classifier. config, labels: of the kept adapters."""

        def rows(tensor: Tensor) -> Tensor:
            return tensor.view(self.num_layers, -1, *tensor.shape[1:])[:, list(outputs)].flatten(0, 1)

        weight, bias = self.products[-1]
        products = [*self.products[:-1], (rows(weight), None if bias is None else rows(bias))]
        return replace(self, config=config, products=products, labels=tuple(labels))

    def to(self, device: torch.device) -> Mixture:
        products = [(weight.to(device), None if bias is None else bias.to(device)) for weight, bias in self.products]
        return replace(self, products=products)

    def scalings(self, hidden: Tensor) -> Tensor:
        """Hidden states of the scaling pass ``[tokens, hidden_size]`` to float32 ``[tokens, num_columns]``."""
        x = hidden.float()
        for number, (weight, bias) in enumerate(self.products):
            x = F.linear(x.relu() if number and self.config.relu else x, weight, bias)
        x = x.view(len(x), self.num_layers, -1)
        if self.config.softmax:
            x = torch.softmax(x if self.config.temperature == 1 else x / self.config.temperature, -1)
        return self._selected(x).flatten(1)

    def means(self, scalings: Tensor) -> Tensor:
        """Average over layers: ``[tokens, adapters]``."""
        return scalings if self.num_layers == 1 else scalings.view(len(scalings), self.num_layers, -1).mean(1)

    @cached_property
    def of_scaling_pass(self) -> Tensor | None:
        """A token's scalings in the scaling pass, float32 ``[num_columns]``. None: all are 0; run the base model."""
        # On the host: devices may break ties differently.
        count, value = len(self.config.names), self.config.pass_value
        constant = torch.full((1, self.num_layers, count), 1 / count if value is None else value)
        scalings = self._selected(constant).flatten()
        return scalings.to(self.products[0][0].device) if scalings.any() else None

    def _selected(self, scalings: Tensor) -> Tensor:
        """Zero the scalings ``[tokens, layers, adapters]`` outside the `top_k`.

        Only `softmax_topk` scales the others to a sum of 1.
        """
        if self.config.top_k is not None:
            kept = scalings.topk(self.config.top_k, dim=-1).indices
            scalings = scalings * torch.zeros_like(scalings).scatter_(-1, kept, 1.0)
        if self.config.softmax_topk:
            nothing = scalings == 0
            scalings = torch.softmax(scalings.masked_fill(nothing, -torch.inf), -1).masked_fill(nothing, 0.0)
        return scalings
