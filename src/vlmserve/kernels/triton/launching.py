"""Launches compiled kernels with little host work: Triton's own takes longer than many kernels run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ALIGNMENT = 16
"""Bytes. Triton specializes addresses and numbers that are multiples of it."""


class Kernel:
    """Called as ``kernel[grid](*arguments, **constants)``.

    arguments: in the order of the kernel's parameters. constants: of the kernel, then compiler options, always in the
    same order. overlaps: kernels with `DEPENDENT` use dependent launch. Triton's launch hooks run only at the first
    launch of each key.
    """

    overlaps: ClassVar[bool] = False

    def __init__(self, function: Any) -> None:
        self.function = function
        # the interpreter does not compile
        self._is_compiled = isinstance(function, JITFunction)
        self._compiled: dict[Hashable, tuple[Any, list[Any], Callable[[int], int]]] = {}
        parameters = function.params if self._is_compiled else []
        self._unspecialized = [index for index, one in enumerate(parameters) if one.do_not_specialize]
        self._defaults = {one.name: one.default for one in parameters if one.has_default}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if not self._is_compiled:
            return self.function[grid]  # type: ignore[no-any-return]

        def launch(*arguments: Any, **constants: Any) -> None:
            device = torch.cuda.current_device()
            if Kernel.overlaps and "DEPENDENT" in self._defaults:
                constants |= {"DEPENDENT": True, "launch_pdl": True}
            kinds = [_kind(argument) for argument in arguments]
            for index in self._unspecialized:
                kinds[index] = _width(arguments[index])
            key = (device, *kinds, *constants.values())
            known = self._compiled.get(key)
            if known is None:
                compiled = self.function[grid](*arguments, **constants)
                constants = {**self._defaults, **constants}
                further = [constants[name] for name in self.function.arg_names[len(arguments) :]]
                self._compiled[key] = compiled, further, driver.active.get_current_stream
                return
            compiled, further, stream_of = known
            x, y, z = (*grid, 1, 1)[:3]
            stream = stream_of(device)
            compiled.run(
                x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *further
            )

        return launch


def _kind(argument: Tensor | int | float) -> Hashable:
    """Triton specializes on these properties."""
    if isinstance(argument, Tensor):
        return argument.dtype if argument.data_ptr() % ALIGNMENT == 0 else (argument.dtype, "unaligned")
    if isinstance(argument, float):
        return float
    return (_width(argument), argument == 1, argument % ALIGNMENT == 0)


def _width(number: int) -> int:
    return 32 if -(2**31) <= number < 2**31 else 64
