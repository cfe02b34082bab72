"""The benchmark of published sizes, on the smallest ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.random_models import RANDOM_MODELS
from benchmarks.report import Result
from benchmarks.sizes import COLUMNS, SHAPES, Job, main, measure
from benchmarks.sizes_files import write_checkpoint, write_gguf


def test_tiny_model_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    main(
        ["--shapes", "tiny-vl", "--quantize", "int8", "--prompt-tokens", "16", "--answer-tokens", "4",
         "--photo-size", "64", "64", "--folder", str(tmp_path), "--json", str(report)]
    )  # fmt: skip
    result = Result(path=report, **json.loads(report.read_text()))
    (row,) = result.rows
    assert row[0] == "tiny-vl, vlmserve int8"
    assert len(row) == len(COLUMNS)
    assert all(figure > 0 for figure in row[1:])
    assert list(tmp_path.iterdir()) == [report], "checkpoints are removed"


def test_kept_files_are_measured_again(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = write_tiny(tmp_path, "tiny", "Q4_0").rename(tmp_path / "tiny-Q4_0.gguf")
    (tmp_path / "tiny").rename(tmp_path / "tiny-shapes")
    report, written = tmp_path / "report.json", file.stat().st_mtime_ns
    main(
        ["--shapes", "tiny", "--quantize", "--gguf", "Q4_0", "--prompt-tokens", "16", "--answer-tokens", "4",
         "--folder", str(tmp_path), "--keep", "--starts", "1", "--json", str(report)]
    )  # fmt: skip
    name, _, second, *_ = json.loads(report.read_text())["rows"][0]
    assert (name, second) == ("tiny, vlmserve Q4_0", None)
    assert file.stat().st_mtime_ns == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "tiny-Q4_0.gguf", "tiny-shapes"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tiny", "Q4_0"),
        ("tiny", "Q8_0"),
        ("tiny", "Q6_K"),
        ("tiny", "Q4_K_M"),
        ("tiny-gemma3", "Q4_K_M"),
        ("tiny-qwen3.5", "Q4_K_M"),
        ("tiny-qwen3-moe", "Q4_K_M"),
    ],
)
def test_gguf_file_of_a_shape_answers(tmp_path: Path, name: str, kind: str) -> None:
    pytest.importorskip("gguf")
    file = write_tiny(tmp_path, name, kind)
    figures = measure(Job("vlmserve", str(file), {"weights_cache_size": 0}, 2048, False, 16, 4, (64, 64)))
    assert figures["photo"] is None
    assert all(figures[name] > 0 for name in ("peak", "prompt", "decode", "users"))  # type: ignore[operator]


def write_tiny(folder: Path, name: str, kind: str) -> Path:
    """A GGUF file of a tiny shape, without weights of a checkpoint."""
    shape = SHAPES[name]
    text = {**shape.text, "hidden_size": 256, "intermediate_size": 256}
    write_checkpoint(folder / name, shape.model_class, text, None, RANDOM_MODELS["qwen3-vl"], with_weights=False)
    return write_gguf(folder / f"{name}.gguf", folder / name, kind)
