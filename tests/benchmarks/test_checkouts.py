"""The benchmark of two checkouts gives both the same work."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.checkouts import MEASURES, ROOT, main


def test_a_checkout_equals_itself(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    main(
        [str(ROOT), "--tiny", "--concurrency", "1", "3", "--repeats", "1", "--prompt-lens", "4-8", "--answer-lens",
         "2-5", "--kv-cache-memory", "16MiB", "--json", str(report)]
    )  # fmt: skip
    rows = json.loads(report.read_text())["rows"]
    assert {(row[0], row[1]) for row in rows} == {(count, name) for count in (1, 3) for name in MEASURES}
    assert all(float(row[4]) > 0 for row in rows)
    assert all(row[5] == 1 for row in rows)
