"""Cores that may be used, who gets them, and how long threads that wait keep theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vlmserve import cores
from vlmserve.cgroups import ControlGroups
from vlmserve.cores import bound_spinning, engine_threads, media_threads, spinning_is_bounded, usable_cores
from vlmserve.engine.loading import load, set_threads
from vlmserve.settings.config import EngineConfig, MediaConfig


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def limit(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(content)


def group(tmp_path: Path, line: str) -> Path:
    (tmp_path / "cgroup").write_text(line)
    return tmp_path / "cgroup"


def test_without_limits_all_bound_cores_count(tmp_path: Path) -> None:
    assert usable_cores(ControlGroups(tmp_path, tmp_path / "none")) == 8


@pytest.mark.parametrize(("quota", "expected"), [("200000 100000", 2), ("250000 100000", 3), ("max 100000", 8)])
def test_cgroup_2_limits_memory(tmp_path: Path, quota: str, expected: int) -> None:
    limit(tmp_path, cpu_max=quota)
    assert usable_cores(ControlGroups(tmp_path, group(tmp_path, "0::/\n"))) == expected


def test_a_limit_of_an_outer_group_holds(tmp_path: Path) -> None:
    limit(tmp_path / "outer", cpu_max="300000 100000\n")
    limit(tmp_path / "outer" / "inner", cpu_max="max 100000\n")
    assert usable_cores(ControlGroups(tmp_path, group(tmp_path, "0::/outer/inner\n"))) == 3


@pytest.mark.parametrize(("quota", "expected"), [("150000", 2), ("-1", 8)])
def test_version_1(tmp_path: Path, quota: str, expected: int) -> None:
    limit(tmp_path / "cpu" / "docker" / "x")
    (tmp_path / "cpu" / "docker" / "x" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "docker" / "x" / "cpu.cfs_period_us").write_text("100000\n")
    assert (
        usable_cores(ControlGroups(tmp_path, group(tmp_path, "4:memory:/docker/y\n3:cpu,cpuacct:/docker/x\n")))
        == expected
    )


@pytest.mark.parametrize(
    ("logical", "threads_per_core", "expected"), [(1, 1, 1), (2, 2, 2), (4, 1, 4), (8, 1, 7), (16, 2, 8), (64, 1, 60)]
)
def test_the_engine_leaves_cores_where_there_are_many(logical: int, threads_per_core: int, expected: int) -> None:
    assert engine_threads(logical, threads_per_core) == expected


@pytest.mark.parametrize(("logical", "expected"), [(1, 2), (2, 2), (32, 4), (64, 8), (256, 8)])
def test_images_get_few(logical: int, expected: int) -> None:
    assert media_threads(logical) == expected
    assert MediaConfig(num_workers=5).threads == 5


def test_the_engine_takes_available_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        monkeypatch.setattr("vlmserve.engine.loading.engine_threads", lambda: 3)
        load(EngineConfig())
        assert torch.get_num_threads() == 3
        monkeypatch.setattr("vlmserve.engine.loading.engine_threads", lambda: 5)
        load(EngineConfig())
        assert torch.get_num_threads() == 3, "fewer that somebody set stay"
        monkeypatch.setenv("OMP_NUM_THREADS", "6")
        torch.set_num_threads(6)
        load(EngineConfig())
        assert torch.get_num_threads() == 6, "the environment's number stays"
        load(EngineConfig(num_threads=2))
        assert torch.get_num_threads() == 2
        for wanted, ranks, own in ((7, 2, 3), (1, 2, 1)):
            set_threads(wanted, ranks)
            assert torch.get_num_threads() == own, "ranks divide them"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, "2000"),
        ({"GOMP_SPINCOUNT": ""}, "2000"),
        ({"GOMP_SPINCOUNT": "300000"}, "2000"),
        ({"GOMP_SPINCOUNT": "30k"}, "2000"),
        ({"GOMP_SPINCOUNT": "infinite"}, "2000"),
        ({"GOMP_SPINCOUNT": " 100 "}, " 100 "),
        ({"GOMP_SPINCOUNT": "0"}, "0"),
        ({"OMP_WAIT_POLICY": "active"}, "2000"),
        ({"OMP_WAIT_POLICY": "Passive"}, None),
        ({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "9999"}, "2000"),
    ],
)
def test_spinning_is_bounded_whatever_the_environment_says(given: dict[str, str], spins: str | None) -> None:
    environment = dict(given)
    bound_spinning(environment)
    assert environment.get("GOMP_SPINCOUNT") == spins
    assert spinning_is_bounded(environment)


def test_what_the_caller_computes_with_spins_little() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    asking = {"OMP_DISPLAY_ENV": "verbose", "GOMP_SPINCOUNT": "infinite", "OMP_WAIT_POLICY": "active"}
    command = [sys.executable, "-c", "import vlmserve\nimport torch"]
    log = subprocess.run(
        command, env={**kept, **asking}, stderr=subprocess.PIPE, text=True, timeout=120, check=True
    ).stderr
    if "GOMP_SPINCOUNT" not in log:
        pytest.skip("torch does not use GNU OpenMP here")
    assert "GOMP_SPINCOUNT = '2000'" in log


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings another OpenMP along")
def test_a_torch_imported_first_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    before = torch.get_num_threads()
    try:
        load(EngineConfig(num_threads=1))
        assert caplog.text.count("imported before vlmserve") == 0, "one thread waits for nobody"
        load(EngineConfig(num_threads=2))
        assert caplog.text.count("imported before vlmserve") == 1
        monkeypatch.setenv("GOMP_SPINCOUNT", "2000")
        load(EngineConfig(num_threads=2))
        assert caplog.text.count("imported before vlmserve") == 1
    finally:
        torch.set_num_threads(before)
