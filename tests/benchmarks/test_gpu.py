"""The GPU benchmark, its stages in small on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_images, gpu_pieces, gpu_stages
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models.families import decoder_spec
from vlmserve.models.registry import Description, vision_family

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--json", str(tmp_path / "report.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_stages_are_processes_and_the_report_is_written_after_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "report.json"
    written = []
    run_stage = gpu.run_stage

    def noted(name: str, arguments: list[str], limit: float) -> dict[str, object]:
        written.append(list(json.loads(output.read_text())["stages"]) if output.exists() else None)
        return run_stage(name, arguments, limit)

    monkeypatch.setattr(gpu, "run_stage", noted)
    monkeypatch.setitem(gpu.LIMITS, "decode", 0.01)
    arguments = ["--device", "cpu", "--tiny", "--json", str(output), "--stages", "bandwidth", "decode", "attention"]
    assert gpu.main(arguments) == 1, "a stage that took too long has failed"
    report = json.loads(output.read_text())
    assert written == [None, ["bandwidth"], ["bandwidth", "decode"]]
    assert report["device"] == "cpu"
    assert report["stages"]["bandwidth"]["copy_gb_s"] > 0
    assert report["stages"]["decode"] == {"error": "took longer than 0.01 s"}
    assert report["stages"]["attention"]["1 x 32"]["read_gb_s"] > 0


def test_products_have_all_shapes_kinds_and_rows(tmp_path: Path) -> None:
    report = gpu_stages.products(CPU, gpu_stages.TINY, tmp_path)
    assert len(report) == 1 + 4 * 3 * 2
    # Of 8 bits, a byte a weight and four for each output's scale, at least.
    four, eight = (report[f"gate and up, {kind}, 1 rows"] for kind in ("int4", "int8"))
    assert eight["weight_gb_s"] * eight["microseconds"] > four["weight_gb_s"] * four["microseconds"] > 0


def test_decodes_go_through_the_runner(tmp_path: Path) -> None:
    report = gpu_stages.decode(CPU, gpu_stages.TINY, tmp_path)
    assert set(report) == {
        f"{scheme}, {streams}" for scheme in ("none", "int4") for streams in
        ("1 streams, layer by layer", "1 streams", "4 streams")
    }  # fmt: skip
    for figures in report.values():
        assert figures["tokens_s"] > 0
        assert figures["tokens_s_one_ahead"] > 0
    assert report["int4, 1 streams"]["first_token_ms"] > 0


def test_images_go_through_towers_and_decoders(tmp_path: Path) -> None:
    report = gpu_images.images(CPU, gpu_stages.TINY, tmp_path)
    assert {name: figures["embeddings"] for name, figures in report.items()} == {
        "LLaVA-1.5-7B": 16, "Qwen2.5-VL-7B": 25
    }  # fmt: skip
    for figures in report.values():
        assert min(figures.values()) > 0


def test_published_shapes_are_those_of_the_models() -> None:
    """Without their memory."""
    counts = {}
    for name, (config, _) in gpu_images.SHAPES.items():
        [architecture] = config["architectures"]
        family = vision_family(architecture, config)
        assert family is not None
        text_config = family.text_config(config)
        spec, backend = decoder_spec(text_config), TorchReference()
        description = Description(Path(), config, text_config, architecture)
        parts = description.build(spec, backend, dtype=torch.bfloat16, device=torch.device("meta"))
        counts[name] = round(sum(parameter.numel() for parameter in parts.modules.parameters()) / 1e9, 1)
    assert counts == {"LLaVA-1.5-7B": 7.1, "Qwen2.5-VL-7B": 8.3}


def test_a_trace_is_a_file_of_events(tmp_path: Path) -> None:
    report = gpu_stages.trace(CPU, gpu_stages.TINY, tmp_path)
    assert len(json.loads(Path(report["trace"]).read_text())["traceEvents"]) > 10


def test_all_stages_take_at_most_nine_minutes() -> None:
    assert sum(gpu.LIMITS.values()) <= 540
    assert list(gpu.LIMITS) == list(gpu.MEASURES)


def test_pieces_are_measured_one_by_one(tmp_path: Path) -> None:
    report = gpu_pieces.pieces(CPU, gpu_stages.TINY, tmp_path)
    assert set(report) == {"pixels", "tower", "offload", "chunks", "products"}
    assert all(number > 0 for piece in report.values() for number in piece.values())
    assert sum(gpu.LIMITS.values()) <= 9 * 60
