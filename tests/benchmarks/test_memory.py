"""The memory benchmark counts what is there."""

from __future__ import annotations

import json

from benchmarks.memory import Row, main


def test_saving_is_relative_to_best_contiguous_cache():
    assert Row("", paged=30, whole_context=1000, longest_answer=100, transformers=120).saving == 0.7
    assert Row("", paged=30, whole_context=1000, longest_answer=100, transformers=60).saving == 0.5


def test_paging_counts_a_shared_prefix_once(tmp_path):
    report = tmp_path / "report.json"
    main(
        ["--tiny", "--requests", "8", "--prompt-lens", "8-64", "--answer-lens", "2-16", "--kv-cache-memory", "64MiB",
         "--dtype", "float32", "--json", str(report)]
    )  # fmt: skip
    mixed, shared = json.loads(report.read_text())["rows"]
    assert mixed["paged"] < mixed["transformers"] < mixed["whole_context"]
    extra = 64 * mixed["whole_context"] // (8 * 2048)
    assert shared["paged"] <= mixed["paged"] + extra + 8 * 16 * extra // 64, "the beginning of 64 tokens is there once"
    assert shared["transformers"] - mixed["transformers"] == 8 * extra
