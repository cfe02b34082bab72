"""The benchmark of adapters measures what it is asked to."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.adapters import main


def test_engines_are_compared_with_and_without_adapters(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    main(
        ["--adapters", "2", "--streams", "3", "--steps", "3", "--turns", "2", "--prompt", "20", "--rank", "4",
         "--json", str(report)]
    )  # fmt: skip
    rows = json.loads(report.read_text())["rows"]
    kinds = {(row["work"], row["what"]) for row in rows}
    assert {("1 stream", "1 adapter"), ("3 streams", "2 adapters"), ("prompt of 20", "1 adapter")} <= kinds
    assert {work for work, what in kinds if what == "X-LoRA"} == {"1 stream", "3 streams", "prompt of 20"}
    assert len(rows) == 12
    assert all(row["speed"] > 0 and row["ms"] > 0 for row in rows)
