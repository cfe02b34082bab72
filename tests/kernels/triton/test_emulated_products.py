"""Products by weights, compiled for an H100: a case of each variant of their kernels. A few cases for an RTX 4090."""

from __future__ import annotations

from tests.kernels.triton.emulating import MARKS, run_in_emulator

pytestmark = MARKS

HOPPER = """
test_bfloat16.py::test_tiles_of_a_7b_model
test_bfloat16.py::test_norms_between_products_of_a_7b_model
test_bfloat16.py::test_many_rows
test_memory_access.py::test_products_have_few_bank_conflicts
test_memory_access.py::test_small_groups_of_4_bits_cost_little_more
test_products.py::test_activations_equal_torchs[interpreter-gelu]
test_products.py::test_few_rows_equal_float64[interpreter-20-4 bits]
test_products.py::test_matmul_adds_gates_biases_and_residuals[interpreter-gelu_pytorch_tanh-2-8 bits]
test_products.py::test_many_rows_use_8_bit_inputs_when_asked
test_products.py::test_parts_of_the_inputs_are_added_in_order[interpreter-4 bits]
test_products.py::test_sums_of_tiles_may_restart[interpreter-8 bits]
test_products.py::test_warps_divide_inputs[interpreter-8-2-8 bits]
test_products.py::test_weights_are_expanded_to_the_bit[interpreter-4 bits-544-32]
test_products.py::test_weights_are_expanded_to_the_bit[interpreter-8 bits-75-75]
"""
ADA = """
test_bfloat16.py::test_attention[interpreter-80-True]
test_bfloat16.py::test_attention_of_images[interpreter-80]
test_bfloat16.py::test_norms_between_products_of_a_7b_model[interpreter-4 bits-64]
test_bfloat16.py::test_tiles_of_a_7b_model[interpreter-32-False-8 bits-128]
test_layers.py::test_decoder_logits_equal_torch[int4]
"""
"""An RTX 4090 or L40S has less shared memory and older instructions of tensor cores."""


def test_compiled_products_pass_the_same_tests() -> None:
    run_in_emulator(HOPPER)


def test_kernels_compiled_for_ada_pass_too() -> None:
    run_in_emulator(ADA, arch=89)
