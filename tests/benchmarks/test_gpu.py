"""The GPU benchmark, its stages in small on a CPU."""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_decode, gpu_images, gpu_pieces, gpu_stages
from vlmserve.families.registry import decoder_spec
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models.registry import Description

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--json", str(tmp_path / "report.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_report_is_written_after_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "report.json"
    written = []
    run_stage = gpu.run_stage

    def noted(name: str, arguments: list[str], limit: float) -> dict[str, object]:
        written.append(list(json.loads(output.read_text())["stages"]) if output.exists() else None)
        return run_stage(name, arguments, limit)

    monkeypatch.setattr(gpu, "run_stage", noted)
    monkeypatch.setattr(gpu, "LIMITS", {**gpu.LIMITS, "bandwidth": 600, "decode": 0.01})
    arguments = ["--device", "cpu", "--tiny", "--json", str(output), "--stages", "decode", "bandwidth"]
    assert gpu.main(arguments) == 1, "a stage that took too long has failed, and the next one runs"
    report = json.loads(output.read_text())
    assert written == [None, ["decode"]]
    assert report["device"] == "cpu"
    assert report["stages"]["bandwidth"]["copy_gb_s"] > 0
    assert report["stages"]["decode"]["error"] == "took longer than 0.01 s"
    assert {row["measured"] for row in report["targets"]} == {"not measured"}


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("kill -s SEGV $$", "ended by SIGSEGV"),
        ("exit 3", "ended with 3"),
        ("sleep 1000 & echo $!; wait", "took longer than 1 s"),
    ],
)
def test_failed_stage_keeps_its_measurements(end: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(name: str, result: Path, arguments: list[str]) -> list[str]:
        # A shell starts within a second even on a busy machine.
        measured = f"echo '{{\"copy_gb_s\": 1}}' > {shlex.quote(str(result))}; echo '[bold]lost[/]'"
        return ["sh", "-c", f"{measured}; {end}"]

    monkeypatch.setattr(gpu, "command_of", command)
    report = gpu.run_stage("bandwidth", [], 1 if "longer" in error else 60)
    assert (report["copy_gb_s"], report["error"]) == (1, error)
    first, *others = report["output"].splitlines()
    assert first == "[bold]lost[/]"
    if "longer" in error:
        assert ends(int(others[0])), "what the stage has started still runs"


def ends(pid: int) -> bool:
    """Wait up to a minute for a process of anyone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 60)[0])
    finally:
        os.close(descriptor)


def test_what_was_measured_before_an_error_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> gpu_stages.Measured:
        yield "first", 1
        raise torch.OutOfMemoryError

    monkeypatch.setitem(gpu.MEASURES, "trace", fails)
    with pytest.raises(torch.OutOfMemoryError):
        gpu.measure("trace", CPU, gpu_stages.TINY, tmp_path, tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text()) == {"first": 1}


def test_checks_use_every_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def started(command: list[str], **_: object) -> None:
        commands.append(command)
        raise InterruptedError

    monkeypatch.setattr(gpu_stages.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(gpu_stages.subprocess, "Popen", started)
    with pytest.raises(InterruptedError):
        next(gpu_stages.checks(torch.device("cuda"), gpu_stages.TINY, tmp_path))
    assert commands[0][commands[0].index("-n") + 1] == "16"


def test_gpu_tests_start_without_unneeded_plugins(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): pass")
    settings = ["-c", "pyproject.toml", "--noconftest", "-p", "no:asyncio", "-p", "no:schemathesis"]
    run = subprocess.run(
        [*gpu_stages.pytest_command(), *settings, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed" in run.stdout


def test_attention_reads_contexts(tmp_path: Path) -> None:
    assert dict(gpu_stages.attention(CPU, gpu_stages.TINY, tmp_path))["1 x 32"]["read_gb_s"] > 0


def test_products_have_all_shapes_kinds_and_rows(tmp_path: Path) -> None:
    report = dict(gpu_stages.products(CPU, gpu_stages.TINY, tmp_path))
    assert len(report) == 1 + 4 * (3 * 2 + 1), "groups of 32 for one row alone"
    assert all(figures["by"] for name, figures in report.items() if name != "kernels")
    # Of 8 bits, a byte a weight and four for each output's scale, at least.
    four, eight = (report[f"gate and up, {kind}, 1 rows"] for kind in ("int4", "int8"))
    assert eight["weight_gb_s"] * eight["microseconds"] > four["weight_gb_s"] * four["microseconds"] > 0


def test_decodes_go_through_the_runner(tmp_path: Path) -> None:
    report = dict(gpu_decode.decode(CPU, gpu_stages.TINY, tmp_path))
    assert set(report) == {
        f"{scheme}, {streams}" for scheme in ("none", "int4") for streams in
        (*(f"1 streams{how}" for how in gpu_decode.DECODES), "4 streams", "1 streams, LoRA")
    }  # fmt: skip
    for figures in report.values():
        assert figures["tokens_s"] > 0
        assert figures["tokens_s_one_ahead"] > 0
        assert figures["device_ms"] > 0
    assert report["int4, 1 streams"]["first_token_ms"] > 0
    assert report["int4, 1 streams"]["work"]["gb"] < report["none, 1 streams"]["work"]["gb"]


def test_images_go_through_towers_and_decoders(tmp_path: Path) -> None:
    report = dict(gpu_images.images(CPU, gpu_stages.TINY, tmp_path))
    assert {name: figures["embeddings"] for name, figures in report.items()} == {
        "LLaVA-1.5-7B": 16, "LLaVA-1.5-7B, 4 bits": 16, "Qwen2.5-VL-7B": 25, "Qwen2.5-VL-7B, page": 100,
        "Qwen2.5-VL-7B, 4 bits": 25,
    }  # fmt: skip
    assert min(figures[look] for figures in report.values() for look in ("first_look_ms", "second_look_ms")) > 0
    for figures in (report["LLaVA-1.5-7B"], report["Qwen2.5-VL-7B"]):
        works = [figures.pop("work_1"), figures.pop("work_8")]
        assert min(figures.values()) > 0
        for part in ("tower", "prompt"):
            assert works[1][part]["tflop"] == pytest.approx(8 * works[0][part]["tflop"])


def test_published_shapes_are_those_of_the_models() -> None:
    """Without their memory."""
    counts = {}
    for name, (config, _) in gpu_images.SHAPES.items():
        description = Description.of(Path(), config)
        spec, backend = decoder_spec(description.text_config), TorchReference()
        parts = description.build(spec, backend, dtype=torch.bfloat16, device=torch.device("meta"))
        counts[name] = round(sum(parameter.numel() for parameter in parts.modules.parameters()) / 1e9, 1)
    assert counts == {"LLaVA-1.5-7B": 7.1, "Qwen2.5-VL-7B": 8.3}


def test_a_trace_is_a_file_of_events(tmp_path: Path) -> None:
    report = dict(gpu_decode.trace(CPU, gpu_stages.TINY, tmp_path))
    assert len(json.loads(Path(report["trace"]).read_text())["traceEvents"]) > 10


def test_prompts_are_measured_with_graphs_and_without(tmp_path: Path) -> None:
    report = dict(gpu_decode.prompts(CPU, gpu_stages.TINY, tmp_path))
    plain = {name for name in report if "captured" not in name}
    assert report.keys() == plain | {f"{name}, captured" for name in plain}
    assert "4 streams, prompt of 40" in plain
    assert all(min(one["alone_ms"] + one["beside_ms"]) > 0 for one in report.values())


def test_all_stages_take_at_most_nine_minutes() -> None:
    assert sum(gpu.LIMITS.values()) <= 540
    assert list(gpu.LIMITS) == list(gpu.MEASURES)


def test_pieces_are_measured_one_by_one(tmp_path: Path) -> None:
    report = dict(gpu_pieces.pieces(CPU, gpu_stages.TINY, tmp_path))
    assert set(report) == {"pixels", "tower", "tiles", "offload", "chunks", "products"}
    assert all(number > 0 for piece in report.values() for number in piece.values())


def test_paging_is_measured_through_an_engine(tmp_path: Path) -> None:
    report = dict(gpu_stages.memory(CPU, gpu_stages.TINY, tmp_path))
    assert 0 < report["paged"] < report["contiguous"]
    assert report["requests"]["requests"] == 64
