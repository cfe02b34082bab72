"""Counts of what should not be there: each may only fall.

A file of counts maps a name to a count, or to `{"count": ..., "reason": ...}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def check(
    path: Path, counted: Mapping[str, int], limit: Callable[[str], int] = lambda name: 0, problems: Iterable[str] = ()
) -> int:
    """Print which counts are higher than the file allows, and return the exit code. `--accept` stores lower counts.

    limit: what is allowed for a name that is not in the file. problems: other lines to print.
    """
    allowed: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if "--accept" in sys.argv[1:]:
        path.write_text(json.dumps(lower(allowed, counted), indent=2, sort_keys=True) + "\n", "utf-8")
        return 0
    limits = {name: count_of(allowed[name]) if name in allowed else limit(name) for name in counted}
    lines = [f"{name}: {count}, {limits[name]} allowed" for name, count in counted.items() if count > limits[name]]
    for line in (*lines, *problems):
        print(line, file=sys.stderr)
    return 1 if lines or problems else 0


def lower(allowed: Mapping[str, Any], counted: Mapping[str, int]) -> dict[str, Any]:
    """The allowed counts, as low as the counted ones, without names that are not counted."""
    kept: dict[str, Any] = {}
    for name, entry in allowed.items():
        if name in counted:
            count = min(count_of(entry), counted[name])
            kept[name] = {**entry, "count": count} if isinstance(entry, dict) else count
    return kept


def count_of(entry: Any) -> int:
    return int(entry["count"] if isinstance(entry, dict) else entry)
