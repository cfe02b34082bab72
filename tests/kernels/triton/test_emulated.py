"""Kernels compiled for an H100, a case of each variant, and the engine by the data flow of a GPU on them.

The interpreter runs all cases, without compiling. One process runs these, so that cases share compiled programs.
"""

from __future__ import annotations

from tests.kernels.triton.emulating import MARKS, run_in_emulator

pytestmark = MARKS

HOPPER = """
kernels/triton/test_adapters.py::test_many_rows_have_their_adapters_too
kernels/triton/test_adapters.py::test_rows_are_scaled_between_the_factors
kernels/triton/test_adapters.py::test_mixed_adapter_rows_share_a_matmul[interpreter-2-4 bits]
kernels/triton/test_attention.py::test_a_mixed_batch_equals_naive_attention[interpreter-all of it]
kernels/triton/test_attention.py::test_blocks_have_any_size[interpreter-3]
kernels/triton/test_attention.py::test_chunks_of_few_rows_split_their_contexts[interpreter-True]
kernels/triton/test_attention.py::test_fused_writes_equal_separate_writes[interpreter-groups of three-4-int8]
kernels/triton/test_attention.py::test_float16_is_as_exact_as_its_inputs
kernels/triton/test_attention.py::test_decode_count_may_be_on_the_device[interpreter-all of it-True]
kernels/triton/test_bfloat16.py::test_attention[interpreter-128-fp8]
kernels/triton/test_bfloat16.py::test_attention[interpreter-128-int8]
kernels/triton/test_bfloat16.py::test_attention[interpreter-256-auto]
kernels/triton/test_bfloat16.py::test_attention[interpreter-512-auto]
kernels/triton/test_bfloat16.py::test_attention_of_images
kernels/triton/test_bfloat16.py::test_attention_with_all_that_models_ask_for
kernels/triton/test_bfloat16.py::test_many_rows
kernels/triton/test_bfloat16.py::test_norms
kernels/triton/test_bfloat16.py::test_norms_between_products_of_a_7b_model
kernels/triton/test_bfloat16.py::test_sliding_windows_of_decodes
kernels/triton/test_bfloat16.py::test_tiles_of_a_7b_model
kernels/triton/test_encoder.py::test_queries_and_keys_are_rotated_in_place
kernels/triton/test_experts.py::test_experts_equal_float64[interpreter-dtype1-plain]
kernels/triton/test_experts.py::test_experts_equal_float64[interpreter-dtype2-8 bits]
kernels/triton/test_experts.py::test_experts_equal_float64[interpreter-dtype3-4 bits]
kernels/triton/test_memory_access.py
kernels/triton/test_norm_and_rope.py::test_8_bits_are_those_of_the_reference
kernels/triton/test_norm_and_rope.py::test_norms_equal_float64[interpreter-layer-130]
kernels/triton/test_norm_and_rope.py::test_norms_of_sums_equal_float64[interpreter-sums of layer-rms-130]
kernels/triton/test_norm_and_rope.py::test_rotary_kernel_writes_keys_and_values[interpreter-True-True-8]
kernels/triton/test_products.py::test_activations_equal_torchs[interpreter-gelu]
kernels/triton/test_products.py::test_few_rows_equal_float64[interpreter-20-4 bits]
kernels/triton/test_products.py::test_matmul_adds_gates_biases_and_residuals[interpreter-gelu_pytorch_tanh-2-8 bits]
kernels/triton/test_products.py::test_many_rows_use_8_bit_inputs_when_asked
kernels/triton/test_products.py::test_parts_of_the_inputs_are_added_in_order[interpreter-4 bits]
kernels/triton/test_products.py::test_sums_of_tiles_may_restart[interpreter-8 bits]
kernels/triton/test_products.py::test_warps_divide_inputs[interpreter-8-2-8 bits]
kernels/triton/test_products.py::test_weights_are_expanded_to_the_bit[interpreter-4 bits-544-32]
kernels/triton/test_products.py::test_weights_are_expanded_to_the_bit[interpreter-8 bits-75-75]
kernels/triton/test_rounding.py::test_activations_round_to_the_same_bits[interpreter-halves-float8]
kernels/triton/test_rounding.py::test_activations_round_to_the_same_bits[interpreter-pairs-int8]
kernels/triton/test_rounding.py::test_activations_round_to_the_same_bits[interpreter-pairs-float8]
kernels/triton/test_rounding.py::test_norms_round_to_the_same_bits[interpreter-300-float8]
kernels/triton/test_rounding.py::test_norms_round_to_the_same_bits[interpreter-300-int8]
kernels/triton/test_sampling.py
kernels/triton/test_states.py::test_chunks_equal_float64_from_any_start
engine/test_captures.py::test_contexts_that_grow_while_steps_are_repeated
adapters/test_captured.py::test_rows_of_captured_steps_have_their_adapters
"""
ADA = """
kernels/triton/test_bfloat16.py::test_attention[interpreter-80-int8]
kernels/triton/test_bfloat16.py::test_attention_of_images[interpreter-80]
kernels/triton/test_bfloat16.py::test_norms_between_products_of_a_7b_model[interpreter-4 bits-64]
kernels/triton/test_bfloat16.py::test_tiles_of_a_7b_model[interpreter-32-False-8 bits-128]
"""
"""An RTX 4090 or L40S has less shared memory and older instructions of tensor cores."""


def test_compiled_kernels_pass_the_same_tests() -> None:
    run_in_emulator(HOPPER)


def test_kernels_compiled_for_ada_pass_too() -> None:
    run_in_emulator(ADA, arch=89)
