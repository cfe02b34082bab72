"""The engine with keys and values in 8 bits: the same tokens alone, batched, chunked, cached, preempted and swapped."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest

from tests.checkpoints import make_gemma3, make_llama
from tests.engine.kinds import by_kernels
from tests.engine.test_gemma3 import CONVERSATIONS, GREEDY
from tests.engine.test_parity import (
    Oracle,
    engine_for,
    first_logits,
    generate,
    llava_oracle,
    mixed_prompts,
    text_oracle,
    tight_cache,
)
from tests.engine.test_transformers_backend import make
from tests.models.test_families import make as make_family
from vlmserve import LLM
from vlmserve.errors import ConfigurationError
from vlmserve.kernels.choice import VARIABLE
from vlmserve.kernels.extension import supported_isas
from vlmserve.types import EngineRequest, Prompt, SamplingParams

pytestmark = pytest.mark.usefixtures("native_kernels")

INT8 = {"kv_cache_dtype": "int8"}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return llava_oracle(tmp_path_factory.mktemp("llava"))


def alone(oracle: Oracle, prompts: list[Prompt]) -> list[list[int]]:
    """Each prompt's answer, in one go and with nothing else in the caches."""
    # By these kernels, not by transformers, which rounds no keys.
    known = (oracle.folder, os.environ[VARIABLE], *(tuple(prompt.token_ids) for prompt in prompts))
    if known not in ALONE:
        engine = engine_for(oracle, **INT8, enable_prefix_caching=False)
        ALONE[known] = [answer for prompt in prompts for answer in generate(engine, [prompt])]
    return ALONE[known]


ALONE: dict[Any, list[list[int]]] = {}
"""What `alone` has found, since several tests ask for the same."""


BATCHED = pytest.param({}, id="batched")
CHUNKED = pytest.param({"block_size": 4, "max_num_batched_tokens": 7}, id="chunked")
ODD_BLOCKS = pytest.param({"block_size": 5, "max_num_batched_tokens": 50}, id="odd blocks")


@by_kernels("settings", native=[BATCHED, CHUNKED, ODD_BLOCKS], torch=[ODD_BLOCKS])
def test_tokens_do_not_depend_on_the_batch(llava: Oracle, settings: dict[str, Any]) -> None:
    prompts = mixed_prompts(llava)
    expected = alone(llava, prompts)
    engine = engine_for(llava, **INT8, **settings)
    assert generate(engine, prompts) == expected
    assert generate(engine, prompts) == expected, "found in the cache"
    assert engine.stats().prefix_cached_tokens > 0


@pytest.mark.usefixtures("saving_pays")
@pytest.mark.parametrize("kv_offload_memory", [0, "64MiB"])
def test_tokens_do_not_depend_on_preemption_and_swapping(llava: Oracle, kv_offload_memory: int | str) -> None:
    prompts = mixed_prompts(llava)
    engine = tight_cache(llava, prompts, max_num_batched_tokens=100, kv_offload_memory=kv_offload_memory, **INT8)
    expected = alone(llava, prompts)
    for _ in range(2):
        assert generate(engine, prompts) == expected
    stats = engine.stats()
    assert stats.preemptions > 0
    assert (stats.blocks_loaded > 0) == bool(kv_offload_memory)


@pytest.mark.usefixtures("kernels")
def test_logits_are_near_those_of_an_exact_cache(llava: Oracle) -> None:
    prompts = mixed_prompts(llava)
    exact, rounded = (first_logits(engine_for(llava, **kind), prompts) for kind in ({}, INT8))
    error = (rounded - exact).square().mean().sqrt() / exact.std()
    assert 0 < error < 0.02


@pytest.mark.usefixtures("kernels")
def test_tokens_that_see_each_other_and_windows(tmp_path: Any) -> None:
    folder = make_gemma3(tmp_path)
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "16MiB", "block_size": 4}
    one_by_one = LLM(str(folder), **settings, **INT8, enable_prefix_caching=False)
    expected = [one_by_one.chat([one], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for one in CONVERSATIONS]
    together = LLM(str(folder), **settings, **INT8, max_num_batched_tokens=30)
    for _ in range(2):
        answers = together.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
        assert [answer.outputs[0].token_ids for answer in answers] == expected


def test_transformers_models_take_an_int8_cache(tmp_path: Any) -> None:
    oracle = text_oracle(make(tmp_path, "GPTNeoX"))
    prompts = [oracle.prompt(seed, length) for seed, length in enumerate((5, 33, 1, 64))]
    expected = alone(oracle, prompts)
    engine = engine_for(oracle, **INT8, max_num_batched_tokens=20)
    assert engine.runner.blocks.layers[0].scales is not None
    assert generate(engine, prompts) == expected


def test_fp8_needs_torch_kernels_on_cpus(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = text_oracle(make_llama(tmp_path))
    fp8: dict[str, Any] = {"kv_cache_dtype": "fp8", "enable_prefix_caching": False}
    if supported_isas():
        with pytest.raises(ConfigurationError, match="use int8"):
            engine_for(oracle, **fp8)
    monkeypatch.setenv(VARIABLE, "torch")
    prompts = [oracle.prompt(seed, length) for seed, length in enumerate((5, 33, 1, 64))]
    engine = engine_for(oracle, **fp8)
    expected = [answer for prompt in prompts for answer in generate(engine, [prompt])]
    assert generate(engine_for(oracle, **fp8, max_num_batched_tokens=20), prompts) == expected
    exact, rounded = (first_logits(engine_for(oracle, **kind), prompts) for kind in ({}, fp8))
    assert 0 < (rounded - exact).square().mean().sqrt() / exact.std() < 0.1


def test_an_int8_cache_takes_less_memory(tmp_path: Any, kernels: str, caplog: pytest.LogCaptureFixture) -> None:
    oracle = text_oracle(make_llama(tmp_path))
    blocks, lines = [], []
    for kind in ({}, INT8):
        with caplog.at_level(logging.INFO, "vlmserve.engine.engine"):
            engine = engine_for(oracle, kv_cache_memory="1MiB", **kind)
        blocks.append(engine.stats().kv_blocks_total)
        lines.append(next(text for text in reversed(caplog.messages) if text.startswith("KV cache: ")))
    spec = engine.runner.model.language_model.spec
    # Whole tiles of 16 columns, where native kernels compute.
    columns = -(-spec.attention[0].head_size // 16) * 16 if kernels == "native" else spec.attention[0].head_size
    bytes_per_token = sum(layer.num_kv_heads * (layer.head_size + columns + 2 * 4) for layer in spec.attention)
    assert lines[1].startswith(f"KV cache: {blocks[1]} blocks of 16 tokens, int8, {bytes_per_token} bytes a token; ")
    assert "float32" in lines[0]
    assert blocks[1] == 2**20 // (16 * bytes_per_token) > 2 * blocks[0]


def test_log_says_how_many_blocks_a_token_takes(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Layers with a window have other blocks than those that attend to all tokens."""
    with caplog.at_level(logging.INFO, "vlmserve.engine.engine"):
        engine = engine_for(text_oracle(make_family(tmp_path, "gemma3")), kv_cache_memory="1MiB")
    total, columns = engine.stats().kv_blocks_total, engine.runner.num_columns
    assert f"KV cache: {total} blocks of 16 tokens ({columns} for all layers), float32, " in caplog.text


def test_blocks_of_another_type_have_other_keys(tmp_path: Any) -> None:
    oracle = text_oracle(make_llama(tmp_path))
    keys = []
    for kind in ({}, INT8):
        engine = engine_for(oracle, **kind)
        engine.add(EngineRequest("a", oracle.prompt(0, 40), SamplingParams(max_tokens=2)))
        engine.step()
        [request] = engine.scheduler.running
        keys.append({*request.chains[0].keys})
    assert len(keys[0]) == len(keys[1]) == 1 + 40 // 16
    assert not keys[0] & keys[1]
