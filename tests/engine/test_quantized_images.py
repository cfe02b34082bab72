"""Quantized weights under images with features for several layers: the same tokens however requests run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_parity import engine_for, generate, tight_cache
from tests.engine.test_qwen_vl import MIXED, make_oracle

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_tokens_are_the_same_alone_in_batches_in_chunks_and_preempted(tmp_path: Path, scheme: str) -> None:
    oracle = make_oracle(tmp_path, "qwen3_vl")
    prompts = [oracle.prompt(seed, *parts) for seed, parts in enumerate(MIXED[2:5])]
    engine = engine_for(oracle, block_size=4, quantize=scheme)
    alone = [generate(engine, [prompt])[0] for prompt in prompts]
    assert alone != generate(engine_for(oracle), prompts), "rounded weights answer otherwise"
    assert generate(engine, prompts) == alone
    assert generate(engine_for(oracle, block_size=4, quantize=scheme, max_num_batched_tokens=9), prompts) == alone
    tight = tight_cache(oracle, prompts, max_num_batched_tokens=100, quantize=scheme)
    assert generate(tight, prompts) == alone
    assert tight.stats().preemptions > 0
