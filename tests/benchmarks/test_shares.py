"""The benchmark of shares of the machine, on the smallest hybrid model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import Result
from benchmarks.shares import COLUMNS, flops, main, read_of, state_bytes
from benchmarks.sizes import SHAPES


def test_tiny_model_has_shares(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    report = tmp_path / "report.json"
    main(
        ["--shape", "tiny-qwen3.5", "--kinds", "Q8_0", "--streams", "2", "--prompt", "16", "--answer", "4",
         "--turns", "1", "--folder", str(tmp_path), "--json", str(report)]
    )  # fmt: skip
    result = Result(path=report, **json.loads(report.read_text()))
    rows = {row[1]: dict(zip(COLUMNS, row, strict=True)) for row in result.rows}
    assert list(rows) == ["decode, 1", "decode, 2", "prompt of 16"]
    assert all(row["vlmserve, tokens/s"] > 0 for row in rows.values())
    assert rows["decode, 1"]["Of bandwidth"] >= 0
    assert rows["prompt of 16"]["Of torch.mm"] >= 0
    read, layers = read_of(tmp_path / "tiny-qwen3.5-Q8_0.gguf")
    size = (tmp_path / "tiny-qwen3.5-Q8_0.gguf").stat().st_size
    assert 0 < read < size
    config = SHAPES["tiny-qwen3.5"].text
    width, inner = config["hidden_size"], config["intermediate_size"]
    assert layers.count((inner, width)) >= 2 * config["num_hidden_layers"]
    assert flops(layers, 2) == 4 * sum(n * k for n, k in layers)


def test_states_are_read_and_written() -> None:
    layers, heads, size = 18, 16, 128
    assert state_bytes(SHAPES["qwen3.5-2b"].text) == 2 * 4 * layers * heads * size * size
    assert state_bytes(SHAPES["llama-1b"].text) == 0
