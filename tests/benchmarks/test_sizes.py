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


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K_M"])
def test_gguf_file_of_a_shape_answers(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("gguf")
    shape = SHAPES["tiny"]
    text = {**shape.text, "hidden_size": 256, "intermediate_size": 256}
    write_checkpoint(tmp_path / "tiny", shape.model_class, text, None, RANDOM_MODELS["qwen3-vl"])
    file = write_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny", kind)
    figures = measure(Job("vlmserve", str(file), {"weights_cache_size": 0}, 2048, False, 16, 4, (64, 64)))
    assert figures["photo"] is None
    assert all(figures[name] > 0 for name in ("peak", "prompt", "decode", "users"))  # type: ignore[operator]
