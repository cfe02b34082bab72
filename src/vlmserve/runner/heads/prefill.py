"""Prefill without a result: other requests use the prompt's KV blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmserve.runner.heads.head import Head


class PrefillHead(Head):
    def places(self, start: int, end: int) -> range:
        return range(0)

    def _add(self, rows: Tensor) -> None:
        raise AssertionError("a prefill reads no states")

    def result(self) -> Tensor:
        return torch.empty(0)
