"""Memory that is free within the limits of the machine and its container."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from vlmserve.cgroups import ControlGroups
from vlmserve.memory import free_memory, num_killed, total_memory

GIB = 2**30


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(total=64 * GIB, available=60 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def container(folder: Path, line: str, group: str, **files: str) -> ControlGroups:
    (folder / "process").write_text(line)
    (folder / group).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / group / name).write_text(content)
    return ControlGroups(folder, folder / "process")


def test_machine_without_containers_has_all_its_memory(tmp_path: Path) -> None:
    groups = container(tmp_path, "0::/\n", ".")
    assert (free_memory(groups), total_memory(groups)) == (60 * GIB, 64 * GIB)


def test_cgroup_2_usage_leaves_out_page_cache(tmp_path: Path) -> None:
    stat = f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB // 2}\n"
    files = {"memory.max": f"{8 * GIB}\n", "memory.current": f"{4 * GIB}\n", "memory.stat": stat}
    groups = container(tmp_path, "0::/pod/x\n", "pod/x", **files)
    assert (free_memory(groups), total_memory(groups)) == (int(6.5 * GIB), 8 * GIB)


def test_limit_of_an_outer_group_holds(tmp_path: Path) -> None:
    container(tmp_path, "", "pod", **{"memory.max": f"{4 * GIB}", "memory.current": f"{GIB}"})
    groups = container(tmp_path, "0::/pod/x\n", "pod/x", **{"memory.max": "max", "memory.current": "0"})
    assert free_memory(groups) == 3 * GIB


@pytest.mark.parametrize(("limit", "free"), [(str(8 * GIB), 7 * GIB), ("9223372036854771712", 60 * GIB)])
def test_version_1(tmp_path: Path, limit: str, free: int) -> None:
    stat = f"inactive_file 0\ntotal_inactive_file {GIB}\n"
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": str(2 * GIB), "memory.stat": stat}
    groups = container(tmp_path, "5:memory:/docker/x\n4:cpu:/other\n", "memory/docker/x", **files)
    assert free_memory(groups) == free


def test_full_container_has_nothing_free(tmp_path: Path) -> None:
    files = {"memory.max": str(GIB), "memory.current": str(GIB + 4096)}
    assert free_memory(container(tmp_path, "0::/x\n", "x", **files)) == 0


def test_kills_in_the_container_are_counted(tmp_path: Path) -> None:
    groups = container(tmp_path, "0::/x\n", "x", **{"memory.events": "low 0\noom 3\noom_kill 1000000\n"})
    assert num_killed(groups) == 1_000_000
