"""Most tests of this folder on kernels that are compiled for NVIDIA's GPUs, in the emulator of `tests.ptx`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from triton import knobs

pytestmark = [
    pytest.mark.skipif(not knobs.runtime.interpret, reason="kernels run on a GPU, or in the emulator already"),
    pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed"),
]

FOLDER = Path(__file__).parent
TESTS = FOLDER.parents[1]
ENGINE = {
    "engine/test_captures.py": "contexts_that_grow or beside_prompts or (towers_are_captured and qwen2_5_vl)",
    "adapters/test_captured.py": "rows_of_captured_steps",
}
"""Tests by the data flow of a GPU, and some of each."""


@pytest.mark.parametrize(
    ("arch", "files", "chosen"),
    [
        (90, "products norm_and_rope sampling encoder adapters", "not plain"),
        (90, "attention bfloat16 memory_access", ""),
        (89, "layers", ""),
    ],
)
def test_kernels_compute_the_same_when_they_are_compiled(arch: int, files: str, chosen: str) -> None:
    """For an H100, and for a GPU of less shared memory and older instructions (an RTX 4090 or L40S).

    Left out, for time: products with plain weights in other types than bfloat16, and layers on an H100, which the
    engine's tests run there.
    """
    run_in_emulator([str(FOLDER / f"test_{name}.py") for name in files.split()], arch=arch, chosen=chosen)


def test_the_engine_answers_the_same_by_compiled_kernels_in_graphs() -> None:
    run_in_emulator(
        [str(TESTS / file) for file in ENGINE], chosen=" or ".join(f"({names})" for names in ENGINE.values())
    )


def run_in_emulator(paths: list[str], *, arch: int = 90, chosen: str = "") -> None:
    """Files of tests; chosen: those of them."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.ptx.plugin", f"--arch={arch}", "-q", "-k", chosen, *paths]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-n", "0"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 4
