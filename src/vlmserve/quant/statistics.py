"""Statistics of a layer's inputs for calibration."""

from __future__ import annotations

import torch
from torch import Tensor


class InputStatistics:
    """Skips rows with infinities or NaN. Weights let image rows count less than text rows."""

    def __init__(self, in_features: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None):
        self._products = torch.zeros(in_features, in_features, dtype=dtype, device=device)
        self._magnitudes = torch.zeros(in_features, dtype=dtype, device=device)
        self._total = 0.0
        self.largest = torch.zeros(in_features, dtype=dtype, device=device)
        """Largest magnitude of each input, float ``[in_features]``."""
        self.count = 0
        self.num_left_out = 0

    def add(self, rows: Tensor, weights: Tensor | None = None) -> None:
        """rows: ``[..., in_features]``. weights: of rows, not negative; None: 1."""
        rows = rows.reshape(-1, rows.shape[-1]).to(self._products.dtype)
        finite = rows.isfinite().all(1)
        if not finite.all():
            self.num_left_out += len(rows) - int(finite.sum())
            rows, weights = rows[finite], None if weights is None else weights[finite]
            if not len(rows):
                return
        magnitudes = rows.abs()
        self.largest = torch.maximum(self.largest, magnitudes.amax(0))
        self.count += len(rows)
        if weights is None:
            self._products.addmm_(rows.T, rows)
            self._magnitudes += magnitudes.sum(0)
            self._total += len(rows)
            return
        weights = weights.to(rows.dtype)
        self._products.addmm_((rows * weights[:, None]).T, rows)
        self._magnitudes += weights @ magnitudes
        self._total += float(weights.sum())

    @property
    def hessian(self) -> Tensor:
        """``H = 2 X^T X / N``: the second derivative of an output's mean squared error
        (https://arxiv.org/abs/2210.17323)."""
        return self._products * (2 / max(self._total, 1e-30))

    @property
    def mean_magnitude(self) -> Tensor:
        return self._magnitudes / max(self._total, 1e-30)

    def divide(self, factors: Tensor) -> None:
        factors = factors.to(self._products.dtype)
        self._products /= torch.outer(factors, factors)
        self._magnitudes /= factors
        self.largest = self.largest / factors


def output_error(difference: Tensor, hessian: Tensor) -> Tensor:
    """``tr(dW H dW^T)``: twice the outputs' mean squared change."""
    return ((difference @ hessian) * difference).sum()
