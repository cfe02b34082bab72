"""Files in which one tensor holds all experts of a layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from vlmserve.models.files import Slice, WeightFile

if TYPE_CHECKING:
    from torch import Tensor

_STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_EXPERT = re.compile(r"(\.experts)\.(\d+)\.(gate_up_proj|down_proj)\.weight$")


def stacked_shapes(file: WeightFile) -> dict[str, list[int]]:
    """The shapes of tensors that hold several experts, by key."""
    return {key: file.get_slice(key).get_shape() for key in file.keys() if _STACKED.search(key)}  # noqa: SIM118


def has_inputs_first(shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return whether each expert's weights are ``[inputs, outputs]``, as in Qwen3-VL's files.

    shapes: `stacked_shapes` of all files.
    """
    ups = (shape for key, shape in shapes.items() if key.endswith("gate_up_proj"))
    downs = (shape for key, shape in shapes.items() if key.endswith("down_proj"))
    up, down = next(ups, None), next(downs, None)
    return up is not None and down is not None and list(up[1:]) == [down[2], 2 * down[1]]


class StackedExperts:
    """A `WeightFile` that shows each expert of a stacked tensor as its own tensor."""

    def __init__(self, file: WeightFile, *, inputs_first: bool) -> None:
        self._file, self._inputs_first = file, inputs_first
        self._counts = {key: shape[0] for key, shape in stacked_shapes(file).items()}

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        found = [key for key in self._file.keys() if key not in self._counts]  # noqa: SIM118
        for key, count in self._counts.items():
            before, _, name = key.rpartition(".")
            found += [f"{before}.{number}.{name}.weight" for number in range(count)]
        return found

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[0:] if self._stacked(name) else self._file.get_tensor(name)

    def get_slice(self, name: str) -> Slice:
        found = self._stacked(name)
        if found is None:
            return self._file.get_slice(name)
        return _ExpertSlice(self._file.get_slice(found[0]), found[1], inputs_first=self._inputs_first)

    def stored(self, name: str, share: float) -> tuple[str, float]:
        found = self._stacked(name)
        if found is None:
            return name, share
        key, number = found
        return key, (number + share) / self._counts[key]

    def _stacked(self, name: str) -> tuple[str, int] | None:
        match = _EXPERT.search(name)
        if match is None:
            return None
        key = f"{name[: match.start()]}{match[1]}.{match[3]}"
        return (key, int(match[2])) if key in self._counts else None


class _ExpertSlice:
    def __init__(self, stacked: Slice, number: int, *, inputs_first: bool) -> None:
        self._stacked, self._number, self._inputs_first = cast(Any, stacked), number, inputs_first

    def get_shape(self) -> list[int]:
        shape: list[int] = self._stacked.get_shape()[1:]
        return shape[::-1] if self._inputs_first else shape

    def __getitem__(self, rows: slice) -> Tensor:
        if self._inputs_first:
            columns: Tensor = self._stacked[self._number, :, rows]
            return columns.T
        own: Tensor = self._stacked[self._number, rows]
        return own
