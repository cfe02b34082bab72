"""What `vlmserve doctor` finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from tests.native import built
from vlmserve.cli import app
from vlmserve.kernels import choice, extension
from vlmserve.kernels.extension import COMPILE_HERE
from vlmserve.tools.doctor import examine, largest_models, mixtures


def texts(topic: str) -> list[str]:
    return [finding.text for finding in examine() if finding.topic == topic]


def test_every_topic_is_found() -> None:
    findings = {finding.topic: finding.text for finding in examine()}
    assert torch.__version__ in findings["torch"]
    assert f"{psutil.virtual_memory().total / 2**30:.1f} GiB" in findings["memory"]
    assert all(isa in findings["CPU kernels"] for isa in extension.supported_isas())
    assert "billion in int4" in findings["parameters"]
    assert {"vlmserve", "processor", "extras", "models", "downloads"} <= findings.keys()


def test_models_that_fit_leave_memory_for_the_cache() -> None:
    sizes = largest_models(16 * 10**9)
    assert sizes["bfloat16"] == pytest.approx(6.0)
    assert sizes["bfloat16"] < sizes["int8"] < sizes["int4"]


def test_short_names_show_the_widest_fitting_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(available=6 * 10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    wide, narrow, narrowest = texts("models")[0].split("; ")
    assert wide.startswith("that fit on the CPU: ")
    assert "smolvlm2:256m" in wide
    assert wide.endswith(" in bfloat16")
    assert "qwen3-vl:2b" in wide  # 4.3 of 4.5 GB
    assert "qwen2.5-vl:3b" in narrow
    assert "qwen3-vl:4b" in narrowest
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=10**8))
    assert texts("models")[0] == "that fit on the CPU: none"


@pytest.mark.parametrize(
    ("gigabytes", "expected"),
    [
        (16, "none fits the memory; gemma4:26b in int4 needs 23 GB"),
        (24, "that fit in int4 if other programs are closed: gemma4:26b (17.2 GB, 4 billion weights a token)"),
    ],
)
def test_experts_fit_laptops_in_four_bits(gigabytes: int, expected: str) -> None:
    assert mixtures(gigabytes * 10**9) == expected
    assert texts("experts") == [mixtures(psutil.virtual_memory().total)]


def test_missing_kernels_and_drivers_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "supported_isas", lambda: ())
    monkeypatch.setattr(extension, "supported_isas", lambda: ())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    problems = {finding.topic: finding.problem for finding in examine() if finding.problem}
    assert "C++ compiler" in problems["CPU kernels"]
    assert "CUDA build of torch" in problems["GPU"]
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "C++ compiler" in result.output


@built
def test_missing_best_kernels_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    [text] = texts("CPU kernels")
    monkeypatch.setattr(extension, "missing_isas", lambda: ("amx",))
    there = text.split("; not")[0]
    assert texts("CPU kernels") == [f"{there}; not needed and not compiled: amx (to compare them, {COMPILE_HERE})"]
    assert not [finding.problem for finding in examine() if finding.topic == "CPU kernels" and finding.problem]
    monkeypatch.setattr(extension, "lacks_best_isa", lambda: True)
    [problem] = [finding.problem for finding in examine() if finding.topic == "CPU kernels"]
    assert problem == f"amx, this processor's best, is not compiled; {COMPILE_HERE}"
    assert texts("CPU kernels") == [f"{there}; not compiled: amx"]


def test_gpus_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 * 2**30, 140 * 2**30))
    assert texts("GPU") == ["NVIDIA H200, compute capability 9.0, 140.0 GiB, 100.0 GiB of it free"]
    assert texts("parameters")[-1].startswith("on this GPU: 40.3 billion in bfloat16")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (16 * 10**9, 16 * 10**9))
    assert texts("parameters")[-1] == "on this GPU: 6.0 billion in bfloat16, 12.0 billion in int8, 19.2 billion in int4"
    wide, narrow = texts("models")[-1].split("; ")[:2]
    assert "qwen3-vl:4b" in wide
    assert "qwen3-vl:8b" in narrow  # 17.5 GB before it is quantized, which is never there at once


def test_an_unwritable_cache_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    [problem] = [finding.problem for finding in examine() if finding.topic == "downloads"]
    assert str(tmp_path) in problem


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert [finding["topic"] for finding in findings] == [finding.topic for finding in examine()]
