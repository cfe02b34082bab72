"""The benchmark of the gated delta rule relates each figure to what it is measured with."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.delta import main
from tests.native import built


@built
def test_delta_is_compared_with_torch(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    sizes = ["--streams", "1", "--prompts", "64", "--state-bytes", str(2**21), "--turns", "1"]
    main([*sizes, "--json", str(path)])
    report = json.loads(path.read_text())
    decode, prefill = (dict(zip(report["columns"], row, strict=True)) for row in report["rows"])
    assert (decode["work"], decode["rows"]) == ("decode", 1)
    assert decode["of bandwidth"] > 0
    assert (prefill["work"], prefill["rows"]) == ("prefill", 64)
    assert prefill["of torch.bmm"] > 0
    assert prefill["of torch"] > 0
