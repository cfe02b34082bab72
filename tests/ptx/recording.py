"""What a CUDA graph is, for kernels in the emulator.

Launches and torch's operations are kept with all that they were given, and repeated without the Python that made them.
As a graph, a recording has memory of its own, which others may use in the meantime, and reads the rest where it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

READING = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2"}
"""Operations whose results the host has to know, or whose sizes depend on what a tensor holds."""
TO_HOST = {"tolist", "numpy", "cpu", "__array__"}
"""Methods that are no operations where a tensor is in the host's memory."""


class Unrecordable(Exception):
    """What CUDA refuses while a graph is captured."""


class Stale(Exception):
    """Memory that a recording reads, and that nobody has anymore."""


class _Refusing(TorchFunctionMode):
    """Refuses what gives tensors to the host."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in TO_HOST:
            raise Unrecordable(f"{function} waits for the device while a graph is captured")
        return function(*args, **(kwargs or {}))


class _Outside:
    """A tensor whose memory is not the recording's, and is not kept by it."""

    def __init__(self, tensor: Tensor) -> None:
        self._memory = weakref.ref(tensor.untyped_storage())
        self._layout = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        """The tensor. Raises Stale."""
        storage = self._memory()
        if storage is None:
            raise Stale(f"a graph reads memory that was freed: a tensor of shape {tuple(self._layout[2])}")
        dtype, offset, shape, strides = self._layout
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)


class Recording(TorchDispatchMode):
    """A graph. Its calls are recorded in its context, and repeated by `repeat`."""

    def __init__(self, pool: WeakSet[Recording]) -> None:
        """pool: recordings that share their memory."""
        super().__init__()
        self._pool = pool
        pool.add(self)
        self._calls: list[Callable[[], None]] = []
        self._memory: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.overloadpacket.__name__ in READING:
            raise Unrecordable(f"{function} waits for the device while a graph is captured")
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        # Before a call changes them.
        kept = self._kept((args, kwargs))
        results = function(*args, **kwargs)
        known = {one.untyped_storage().data_ptr() for one in given}
        fresh = []
        for result in tree_flatten(results)[0]:
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
                self._memory[result.untyped_storage().data_ptr()] = result.untyped_storage()
                fresh.append(result)
            else:
                fresh.append(None)
        if function.overloadpacket.__name__ not in ("empty", "empty_like", "empty_strided", "new_empty"):
            self._calls.append(lambda: self._call(function, kept, fresh))
        return results

    def _kept(self, arguments: Any) -> Any:
        return tree_map_only(Tensor, lambda one: one if self._owns(one) else _Outside(one), arguments)

    def _owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memory

    def _call(self, function: Any, kept: Any, fresh: list[Tensor | None]) -> None:
        args, kwargs = _tensors(kept)
        results = tree_flatten(function(*args, **kwargs))[0]
        for target, result in zip(fresh, results, strict=True):
            if target is not None:
                target.copy_(result)

    def launched(self, run: Callable[[], None], tensors: list[Tensor]) -> None:
        """A kernel was launched with these tensors, which `run` does again at the same addresses."""
        outside = [_Outside(one) for one in tensors if not self._owns(one)]

        def again() -> None:
            for one in outside:
                one.tensor()
            run()

        self._calls.append(again)

    def repeat(self) -> None:
        """Do all of it again. Raises Stale."""
        for recording in self._pool:
            for storage in recording._memory.values():
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
        for call in self._calls:
            call()


def _tensors(kept: Any) -> Any:
    return tree_map(lambda one: one.tensor() if isinstance(one, _Outside) else one, kept)


current: Recording | None = None
"""What records now."""


class RecordingCapture:
    """Records calls, as `CudaCapture` captures them. A `Capture`."""

    def __init__(self) -> None:
        self._pool: WeakSet[Recording] = WeakSet()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        global current
        run()
        current = recording = Recording(self._pool)
        try:
            with _Refusing(), recording:
                result = run()
        finally:
            current = None

        def again() -> Tensor:
            recording.repeat()
            return result

        return again
