"""X-LoRA against PEFT, in float32, with the classifier in memory: logits and greedy tokens, for each field of the
configuration, alone and beside other requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from tests.adapters.test_parity import answers, compare
from tests.checkpoints import make_llama, make_text_model
from tests.engine.test_parity import Oracle, engine_for, llava_oracle, text_oracle
from tests.models.test_families import make as make_family
from tests.peft_adapters import make_adapter, make_xlora
from vlmserve.engine.engine import Engine
from vlmserve.errors import InvalidRequestError, PromptTooLongError
from vlmserve.types import BeamSearch, EngineRequest, Prompt, SamplingParams

TEXT = r".*language_model.*(q|k|v|o|gate|up|down)_proj"
ADAPTERS = [
    {"target_modules": TEXT},
    {"target_modules": r".*language_model.*(q|v|down)_proj", "r": 3, "use_rslora": True},
    {"target_modules": TEXT, "r": 6, "rank_pattern": {"v_proj": 2}, "lora_alpha": 20},
]
CASES = {
    "softmax": {"xlora_depth": 1},
    "depth and temperature": {"xlora_depth": 3, "softmax_temperature": 0.4, "xlora_dropout_p": 0.0},
    "no softmax": {"xlora_depth": 2, "enable_softmax": False, "global_scaling_weight": 0.1},
    "layerwise": {"xlora_depth": 2, "layerwise_scalings": True},
    "top k": {"xlora_depth": 2, "top_k_lora": 1, "layerwise_scalings": True, "global_scaling_weight": 0.5},
    "softmax over top k": {"enable_softmax": False, "enable_softmax_topk": True, "top_k_lora": 2},
    "another scaling pass": {"xlora_depth": 2, "scaling_pass_value": 0.4},
    "top k in the scaling pass": {"top_k_lora": 2, "scaling_pass_value": 0.6, "layerwise_scalings": True},
    "softmax over top k in the scaling pass": {
        "enable_softmax_topk": True, "top_k_lora": 2, "scaling_pass_value": 0.4, "global_scaling_weight": 0.5,
    },
}  # fmt: skip
SETTINGS = {"enable_lora": True, "max_loras": 11}
PARTS = [(5, "image", 30), (40,), ("image", 20)]
LORA = "a plain adapter"


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A model, its folder, an engine, and PEFT's opinions by X-LoRA checkpoint and for a plain adapter."""
    folder = tmp_path_factory.mktemp("llava")
    oracle = llava_oracle(folder)
    engine = engine_for(oracle, **SETTINGS)
    oracles = {}
    for seed, (name, config) in enumerate(CASES.items()):
        model = make_xlora(oracle.model, folder / name, ADAPTERS, seed=10 * seed, **config)
        oracles[name] = replace(oracle, model=model)
    oracles[LORA] = replace(oracle, model=make_adapter(oracle.model, folder / LORA, target_modules="all-linear"))
    for name in oracles:
        engine.adapter_store.load(name, folder / name)
    return oracle, folder, engine, oracles


@pytest.mark.parametrize("case", CASES)
def test_each_field_gives_the_logits_of_peft(llava, case):
    _, _, engine, oracles = llava
    # Rounding in the scaling pass is rounding of the weights of adapters, which a low temperature magnifies.
    compare(engine, oracles[case], case, oracles[case].prompt(3, *PARTS[0]), atol=5e-4)


@pytest.mark.parametrize("case", ["layerwise", "another scaling pass"])
def test_greedy_tokens_are_those_of_pefts_generate(llava, case):
    _, _, engine, oracles = llava
    prompt = oracles[case].prompt(5, *PARTS[0])
    assert answers(engine, [(case, prompt)]) == [oracles[case].greedy(prompt, 8)]


def mixed_requests(oracle: Oracle, cases):
    """With X-LoRA, with a plain adapter and with none, in turn; each about two of the images and texts."""
    prompts = [oracle.prompt(seed, *parts) for seed, parts in enumerate(PARTS)]
    named = list(enumerate(["", *cases]))
    return [(case, prompt) for seed, prompt in enumerate(prompts) for place, case in named if (seed + place) % 3]


@pytest.fixture(scope="module")
def alone(llava):
    """Requests and what each is answered by itself."""
    oracle, folder, _, oracles = llava
    engine = engine_for(oracle, **SETTINGS, enable_prefix_caching=False)
    for name in oracles:
        engine.adapter_store.load(name, folder / name)
    requests = mixed_requests(oracle, oracles)
    expected = [answers(engine, [request])[0] for request in requests]
    assert len(set(map(tuple, expected))) > len(expected) / 2, "or these tests would prove little"
    return requests, expected


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7, "block_size": 4},
        {"max_loras": 2, "max_num_seqs": 6, "kv_offload_memory": "8MiB"},
        {"kernels": "torch", "encoder_step_share": 0.01},
    ],
    ids=["together", "in chunks", "with few slots", "by torch"],
)
def test_batched_answers_equal_those_alone(llava, alone, settings):
    oracle, folder, _, oracles = llava
    requests, expected = alone
    engine = engine_for(oracle, **{**SETTINGS, **settings})
    for name in oracles:
        engine.adapter_store.load(name, folder / name)
    assert answers(engine, requests) == expected
    # Again, with prefixes of the first time.
    before = engine.stats().prefix_cached_tokens
    assert answers(engine, requests[::-1]) == expected[::-1]
    assert engine.stats().prefix_cached_tokens > before


def test_a_preempted_request_is_answered_as_before(llava, alone):
    oracle, folder, _, oracles = llava
    requests, expected = alone
    probe = engine_for(oracle, block_size=4)
    block_bytes = probe.info.kv_cache_bytes // probe.stats().kv_blocks_total
    longest = max(len(prompt.token_ids) for _, prompt in requests) + 8
    engine = engine_for(oracle, **SETTINGS, block_size=4, kv_cache_memory=(longest // 2 + 8) * block_bytes)
    for name in oracles:
        engine.adapter_store.load(name, folder / name)
    assert answers(engine, requests) == expected
    assert engine.stats().preemptions > 0


def test_beams_and_logprobs_of_prompts_follow_the_scalings(llava):
    _, _, engine, oracles = llava
    case = "layerwise"
    prompt = oracles[case].prompt(3, 20)
    engine.add(EngineRequest("a", prompt, SamplingParams(max_tokens=3, prompt_logprobs=0), adapter=case))
    [output] = [out for _ in range(3) for out in engine.step() if out.prompt_logprobs]
    expected = oracles[case].forward(Prompt(prompt.token_ids[:1]), prompt.token_ids[1:]).log_softmax(1)
    for place, token in enumerate(prompt.token_ids[1:]):
        assert output.prompt_logprobs[place + 1].logprob == pytest.approx(float(expected[place, token]), abs=1e-4)
    engine.abort(["a"])
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    engine.add(EngineRequest("b", prompt, params, beams=BeamSearch(width=3), adapter=case))
    found = []
    while engine.has_work():
        found += [output.token_ids for output in engine.step()]
    theirs = oracles[case].model.generate(
        input_ids=torch.tensor([prompt.token_ids]), max_new_tokens=6, num_beams=3, do_sample=False
    )
    assert found[-1] == theirs[0, len(prompt.token_ids) :].tolist()
    assert engine.stats().kv_blocks_used == 0


def test_scaling_passes_share_the_models_blocks(llava):
    oracle, folder, _, _ = llava
    engine = engine_for(oracle, **SETTINGS, block_size=4)
    for name in ("softmax", "layerwise", "another scaling pass"):
        engine.adapter_store.load(name, folder / name)
    prompt = oracle.prompt(9, 10, "image", 10)

    def cached(adapter: str) -> int:
        before = engine.stats().prefix_cached_tokens
        answers(engine, [(adapter, prompt)], max_tokens=1)
        return engine.stats().prefix_cached_tokens - before

    whole = len(prompt.token_ids) - 1
    assert cached("softmax") == 0
    assert cached("") == whole, "the model finds what the scaling pass computed"
    assert cached("layerwise") == 0, "of the other pass nothing is known"
    used = engine.stats().kv_blocks_cached
    assert cached("another scaling pass") == 0
    assert engine.stats().kv_blocks_cached - used >= 2 * (whole // 4), "both of its passes are its own"
    assert [cached(name) for name in ("softmax", "layerwise", "another scaling pass")] == [whole] * 3


def test_snapshots_have_the_shares_of_adapters(llava):
    _, _, engine, oracles = llava
    prompt = oracles["layerwise"].prompt(23, 20)
    for name in ("", "layerwise"):
        engine.add(EngineRequest(name, prompt, SamplingParams(max_tokens=3, ignore_eos=True), adapter=name))
    engine.step()
    shares = {request.request_id: request.adapter_shares for request in engine.inspect().requests}
    model = oracles["layerwise"].model
    with torch.inference_mode():
        model(input_ids=torch.tensor([prompt.token_ids]))
    expected = model.base_model.internal_xlora_scalings.mean((0, 1, 2)).tolist()
    engine.abort(["", "layerwise"])
    assert shares == {"": [], "layerwise": pytest.approx(expected, abs=1e-5)}


def test_xlora_needs_a_prompt_to_fit_twice(llava):
    oracle, folder, engine, _ = llava
    block_bytes = engine.info.kv_cache_bytes // engine.stats().kv_blocks_total
    engine = engine_for(oracle, **SETTINGS, kv_cache_memory=4 * block_bytes)
    engine.adapter_store.load("x", folder / "softmax")
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    fits, large = oracle.prompt(1, 31), oracle.prompt(1, 32)
    with pytest.raises(PromptTooLongError, match="maximum context length is 32 tokens"):
        engine.add(EngineRequest("large", large, params, adapter="x"))
    assert [len(answer) for answer in answers(engine, [("x", fits), ("", large)], max_tokens=64)] == [1, 32]


@pytest.mark.parametrize("kind", ["int8", "embeddings", "another order of layers"])
def test_other_bases_give_pefts_logits(tmp_path, kind):
    """On weights of 8 bits, with adapters of embeddings, and where layers come in another order than Llama's."""
    if kind == "another order of layers":
        config = {"pad_token_id": 0}
        oracle = text_oracle(make_text_model(tmp_path / "base", Phi3ForCausalLM, Phi3Config, **config))
    else:
        oracle = text_oracle(make_llama(tmp_path / "base", tie_word_embeddings=kind == "embeddings"))
    engine = engine_for(oracle, **SETTINGS, kernels="torch", quantize="int8" if kind == "int8" else "none")
    if kind == "int8":
        for name, place in engine.adapter_store.model.places.items():
            if not place.is_table:
                weight = oracle.model.get_parameter(
                    f"model.{name}.weight".replace("language_model.", "").replace("model.lm_head", "lm_head")
                )
                weight.data.copy_(engine.adapter_store.model.base_weight(name))
    adapters = {
        "int8": ["q_proj", "down_proj"], "embeddings": ["embed_tokens", "up_proj"],
        "another order of layers": ["o_proj", "qkv_proj", "down_proj"],
    }[kind]  # fmt: skip
    configs = [{"target_modules": adapters, "init_lora_weights": False}, {"target_modules": adapters[:1], "r": 2}]
    model = make_xlora(oracle.model, tmp_path / "x", configs, layerwise_scalings=True, scaling_pass_value=0.3)
    engine.adapter_store.load("x", tmp_path / "x")
    compare(engine, replace(oracle, model=model), "x", oracle.prompt(3, 30))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Path]:
    """PEFT's opinion of X-LoRA on a model with states, and the folder of the checkpoint."""
    folder = tmp_path_factory.mktemp("hybrid")
    base = text_oracle(make_family(folder / "base", "qwen3.5 with shared keys"))
    targets = {"target_modules": ["in_proj_qkv", "q_proj", "down_proj"]}
    configs = [targets, {**targets, "r": 2}]
    model = make_xlora(base.model, folder / "x", configs, layerwise_scalings=True, scaling_pass_value=0.3)
    return replace(base, model=model), folder / "x"


def engine_with_states(hybrid: tuple[Oracle, Path], **settings: object) -> Engine:
    engine = engine_for(hybrid[0], **{**SETTINGS, "block_size": 4, **settings})
    engine.adapter_store.load("x", hybrid[1])
    return engine


def test_both_passes_have_states(hybrid: tuple[Oracle, Path]) -> None:
    oracle, _ = hybrid
    compare(engine_with_states(hybrid), oracle, "x", oracle.prompt(3, 90), atol=5e-4)


def test_hits_of_both_passes_give_pefts_tokens(hybrid: tuple[Oracle, Path]) -> None:
    oracle, _ = hybrid
    prompt = oracle.prompt(5, 150)
    parts = Prompt([*prompt.token_ids[:130], *oracle.prompt(6, 10).token_ids])
    longer = Prompt([*prompt.token_ids, *oracle.greedy(prompt, 8)[:7], 9])
    engine = engine_with_states(hybrid, max_num_batched_tokens=100)
    for question, found in ((prompt, 0), (prompt, 149), (longer, 157), (parts, 128)):
        before = engine.stats().prefix_cached_tokens
        assert answers(engine, [("x", question)]) == [oracle.greedy(question, 8)]
        assert engine.stats().prefix_cached_tokens == before + found


def test_two_slots_of_states_give_pefts_tokens(hybrid: tuple[Oracle, Path]) -> None:
    oracle, _ = hybrid
    size = engine_with_states(hybrid).sizes.state_bytes
    engine = engine_with_states(hybrid, state_cache_memory=3 * size)
    prompts = [oracle.prompt(seed, 70) for seed in (5, 6, 5)]
    for _ in range(2):
        assert answers(engine, [("x", prompt) for prompt in prompts]) == [oracle.greedy(one, 8) for one in prompts]
    assert engine.stats().state_slots_used == 0
    tight = engine_with_states(hybrid, state_cache_memory=2 * size)
    with pytest.raises(InvalidRequestError, match="raise --state-cache-memory"):
        answers(tight, [("x", prompts[0])])
