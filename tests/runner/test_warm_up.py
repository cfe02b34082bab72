"""First steps at start, on a device that captures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.checkpoints import make_llama
from tests.engine.test_structured import engine_of
from tests.native import built
from vlmserve.devices import cpu
from vlmserve.devices.cpu import ProgramExecutor
from vlmserve.devices.device import LayerStack
from vlmserve.server.run import ready_line
from vlmserve.steps import SchedulerOutput
from vlmserve.types import ModelInfo


@built
@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_start_runs_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    recorded = []
    record = cpu.record
    monkeypatch.setattr(cpu, "record", lambda *args: recorded.append(args) or record(*args))
    engine = engine_of(make_llama(tmp_path), max_warm_up_seconds=seconds, kernels="native")
    assert bool(recorded) == (seconds > 0)
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().steps == 0
    assert engine.runner.submit(SchedulerOutput()).result() is not None


@built
def test_first_steps_have_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    run = ProgramExecutor.run

    def note(self: ProgramExecutor, layers: LayerStack, x: Tensor, *others: Any) -> Tensor:
        rows.append(len(x))
        return run(self, layers, x, *others)

    monkeypatch.setattr(ProgramExecutor, "run", note)
    engine_of(make_llama(tmp_path), max_warm_up_seconds=10.0, kernels="native")
    assert sorted(rows) == [1, 2]


def test_ready_line_says_what_was_loaded() -> None:
    info = ModelInfo(
        "tiny", "llava", 128, 100, "bfloat16", "cpu", 2 * 10**9, 127, 1000, True,
        kv_cache_tokens=123456, weight_bytes=1_250_000_000,
    )  # fmt: skip
    assert ready_line("http://127.0.0.1:8000", "tiny", info) == (
        "vlmserve is ready: http://127.0.0.1:8000 (model tiny, cpu, bfloat16, weights 1.25 GB at 5.0 bits, "
        "KV cache 123,456 tokens)"
    )
