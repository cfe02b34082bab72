"""The benchmark of restarts kills a server that has stored its questions."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.restart import main


def test_later_server_gives_the_same_answers(tmp_path: Path) -> None:
    report, disk = tmp_path / "report.json", tmp_path / "disk"
    command = ["--model", "pixie", "--questions", "2", "--repeats", "1", "--kv-cache-memory", "16MiB"]
    main([*command, "--image-side", "64", "--disk", str(disk), "--json", str(report)])
    found = json.loads(report.read_text())
    assert [row[0] for row in found["rows"]] == ["cold", "after kill -9", "in memory"]
    assert all(row[1] > 0 for row in found["rows"])
    assert found["different"] == 0
    assert [*disk.glob("*.entry")]
