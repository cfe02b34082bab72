"""The benchmark of photos and documents asks a server, and reports each case."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.photos import main


def test_cases_are_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    main(["--model", "pixie", "--pages", "2", "--json", str(report), "--", "--engine", "mock"])
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) == 11
    assert all(row[1] > 0 for row in rows)
    users = [row[0].removeprefix("four users with a photo each, ") for row in rows if row[0].startswith("four users")]
    assert users == ["number 1", "number 2", "number 3", "number 4"]
    assert [row[0] for row in rows if row[2] is not None] == ["photo beside a stream", "PDF of 2 pages beside a stream"]
