"""transformers' video processor of GLM-4.6V: what of it needs no torchvision, which its module asks for."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.module_stubs import replaced_modules

_MODULES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


@functools.cache
def module() -> Any:
    stubs = {name: ModuleType(name) for name in _MODULES}
    stubs[_MODULES[-1]].functional = ModuleType("functional")  # type: ignore[attr-defined]
    with replaced_modules(stubs):
        return importlib.import_module("transformers.models.glm46v.video_processing_glm46v")


def smart_resize() -> Callable[..., tuple[int, int]]:
    """The function that chooses the height and width of a video's frames."""
    return module().smart_resize  # type: ignore[no-any-return]
