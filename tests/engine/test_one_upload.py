"""What a step of decodes asks of the host: one upload, and nothing that waits for the device before its tokens."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import vlmserve
from tests.adapters.test_serving import write_adapter
from tests.checkpoints import make_llama
from tests.engine.test_overlap import request
from tests.engine.test_structured import engine_of
from tests.static_device import StaticDevice, static_devices  # noqa: F401

WAITING = ("item", "tolist", "cpu", "numpy", "nonzero", "to", "__bool__", "__int__", "__float__", "__index__")
"""Methods of tensors that wait for a GPU, or copy to or from it by memory that is not pinned."""
SOURCE = str(Path(vlmserve.__file__).parent)
OF_THE_DEVICE = ("/kernels/torch_", "/devices/staging.py")
"""Modules that stand for kernels here, and the one that uploads."""


@pytest.mark.parametrize(
    ("sampling", "adapted"),
    [
        ({}, False),
        ({"top_p": 0.8, "temperature": 0.7}, False),
        ({"logit_bias": {3: 2.0}, "min_tokens": 40}, False),
        ({}, True),
    ],
)
def test_a_decode_step_takes_one_upload(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    static_devices: list[StaticDevice],  # noqa: F811
    sampling: dict[str, Any],
    adapted: bool,
) -> None:
    engine = engine_of(make_llama(tmp_path), enable_lora=adapted)
    for name in ("a", "bb", "ccc"):
        adapter = name if adapted and name != "a" else ""
        if adapter:
            engine.adapter_store.load(name, write_adapter(tmp_path / name, len(name)))
        engine.add(msgspec.structs.replace(request(name, max_tokens=50, **sampling), adapter=adapter))
    for _ in range(6):
        engine.step()
    counted: Counter[str] = Counter()
    submitting = False

    def watch(owner: Any, name: str, known: str | None = None) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            ours = caller.startswith(SOURCE) and not any(part in caller for part in OF_THE_DEVICE)
            if submitting and (ours or known):
                counted[known or name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for name in WAITING:
        watch(torch.Tensor, name)
    watch(StaticDevice, "upload", "an upload")
    watch(StaticDevice, "download", "a download")
    submit = engine.runner.submit

    def noted(step: Any) -> Any:
        nonlocal submitting
        submitting = True
        try:
            return submit(step)
        finally:
            submitting = False

    monkeypatch.setattr(engine.runner, "submit", noted)
    for _ in range(10):
        engine.step()
    assert counted == {"an upload": 10, "a download": 10}
