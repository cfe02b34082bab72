"""Kernels in Triton run on a GPU where there is one, and through Triton's interpreter on a CPU elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
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
        monkeypatch.setattr(attention, "PROGRAMS", 8)


@pytest.fixture(scope="session", autouse=True)
def language_patched_once() -> Iterator[None]:
    """The interpreter replaces the functions of Triton's language for each launch, and looks for them again wherever
    one function calls another, though they have been replaced: a third of the time that it takes."""
    from triton import language
    from triton.runtime import interpreter

    replace = interpreter._patch_lang

    def replace_once(function: FunctionType) -> Any:
        seen = [one for one in function.__globals__.values() if inspect.ismodule(one)]
        ours = [one for one in seen if one in (language, language.core)]
        if ours and not any(language.core.is_builtin(one.load) for one in ours):
            return interpreter._LangPatchScope()
        return replace(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        yield
