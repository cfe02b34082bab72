"""The benchmark of starts, on the smallest model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.loads import COLUMNS, main
from benchmarks.report import Result


def test_starts_of_a_tiny_model_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    report = tmp_path / "report.json"
    main(
        [
            "--shape",
            "tiny",
            "--kind",
            "Q8_0",
            "--turns",
            "1",
            "--folder",
            str(tmp_path / "files"),
            "--json",
            str(report),
        ]
    )
    result = Result(path=report, **json.loads(report.read_text()))
    rows = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in result.rows}
    assert {"vlmserve", "vlmserve, mapped"} <= rows.keys()
    assert all(row["seconds to ready"] > 0 for row in rows.values())
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == ["tiny-Q8_0.gguf", "tiny-shapes"]
