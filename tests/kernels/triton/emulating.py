"""Runs tests on kernels that are compiled for NVIDIA's GPUs, in the emulator of `tests.ptx`.

Compiling a variant takes about a second, running it in the emulator milliseconds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from triton import knobs

SECONDS = 1500
"""For a machine that is busy and has compiled nothing yet."""
MARKS = [
    pytest.mark.timeout(SECONDS + 60),
    pytest.mark.skipif(not knobs.runtime.interpret, reason="kernels run on a GPU, or in the emulator already"),
    pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed"),
]
TESTS = Path(__file__).parents[2]


def run_in_emulator(cases: str, arch: int = 90) -> None:
    """Fails unless all cases pass, for an architecture. cases: a line for each test, as pytest names it."""
    paths = [f"{TESTS}/{case}" for case in cases.split("\n") if case]
    options = [f"--arch={arch}", f"--timeout={SECONDS}", "-q", "-n", "0", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.ptx.plugin", *options, *paths],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    # GPU variants of the cases are deselected; nothing may be skipped.
    assert re.match(r"\d+ passed(, \d+ deselected)? in ", run.stdout.splitlines()[-1]), run.stdout[-500:]
