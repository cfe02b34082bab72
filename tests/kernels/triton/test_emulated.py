"""Attention, norms, adapters and sampling, compiled for an H100: a case of each variant of their kernels.

The interpreter runs all cases, without compiling.
"""

from __future__ import annotations

from tests.kernels.triton.emulating import MARKS, run_in_emulator

pytestmark = MARKS

CASES = """
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
test_bfloat16.py::test_attention
test_bfloat16.py::test_attention_with_all_that_models_ask_for
test_bfloat16.py::test_sliding_windows_of_decodes
test_bfloat16.py::test_attention_of_images
test_bfloat16.py::test_norms
test_encoder.py::test_queries_and_keys_are_rotated_in_place
test_memory_access.py::test_attention_of_decodes_has_no_bank_conflicts
test_norm_and_rope.py::test_8_bits_are_those_of_the_reference
test_norm_and_rope.py::test_norms_equal_float64[interpreter-layer-130]
test_norm_and_rope.py::test_norms_of_sums_equal_float64[interpreter-sums of layer-rms-130]
test_norm_and_rope.py::test_rotary_kernel_writes_keys_and_values[interpreter-True-True-8]
test_sampling.py
"""


def test_compiled_kernels_pass_the_same_tests() -> None:
    run_in_emulator(CASES)
