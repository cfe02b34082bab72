"""Benchmarks of models that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_llama
from vlmserve.cli.bench import run_bench
from vlmserve.errors import ModelLoadError
from vlmserve.models import footprint as module
from vlmserve.models.footprint import LIBRARIES, footprint
from vlmserve.settings.config import EngineConfig


def test_schemes_that_do_not_fit_are_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "vocab_size": 4096, "dtype": torch.bfloat16}
    folder = make_llama(tmp_path, **sizes)
    monkeypatch.setattr(module, "SCRATCH", 0)  # more than these weights
    plain, int4 = (footprint(folder, scheme).loading for scheme in ("none", "int4"))
    assert int4 < plain
    monkeypatch.setattr(module, "free_memory", lambda: LIBRARIES + int4)
    monkeypatch.setattr("vlmserve.tools.bench.load", lambda *_: pytest.fail("the model was loaded"))
    config = EngineConfig(model=str(folder), device="cpu")
    with pytest.raises(ModelLoadError, match="with --scheme int4 it needs"):
        run_bench(config, ("int4", "none"), (1,), None, every=False, compare=False)
