"""Each token changes a sequence's state once, whatever runs twice, on `tests.static_device`.

A slot's counter has the number of tokens that its state has seen. A step that continues a state at another position
than its counter says has lost tokens, or applied some of them twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_drafts import proposing
from tests.engine.test_states import assert_same, engine, request, tokens
from tests.engine.test_structured import run
from tests.engine.test_structured import tokens as all_tokens
from tests.models.test_families import make
from tests.static_device import StaticDevice, static_devices  # noqa: F401
from vlmserve.kernels import torch_states
from vlmserve.kernels.states import StateRows
from vlmserve.layer_specs import NO_SLOT, PADDING_SLOT
from vlmserve.runner import warm_up
from vlmserve.runner.runner import ModelRunner, RunningStep
from vlmserve.steps import SchedulerOutput


class Counters:
    """Tokens that the slots of each layer have seen, by the address of the layer's tails."""

    def __init__(self) -> None:
        self.slots: dict[int, dict[int, int]] = {}
        self.num_read = 0
        """Segments that continue a sequence."""
        self.wrong: list[str] = []
        self.fails_after = 0
        """Rows of a layer's call after which memory runs out, in the middle of a step."""

    def advance(self, layer: int, rows: StateRows) -> None:
        """Count the rows of each sequence, except those of the padding slot."""
        slots = self.slots.setdefault(layer, {})
        starts, sources, targets, positions, _ = (one.tolist() for one in rows.tensors)
        drafts = [0] * len(sources) if rows.drafts is None else rows.drafts[:, 2].tolist()
        ends = [end - count for end, count in zip(starts[1:], drafts, strict=True)]
        for first, last, source, target, position in zip(starts, ends, sources, targets, positions, strict=False):
            if target == PADDING_SLOT:
                continue
            seen = 0 if source == NO_SLOT else slots[source]
            self.num_read += source != NO_SLOT
            if seen != position:
                self.wrong.append(f"slot {source} has seen {seen} tokens, and goes on after {position}")
            slots[target] = seen + last - first

    def copy(self, step: SchedulerOutput) -> None:
        for copied in step.state_copies:
            assert copied.kind == "copy"
            for slots in self.slots.values():
                slots[copied.target] = slots[copied.source]


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    found, convolve, submit = Counters(), torch_states.causal_convolution, ModelRunner.submit

    def counted(x: Tensor, weight: Tensor, tails: Tensor, rows: StateRows) -> Tensor:
        found.advance(tails.data_ptr(), rows)
        result = convolve(x, weight, tails, rows)
        if 0 < found.fails_after < len(x):
            raise torch.AcceleratorError("CUDA error: out of memory")
        return result

    def submitted(self: ModelRunner, step: SchedulerOutput) -> RunningStep:
        found.copy(step)
        return submit(self, step)

    monkeypatch.setattr(torch_states, "causal_convolution", counted)
    monkeypatch.setattr(ModelRunner, "submit", submitted)
    monkeypatch.setattr(StaticDevice, "warms_up", True)
    monkeypatch.setattr(warm_up, "PROMPT_ROWS", (8, 16))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("qwen"), "qwen3.5 with shared keys")


def asked(*lengths: int, **options: Any) -> list[Any]:
    return [request(str(length), tokens(length, length), **options) for length in lengths]


def test_captures_and_replays_advance_states_once(
    folder: Path,
    counters: Counters,
    static_devices: list[StaticDevice],  # noqa: F811
) -> None:
    engine_of_two = engine(folder, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128)
    assert not counters.num_read, "warm-up has no sequences"
    at_start = sum(executor.num_captured for executor in static_devices[-1].executors)
    assert at_start
    for _ in range(2):
        run(engine_of_two, asked(9, 70, 5))
    assert counters.wrong == []
    assert counters.num_read > 20
    assert engine_of_two.stats().prefix_cached_tokens, "checkpoints were read, too"


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_drafts_advance_states_once(folder: Path, counters: Counters, right: float) -> None:
    requests = asked(9, 70, 5, params={"max_tokens": 40, "ignore_eos": True})
    settings = {"kernels": "torch", "block_size": 4, "max_num_batched_tokens": 32}
    expected = run(engine(folder, **settings), requests)
    drafting = engine(folder, speculation="auto", **settings)
    answers = [one.prompt.token_ids + all_tokens(expected[one.request_id]) for one in requests]
    drafting.scheduler.propose_drafts = proposing(answers, right=right)
    for _ in range(2):
        assert_same(run(drafting, requests), expected)
    assert counters.wrong == []
    assert counters.num_read > 20


def test_out_of_memory_advances_states_once(
    folder: Path,
    counters: Counters,
    static_devices: list[StaticDevice],  # noqa: F811
) -> None:
    small = asked(3, 21, params={"max_tokens": 12})
    limits = {"max_num_seqs": 3, "max_model_len": 128}
    expected = run(engine(folder, enforce_eager=True, **limits), small)
    tight = engine(folder, **limits)
    outputs: dict[str, list[Any]] = {one.request_id: [] for one in small}
    for one in small:
        tight.add(one)
    for _ in range(4):
        for output in tight.step():
            outputs[output.request_id].append(output)
    counters.fails_after = 40
    outputs |= {"100": []}
    tight.add(asked(100)[0])
    while tight.has_work():
        for output in tight.step():
            outputs[output.request_id].append(output)
    assert "too little memory" in str(outputs.pop("100")[-1].error)
    assert_same(outputs, expected)
    assert counters.wrong == []
