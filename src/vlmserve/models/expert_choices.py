"""Replay one pass's choice of experts in another pass, so that their logits are comparable.

Rounding can swap two experts with nearly equal scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ExpertChoices:
    """Recorded results of `torch.topk`, which routers use."""

    def __init__(self) -> None:
        self._chosen: list[list[Tensor]] = []
        """For each sequence and call: ``[tokens, k]``."""

    @contextmanager
    def record(self) -> Iterator[None]:
        chosen: list[Tensor] = []
        with _Recording(chosen):
            yield
        self._chosen.append(chosen)

    @contextmanager
    def replay(self, spans: Sequence[tuple[int, int]]) -> Iterator[None]:
        """spans: tokens of each sequence in the batch."""
        parts = [
            [indices[first:last] for indices in chosen]
            for chosen, (first, last) in zip(self._chosen, spans, strict=True)
        ]
        calls = [torch.cat(of_call) for of_call in zip(*parts, strict=False)]
        with _Replaying(calls):
            yield


class _Recording(TorchFunctionMode):
    def __init__(self, chosen: list[Tensor]) -> None:
        super().__init__()
        self._chosen = chosen

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            self._chosen.append(result.indices.reshape(-1, result.indices.shape[-1]))
        return result


class _Replaying(TorchFunctionMode):
    def __init__(self, calls: Sequence[Tensor]) -> None:
        super().__init__()
        self._calls = list(calls)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        shape = result.indices.shape
        # The other pass may have run a vision tower first, which also calls topk.
        alike = (
            place
            for place, recorded in enumerate(self._calls)
            if recorded.numel() == result.indices.numel() and recorded.shape[-1] == shape[-1]
        )
        place = next(alike, None)
        if place is None:
            return result
        scores: Tensor = args[0]
        indices = self._calls[place].reshape(shape)
        del self._calls[: place + 1]
        return torch.return_types.topk((scores.gather(-1, indices), indices))
