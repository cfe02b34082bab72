#!/usr/bin/env python3
"""Run the tests, and those that fail once more, alone.

Each line that this writes to the given file names a test that passed only on its second try.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CACHE = Path(".pytest_cache/v")
"""Where pytest keeps what it remembers."""


def remembered(name: str) -> Any:
    """Return what pytest remembers under a name; [] if there is nothing."""
    path = CACHE / name
    return json.loads(path.read_text("utf-8")) if path.exists() else []


def main() -> int:
    report = Path(sys.argv[1])
    for name in ("cache/lastfailed", "vlmserve/died"):
        (CACHE / name).unlink(missing_ok=True)
    code = subprocess.run(["make", "test"]).returncode
    failed, died = set(remembered("cache/lastfailed")), set(remembered("vlmserve/died"))
    passed_later = died - failed
    if code:
        again = ["--last-failed", "--last-failed-no-failures", "none", "--maxfail", "3"]
        code = subprocess.run([sys.executable, "-m", "pytest", *again]).returncode
        passed_later |= failed - set(remembered("cache/lastfailed"))
    with report.open("a", encoding="utf-8") as lines:
        lines.writelines(f"{name}{' (its process died)' if name in died else ''}\n" for name in sorted(passed_later))
    return code


if __name__ == "__main__":
    sys.exit(main())
