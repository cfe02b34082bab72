"""The benchmark of long contexts measures what it is asked to."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.context import main


def test_contexts_are_compared_with_the_shortest(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    main(
        ["--model", "pixie", "--lengths", "20", "40", "--at-once", "1", "3", "--most", "100", "--steps", "2",
         "--kv-cache-memory", "16MiB", "--json", str(report)]
    )  # fmt: skip
    rows = json.loads(report.read_text())["rows"]
    assert [(row["at_once"], row["length"]) for row in rows] == [(1, 20), (1, 40), (3, 20)]
    assert rows[0]["of_shortest"] == rows[2]["of_shortest"] == 1
    assert rows[1]["of_shortest"] == rows[0]["ms"] / rows[1]["ms"]
    assert all(row["ms"] > 0 for row in rows)


def test_types_of_the_kv_cache_take_turns(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    main(
        ["--model", "pixie", "--lengths", "20", "40", "--at-once", "1", "--steps", "2", "--turns", "2",
         "--kv-cache-dtype", "auto", "int8", "--kv-cache-memory", "16MiB", "--json", str(report)]
    )  # fmt: skip
    rows = {(row["kv_cache_dtype"], row["length"]): row for row in json.loads(report.read_text())["rows"]}
    assert sorted(rows) == [("auto", 20), ("auto", 40), ("int8", 20), ("int8", 40)]
    assert all(
        rows[kind, 40]["of_shortest"] == rows[kind, 20]["ms"] / rows[kind, 40]["ms"] for kind in ("auto", "int8")
    )
