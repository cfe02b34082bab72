"""Every decoder family in the engine gives transformers' tokens: alone, batched, chunked, cached and preempted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.test_parity import (
    Oracle,
    assert_no_further,
    engine_for,
    first_logits,
    generate,
    text_oracle,
    tight_cache,
)
from tests.models.test_families import FAMILIES, HYBRIDS, MIXTURES, ONLY_POSITIONS, make
from vlmserve.kernels.choice import VARIABLE
from vlmserve.kernels.extension import supported_isas
from vlmserve.types import Prompt

LENGTHS = [40, 1, 23, 9, 62, 16, 57, 33]
"""Some answers to these, of 12 tokens, pass the 64 tokens after which longrope turns otherwise."""
# What only the layers' own arithmetic tells apart is in tests/models.
NAMES = [
    name
    for name in FAMILIES | HYBRIDS | MIXTURES
    if name not in ("llama with truncated yarn", "qwen3 with biases", "olmo2 with biases", "lfm3 without gates")
]


@pytest.fixture(scope="module", params=NAMES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return text_oracle(make(tmp_path_factory.mktemp("family"), request.param))


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[Prompt]:
    return [oracle.prompt(seed, length) for seed, length in enumerate(LENGTHS)]


def check_tokens(oracle: Oracle, prompts: list[Prompt], kernels: str) -> None:
    """Those of transformers in chunks and with what is cached. With native kernels also preempted, and some alone."""
    if kernels == "torch" and supported_isas():
        check_few(oracle, prompts[4:])
        return
    engine = engine_for(oracle, block_size=4, max_num_batched_tokens=9)
    answers = [*(generate(engine, [prompt])[0] for prompt in prompts[:2]), *generate(engine, prompts[2:])]
    expected = [oracle.greedy(prompt, guess=answer) for prompt, answer in zip(prompts, answers, strict=True)]
    assert len({tuple(answer) for answer in expected}) > 4, "answers that are alike would prove little"
    assert answers == expected
    tight = tight_cache(oracle, prompts, max_num_batched_tokens=100)
    assert generate(tight, prompts) == expected
    # Where layers have a short window, all requests may fit.
    assert tight.stats().preemptions > 0 or tight.runner.model.language_model.cache_layout.windows[-1] is not None
    assert generate(tight, prompts[::-1]) == expected[::-1]


def check_few(oracle: Oracle, prompts: list[Prompt]) -> None:
    engine = engine_for(oracle, block_size=4, max_num_batched_tokens=30)
    answers = generate(engine, prompts)
    assert answers == [oracle.greedy(prompt, guess=answer) for prompt, answer in zip(prompts, answers, strict=True)]
    assert generate(engine, prompts[:1]) == answers[:1]


@torch.inference_mode()
def check_bfloat16(oracle: Oracle, prompts: list[Prompt]) -> None:
    """As far from float32 as transformers' own bfloat16 is, and no further."""
    exact = [oracle.forward(prompt, [])[0] for prompt in prompts]
    rounded = AutoModelForCausalLM.from_pretrained(oracle.folder, dtype=torch.bfloat16).eval()
    theirs = [rounded(input_ids=torch.tensor([prompt.token_ids])).logits[0, -1].float() for prompt in prompts]
    ours = first_logits(engine_for(oracle, dtype="bfloat16"), prompts)
    has_experts = any(value for name, value in rounded.config.to_dict().items() if "experts" in name)
    assert_no_further(ours, torch.stack(theirs), torch.stack(exact), has_experts=has_experts)


@pytest.mark.usefixtures("native_kernels")
def test_tokens_are_those_of_transformers(oracle: Oracle, prompts: list[Prompt]) -> None:
    check_tokens(oracle, prompts, "native")


@pytest.mark.parametrize("name", ["gemma2", "gpt_bigcode", "phi3 with longrope, short", "qwen3.5", "lfm2"])
def test_torchs_kernels_do_as_well(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/models compares the logits of all families by torch's kernels."""
    monkeypatch.setenv(VARIABLE, "torch")
    oracle = text_oracle(make(tmp_path, name))
    check_few(oracle, [oracle.prompt(seed, length) for seed, length in enumerate(LENGTHS[4:])])


@pytest.mark.parametrize("oracle", [name for name in NAMES if name not in ONLY_POSITIONS], indirect=True)
def test_bfloat16_is_within_its_own_rounding(oracle: Oracle, prompts: list[Prompt]) -> None:
    check_bfloat16(oracle, prompts)
