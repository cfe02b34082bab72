"""Launching compiled kernels with little work by the host.

For each launch, Triton binds and inspects all arguments, builds a key and looks up what it compiled. That takes the
host longer than a GPU takes for many kernels. Here the key has no more than what a compilation depends on. Hooks that
Triton has for launches are called at the first launch of each kind only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

ALIGNMENT = 16
"""Bytes. Triton compiles other code for addresses and numbers that are multiples of it."""


class Kernel:
    """A kernel that the host launches: ``kernel[grid](*arguments, **constants)``.

    grid: programs in one to three directions. arguments: in the order of the kernel's parameters. constants: the
    kernel's, which come behind its arguments, and options of Triton's compiler, always in the same order.

    overlaps: whether kernels with a constant `DEPENDENT` are launched before the one before them has ended; see
    `kernels.triton.dependent`.
    """

    overlaps: ClassVar[bool] = False

    def __init__(self, function: Any) -> None:
        """function: what `triton.jit` made."""
        self.function = function
        # What is interpreted is not compiled.
        self._is_compiled = isinstance(function, JITFunction)
        self._compiled: dict[Hashable, tuple[Any, list[Any]]] = {}
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
                self._compiled[key] = compiled, further
                return
            compiled, further = known
            x, y, z = (*grid, 1, 1)[:3]
            stream = torch._C._cuda_getCurrentRawStream(device)
            compiled.run(
                x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *further
            )

        return launch


def _kind(argument: Tensor | int | float) -> Hashable:
    """What Triton compiles other code for."""
    if isinstance(argument, Tensor):
        return argument.dtype if argument.data_ptr() % ALIGNMENT == 0 else (argument.dtype, "unaligned")
    if isinstance(argument, float):
        return float
    return (_width(argument), argument == 1, argument % ALIGNMENT == 0)


def _width(number: int) -> int:
    return 32 if -(2**31) <= number < 2**31 else 64
