"""The benchmark of skipped layers on a tiny shape."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.skipped_layers import COLUMNS, SHAPES, main

TINY = {
    **SHAPES["gemma4:e2b"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
}


def test_skipped_layers_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    main(["--turns", "1", "--tokens", "40", "--json", str(path)], {"tiny": TINY})
    report = json.loads(path.read_text())
    assert report["columns"] == list(COLUMNS)
    [row] = report["rows"]
    assert row[:2] == ["tiny", 40]
    assert row[3] > 0
