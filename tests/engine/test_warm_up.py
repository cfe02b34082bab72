"""Graphs that are captured at start, by the data flow of a GPU: see `tests.static_device`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_llama
from tests.engine.test_overlap import answers, request
from tests.engine.test_structured import engine_of, run
from tests.static_device import StaticDevice, static_devices  # noqa: F401
from vlmserve.engine.engine import Engine
from vlmserve.runner import warm_up


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


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
    assert captured(static_devices) == len((1, 2, 4, 8))
    assert "capturing graphs of 4 batch sizes, up to 120 s" in caplog.text
    assert "warm-up: ran 8 of 8 steps" in caplog.text
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.usefixtures("_warming")
def test_warm_up_changes_no_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request("a"), request("bb", 7, temperature=0), request("ccc", 30)]
    found = answers(run(warmed(folder), requests))
    monkeypatch.setattr(StaticDevice, "warms_up", False)
    assert answers(run(warmed(folder), requests)) == found


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
    assert captured(static_devices) == 1
    assert [record.levelname for record in caplog.records if "ran 1 of 8 steps" in record.getMessage()] == ["WARNING"]
