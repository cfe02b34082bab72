"""Tests of this folder on kernels that are compiled for NVIDIA's GPUs, in the emulator of `tests.ptx`.

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
pytestmark = [
    pytest.mark.timeout(SECONDS + 60),
    pytest.mark.skipif(not knobs.runtime.interpret, reason="kernels run on a GPU, or in the emulator already"),
    pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed"),
]

FOLDER = Path(__file__).parent
TESTS = FOLDER.parents[1]

HOPPER = """
test_adapters.py::test_many_rows_have_their_adapters_too
test_adapters.py::test_rows_are_scaled_between_the_factors
test_adapters.py::test_mixed_adapter_rows_share_a_matmul[interpreter-2-4 bits]
test_attention.py::test_a_cache_of_8_bits[interpreter-all of it]
test_attention.py::test_a_mixed_batch_equals_naive_attention[interpreter-all of it]
test_attention.py::test_blocks_have_any_size[interpreter-3]
test_attention.py::test_chunks_of_few_rows_split_their_contexts[interpreter-True]
test_attention.py::test_fused_writes_equal_separate_writes[interpreter-groups of three-4-True]
test_attention.py::test_float16_is_as_exact_as_its_inputs
test_attention.py::test_decode_count_may_be_on_the_device[interpreter-all of it-True]
test_bfloat16.py
test_encoder.py::test_queries_and_keys_are_rotated_in_place
test_memory_access.py
test_norm_and_rope.py::test_8_bits_are_those_of_the_reference
test_norm_and_rope.py::test_norms_equal_float64[interpreter-layer-130]
test_norm_and_rope.py::test_norms_of_sums_equal_float64[interpreter-sums of layer-rms-130]
test_norm_and_rope.py::test_rotary_kernel_writes_keys_and_values[interpreter-True-True-8]
test_products.py::test_a_norm_between_products_equals_float64[interpreter-3-2-8 bits]
test_products.py::test_activations_equal_torchs[interpreter-gelu]
test_products.py::test_activations_equal_torchs[interpreter-gelu_pytorch_tanh]
test_products.py::test_few_rows_equal_float64[interpreter-20-4 bits]
test_products.py::test_matmul_adds_gates_biases_and_residuals[interpreter-gelu_pytorch_tanh-2-8 bits]
test_products.py::test_many_rows_use_8_bit_inputs_when_asked
test_products.py::test_parts_of_the_inputs_are_added_in_order[interpreter-4 bits]
test_products.py::test_sums_of_tiles_may_restart[interpreter-8 bits]
test_products.py::test_warps_divide_inputs[interpreter-2-5-plain]
test_products.py::test_warps_divide_inputs[interpreter-8-2-8 bits]
test_products.py::test_weights_are_expanded_to_the_bit[interpreter-4 bits-544-32]
test_products.py::test_weights_are_expanded_to_the_bit[interpreter-8 bits-75-75]
test_sampling.py
"""
"""A case of each kernel variant for an H100. The interpreter runs all cases, without compiling."""
ADA = """
test_bfloat16.py::test_attention[interpreter-80-True]
test_bfloat16.py::test_attention_of_images[interpreter-80]
test_bfloat16.py::test_norms_between_products_of_a_7b_model[interpreter-4 bits-64]
test_bfloat16.py::test_tiles_of_a_7b_model[interpreter-32-False-8 bits-128]
test_layers.py::test_decoder_logits_equal_torch[int4]
"""
"""Cases for an RTX 4090 or L40S, which has less shared memory and older instructions of tensor cores."""
ENGINE = """
engine/test_captures.py::test_contexts_that_grow_while_steps_are_repeated
engine/test_captures.py::test_decodes_beside_prompts_are_captured
engine/test_captures.py::test_towers_are_captured_for_equal_sizes[qwen2_5_vl]
adapters/test_captured.py::test_rows_of_captured_steps_have_their_adapters
"""
"""Tests by the data flow of a GPU."""


@pytest.mark.parametrize(
    ("arch", "folder", "cases"),
    [(90, FOLDER, HOPPER), (89, FOLDER, ADA), (90, TESTS, ENGINE)],
    ids=["Hopper", "Ada", "engine"],
)
def test_compiled_kernels_pass_the_same_tests(arch: int, folder: Path, cases: str) -> None:
    paths = [f"{folder}/{case}" for case in cases.splitlines() if case]
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
