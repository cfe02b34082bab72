"""Every step writes each of its tokens once to each layer's cache, on `tests.static_device`.

Keys and values may be written twice, states of a layer may not.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from torch import Tensor

from tests import static_device
from tests.checkpoints import make_llama
from tests.engine.test_memory import limited
from tests.engine.test_overlap import request
from tests.engine.test_structured import engine_of, run
from tests.models.test_families import make
from tests.static_device import StaticDevice, static_devices  # noqa: F401
from vlmserve.engine.engine import Engine
from vlmserve.kernels import torch_reference
from vlmserve.kernels.attention import LayerCache
from vlmserve.runner import warm_up
from vlmserve.runner.runner import ModelRunner, RunningStep
from vlmserve.steps import SchedulerOutput


class Writes:
    """How often steps write the rows of keys, by address."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.steps: list[tuple[int, Counter[int]]] = []
        """Tokens of requests, and what was written."""
        self.failing = ""
        """A request that runs out of memory in steps of more tokens than `most`."""
        self.most = 0

    def write(self, cache: LayerCache, which: int, new: Tensor, rows: Tensor) -> None:
        """Count rows, except those of the padding block."""
        row_bytes = cache.keys[0, 0, 0].nbytes
        padding = (len(cache.keys) - 1) * cache.keys[0].nbytes // row_bytes
        if which == 0:
            self.counts.update(cache.keys.data_ptr() + row * row_bytes for row in rows.tolist() if row < padding)

    def end(self, step: SchedulerOutput) -> None:
        tokens = {one.request_id: one.num_tokens for one in step.requests if not one.request_id.startswith("warm-up")}
        if sum(tokens.values()) > self.most:
            tokens.pop(self.failing, None)
        self.steps.append((sum(tokens.values()), self.counts))
        self.counts = Counter()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    found, write, submit = Writes(), torch_reference.write, ModelRunner.submit

    def counted(cache: LayerCache, which: int, new: Tensor, rows: Tensor) -> Tensor:
        found.write(cache, which, new, rows)
        return write(cache, which, new, rows)

    def submitted(self: ModelRunner, step: SchedulerOutput) -> RunningStep:
        running = submit(self, step)
        found.end(step)
        return running

    for module in (torch_reference, static_device):
        monkeypatch.setattr(module, "write", counted)
    monkeypatch.setattr(ModelRunner, "submit", submitted)
    monkeypatch.setattr(StaticDevice, "warms_up", True)
    monkeypatch.setattr(warm_up, "PROMPT_ROWS", (8, 16))
    return found


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 has several block tables."""
    path = tmp_path_factory.mktemp(request.param)
    return make_llama(path) if request.param == "llama" else make(path, request.param)


def check(engine: Engine, writes: Writes) -> None:
    heads = sum(layer.num_kv_heads for layer in engine.runner.model.language_model.spec.attention)
    for tokens, counts in writes.steps:
        assert set(counts.values()) <= {1}
        assert len(counts) == tokens * heads
    assert sum(tokens for tokens, _ in writes.steps) > 0


def test_captures_and_replays_apply_steps_once(
    folder: Path,
    writes: Writes,
    static_devices: list[StaticDevice],  # noqa: F811
) -> None:
    engine = engine_of(folder, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64)
    for _ in range(3):
        run(engine, [request("a", 9), request("bb", 20), request("ccc", 5)])
    assert sum(executor.num_captured for executor in static_devices[-1].executors) > 2, "more than at start"
    check(engine, writes)


def test_out_of_memory_applies_steps_once(folder: Path, writes: Writes, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder, max_num_seqs=4, max_model_len=128)
    writes.failing, writes.most = "ccc", 40
    limited(monkeypatch, writes.most)
    outputs = run(engine, [request("a"), request("bb", 9), request("ccc", 100)])
    assert "too little memory" in str(outputs["ccc"][-1].error)
    check(engine, writes)
