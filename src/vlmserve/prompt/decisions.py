"""The temperature of a checkpoint's decisions."""

from __future__ import annotations

import json
import math
from pathlib import Path

from vlmserve.errors import ModelLoadError
from vlmserve.prompt.files import read_json

DECISIONS = "decisions.json"
_DIGITS = 3


def read_temperature(folder: Path) -> float:
    """Return 1 without the file. Raises ModelLoadError for a broken file."""
    found = read_json(folder / DECISIONS).get("temperature", 1.0)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ModelLoadError(f"{folder / DECISIONS}: temperature is {found!r:.50}, not a positive number")
    return float(found)


def write_temperature(folder: Path, temperature: float) -> Path:
    """Raises OSError."""
    path = folder / DECISIONS
    path.write_text(json.dumps({"temperature": round(temperature, _DIGITS)}) + "\n", "utf-8")
    return path
