"""Scripts of `.ci`."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / ".ci"


def load(name: str) -> dict[str, Any]:
    """Return the names that a script defines. It imports other scripts, as it does on a command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        return runpy.run_path(str(SCRIPTS / f"{name}.py"))
