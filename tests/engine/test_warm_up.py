"""Graphs that are captured at start, by the data flow of a GPU: see `tests.static_device`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console
from torch import Tensor

from tests.checkpoints import make_llama
from tests.engine.test_overlap import answers
from tests.engine.test_overlap import request as asked
from tests.engine.test_structured import engine_of, run
from tests.models.test_families import make
from tests.static_adapters import StaticLinearKernel
from tests.static_device import StaticAttention, StaticDevice, StaticDraw, static_devices  # noqa: F401
from vlmserve.devices.offload import STAGED_BYTES
from vlmserve.engine.engine import Engine
from vlmserve.kernels.adapters import LinearAdapters
from vlmserve.kernels.attention import BatchMetadata
from vlmserve.runner import warm_up


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def with_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("qwen"), "qwen3.5 with shared keys")


@pytest.fixture
def _warming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StaticDevice, "warms_up", True)
    monkeypatch.setattr(warm_up, "PROMPT_ROWS", (8, 16, 1024))


def warmed(folder: Path, **settings: object) -> Engine:
    return engine_of(folder, max_num_seqs=5, max_num_batched_tokens=64, max_model_len=64, **settings)


def captured(devices: list[StaticDevice]) -> int:
    return sum(executor.num_captured for executor in devices[-1].executors)


@pytest.mark.usefixtures("_warming")
def test_batches_of_decodes_are_captured_at_start(
    folder: Path,
    static_devices: list[StaticDevice],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    engine = warmed(folder)
    assert captured(static_devices) == 2 * len((1, 2, 4, 8)), "with split contexts and without"
    assert "capturing graphs of 4 batch sizes, up to 120 s" in caplog.text
    assert "warm-up: ran 14 of 14 steps" in caplog.text
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.usefixtures("_warming")
@pytest.mark.parametrize("model", ["folder", "with_states"])
@pytest.mark.parametrize("prompts", [False, True])
def test_warm_up_changes_no_answers(
    model: str,
    prompts: bool,
    request: pytest.FixtureRequest,
    static_devices: list[StaticDevice],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is captured after the start, unless prompts are."""
    path, requests = request.getfixturevalue(model), [asked("a"), asked("bb", 7, temperature=0), asked("ccc", 30)]
    monkeypatch.setattr(StaticDevice, "captures_repeats", prompts)
    # The test's attention has a graph for each width of block tables.
    engine = warmed(path, block_size=64)
    at_start = captured(static_devices)
    assert at_start == 8
    found = [answers(run(engine, requests)) for _ in range(2)]
    # Torch's kernels of states read on the host where chunks are cut.
    assert (captured(static_devices) > at_start) == (prompts and model == "folder")
    monkeypatch.setattr(StaticDevice, "warms_up", False)
    monkeypatch.setattr(StaticDevice, "captures_repeats", False)
    plain = warmed(path, enforce_eager=True)
    assert [answers(run(plain, requests)) for _ in range(2)] == found
    assert captured(static_devices) == 0


@pytest.mark.usefixtures("_warming")
def test_warm_up_changes_logits_and_adapts_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of penalties, and of adapters in prompts, although no adapter is loaded yet."""
    changed: list[int] = []
    adapted: list[int] = []
    launch, product = StaticDraw.launch, StaticLinearKernel.__call__

    def launched(self: StaticDraw, logits: Tensor, uploaded: Sequence[Tensor]) -> Tensor:
        changed.append(uploaded[5].shape[1])
        return launch(self, logits, uploaded)

    def counted(self: StaticLinearKernel, x: Tensor, *rest: Any) -> Tensor:
        adapted.extend(len(x) for one in rest if isinstance(one, LinearAdapters) and one.active)
        return product(self, x, *rest)

    monkeypatch.setattr(StaticDraw, "launch", launched)
    monkeypatch.setattr(StaticLinearKernel, "__call__", counted)
    warmed(folder, enable_lora=True)
    assert 16 in adapted, "no batch of decodes is as large"
    assert any(changed)


@pytest.mark.usefixtures("_warming")
@pytest.mark.parametrize("settings", [{"max_warm_up_seconds": 0}, {"enforce_eager": True}], ids=str)
def test_warm_up_can_be_disabled(
    folder: Path,
    static_devices: list[StaticDevice],  # noqa: F811
    settings: dict[str, object],
) -> None:
    warmed(folder, **settings)
    assert captured(static_devices) == 0


@pytest.mark.usefixtures("_warming")
def test_warm_up_ends_when_its_time_is_over(
    folder: Path,
    static_devices: list[StaticDevice],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    warmed(folder, max_warm_up_seconds=1e-9)
    assert captured(static_devices) == 2
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ["--max-warm-up-seconds gives it more time" in message for message in said] == [True]


@pytest.mark.usefixtures("_warming")
@pytest.mark.parametrize(
    ("settings", "later"),
    [
        ({}, lambda block: 0),
        ({"enforce_eager": True}, lambda block: 0),
        ({"enable_lora": True, "lora_memory": "5MiB"}, lambda block: 5 * 2**20),
        ({"kv_offload_memory": "9MiB"}, lambda block: 2 * (STAGED_BYTES // block) * block),
    ],
    ids=["graphs", "eager", "adapters", "offload"],
)
def test_cache_leaves_memory_for_what_comes_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], later: Callable[[int], int]
) -> None:
    """Splits and uploads are allocated before the measurement; graphs, adapters and copies of blocks after it."""
    lengths: list[int] = []
    uploaded: list[int] = []
    reserved: list[int] = []
    prepare = StaticAttention.prepare

    def prepared(self: StaticAttention, metadata: BatchMetadata, *rest: Any) -> Any:
        lengths.extend(metadata.host_context_lens[:-1])
        return prepare(self, metadata, *rest)

    def budget(self: StaticDevice, fraction: float, largest_step: Callable[[], None], others: int) -> int:
        largest_step()
        reserved.append(others)
        return 2**22

    def graph_bytes(self: StaticDevice, run: Callable[[], None]) -> int:
        run()
        return 1000

    monkeypatch.setattr(StaticAttention, "prepare", prepared)
    monkeypatch.setattr(StaticDevice, "cache_budget", budget)

    def upload(self: StaticDevice, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        uploaded.append(sum(array.nbytes for array in arrays))
        return plain_upload(self, arrays)

    plain_upload = StaticDevice.upload
    monkeypatch.setattr(StaticDevice, "graph_bytes", graph_bytes)
    monkeypatch.setattr(StaticDevice, "upload", upload)
    engine = warmed(folder, kv_cache_memory=None, **settings)
    assert lengths.count(64) >= 5, "a step of the longest contexts"
    assert uploaded[0] == max(uploaded)
    graphs = (5000 if "enable_lora" in settings else 1000) + 8 * engine.runner.model.language_model.hidden_size * 4
    graphs = 0 if "enforce_eager" in settings else graphs
    assert reserved == [graphs + later(engine.sizes.of_tokens.page)]


@pytest.mark.usefixtures("_warming")
def test_warm_up_draws_a_bar_on_terminals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, terminal = StringIO(), StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(rich.console, "Console", partial(rich.console.Console, file=drawn, force_terminal=True))
    warmed(folder)
    assert "warm-up" in drawn.getvalue()
    assert "100%" in drawn.getvalue()
