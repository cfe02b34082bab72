"""Tests of the engine by the data flow of a GPU, on kernels that are compiled for an H100."""

from __future__ import annotations

from tests.kernels.triton.emulating import MARKS, run_in_emulator

pytestmark = MARKS

CASES = """
engine/test_captures.py::test_contexts_that_grow_while_steps_are_repeated
engine/test_captures.py::test_decodes_beside_prompts_are_captured
engine/test_captures.py::test_towers_are_captured_for_equal_sizes[qwen2_5_vl]
adapters/test_captured.py::test_rows_of_captured_steps_have_their_adapters
"""


def test_engine_runs_compiled_kernels() -> None:
    run_in_emulator(CASES, folder=".")
