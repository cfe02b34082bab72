"""The benchmark of experts relates each figure to what it is measured with."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.experts import main
from tests.native import built
from vlmserve.families.spec import ExpertsSpec


@built
def test_experts_are_compared_with_memory_and_torch(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    sizes = ["--rows", "1", "--prompts", "64", "--layers", "1", "--turns", "1"]
    main([*sizes, "--json", str(path)], ExpertsSpec(count=4, top_k=2, inner_size=64))
    report = json.loads(path.read_text())
    decode, prefill = (dict(zip(report["columns"], row, strict=True)) for row in report["rows"])
    assert (decode["work"], decode["rows"]) == ("decode", 1)
    assert decode["of bandwidth"] > 0
    assert (prefill["work"], prefill["rows"]) == ("prefill", 64)
    assert prefill["of torch.mm"] > 0
