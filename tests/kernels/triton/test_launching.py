"""Which launches take what was compiled for another one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlmserve.kernels.triton import launching
from vlmserve.kernels.triton.launching import Kernel


class Jit:
    """What `triton.jit` makes, of a kernel with a pointer, two numbers, of which Triton knows the first, and two
    constants. compiled: for what, in order; launched: by what was compiled, with what."""

    arg_names = ("x_ptr", "size", "rows", "BLOCK", "DEPENDENT")

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.launched: list[tuple[int, tuple[Any, ...]]] = []
        self.params = [
            SimpleNamespace(name=name, do_not_specialize=name == "rows", has_default=name == "DEPENDENT", default=False)
            for name in self.arg_names
        ]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **constants: Any) -> Any:
            number = len(self.compiled)
            self.compiled.append(constants)

            def run(x: int, y: int, z: int, stream: int, *rest: Any) -> None:
                self.launched.append((number, (x, y, z, *rest[-5:])))

            return SimpleNamespace(run=run, function=None, packed_metadata=None)

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launching, "JITFunction", Jit)
    monkeypatch.setattr(Kernel, "overlaps", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    active = SimpleNamespace(get_current_stream=lambda device: 0)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))
    return Kernel(Jit())


def launches(kernel: Kernel, *all_arguments: tuple[Any, ...], **constants: Any) -> int:
    """How often something is compiled for them."""
    before = len(kernel.function.compiled)
    for arguments in all_arguments:
        kernel[(4,)](*arguments, **{"BLOCK": 8, "num_warps": 4, **constants})
    return len(kernel.function.compiled) - before


def test_equal_argument_kinds_share_a_binary(kernel: Kernel) -> None:
    x, other = torch.zeros(8), torch.ones(16)
    assert launches(kernel, (x, 32, 5), (other, 64, 1), (other, 160, 16)) == 1
    assert kernel.function.launched == [
        (0, (4, 1, 1, other, 64, 1, 8, False)),
        (0, (4, 1, 1, other, 160, 16, 8, False)),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.zeros(8, dtype=torch.float16), 32, 5),
        (torch.zeros(9)[1:], 32, 5),
        (torch.zeros(8), 33, 5),
        (torch.zeros(8), 1, 5),
        (torch.zeros(8), 2**31, 5),
        (torch.zeros(8), 32, 2**31),
        (torch.zeros(8), 0.5, 5),
    ],
    ids=["type", "unaligned", "no multiple of 16", "one", "64 bits", "64 bits of any number", "float"],
)
def test_other_kinds_of_arguments_are_compiled_for(kernel: Kernel, arguments: tuple[Any, ...]) -> None:
    launches(kernel, (torch.zeros(8), 32, 5))
    assert launches(kernel, arguments, arguments) == 1


def test_other_constants_options_and_devices_are_compiled_for(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (torch.zeros(8), 32, 5)
    launches(kernel, arguments)
    assert launches(kernel, arguments, arguments, BLOCK=16) == 1
    assert launches(kernel, arguments, arguments, num_warps=8) == 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert launches(kernel, arguments, arguments) == 1


def test_kernels_that_overlap_are_compiled_for_that(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (torch.zeros(8), 32, 5)
    launches(kernel, arguments)
    monkeypatch.setattr(Kernel, "overlaps", True)
    assert launches(kernel, arguments, arguments) == 1
    assert kernel.function.compiled[-1] == {"BLOCK": 8, "num_warps": 4, "DEPENDENT": True, "launch_pdl": True}
    assert kernel.function.launched[-1][1][-1] is True
