"""Kernels in Triton run on a GPU where there is one, and through Triton's interpreter on a CPU elsewhere."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

pytest.importorskip("triton", reason="triton is not installed: pip install triton (Linux only)", exc_type=ImportError)


@pytest.fixture(
    params=[
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(HAS_GPU, reason="there is a GPU: the same cases run there"),
            id="interpreter",
        ),
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")],
            id="gpu",
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other, and most of those for splits of decodes have nothing to do."""
    from triton import knobs

    from vlmserve.kernels.triton import attention

    if knobs.runtime.interpret:
        monkeypatch.setattr(attention, "multiprocessors", lambda device: 4)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Skip what the interpreter repeats for each launch and each operation: more than half of its time."""
    from triton import language
    from triton.runtime import interpreter

    call = interpreter.InterpretedFunction.__call__

    @functools.cache
    def languages(function: FunctionType) -> list[ModuleType]:
        seen = [one for one in function.__globals__.values() if inspect.ismodule(one)]
        return [one for one in seen if one in (language, language.core)]

    def call_replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        # It replaces the functions of Triton's language wherever one function calls another.
        ours = languages(self.fn)
        if ours and not any(language.core.is_builtin(one.load) for one in ours):
            return self.rewrite()(*args, **kwargs)
        return call(self, *args, **kwargs)

    core = language.core
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}

    def block_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(one.value if isinstance(one, core.constexpr) else one for one in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.__dict__
        self.__dict__.update(blocks[key], element_ty=element_ty)

    def tensor_once(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = {**self.__dict__, "handle": None}
        self.__dict__.update(tensors[type.name], handle=handle, type=type)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call_replaced)
        # Types and shapes of blocks are made for each operation.
        patch.setattr(core.block_type, "__init__", block_once)
        patch.setattr(core.tensor, "__init__", tensor_once)
        # Sums of int32 are computed in int64 again: nothing here is large enough to overflow.
        options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield
