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
