"""Adapters against PEFT, in float32: each by itself, and all of them in one batch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GlmConfig, GlmForCausalLM

from tests.checkpoints import make_llama, make_text_model
from tests.engine.test_parity import Oracle, engine_for, llava_oracle, text_oracle, tight_cache
from tests.gguf_files import write_gguf
from tests.models.test_families import make as make_family
from tests.models.test_gguf import BLOCKS
from tests.peft_adapters import make_adapter
from vlmserve.engine.engine import Engine
from vlmserve.errors import AdapterError
from vlmserve.tools.verify import record_logits
from vlmserve.types import BeamSearch, EngineRequest, Prompt, SamplingParams

ALL = "all-linear"
LLAVA_CASES = {
    "patterns": {
        "target_modules": ALL, "rank_pattern": {"q_proj": 2, r"layers.1.mlp.up_proj": 7},
        "alpha_pattern": {"^model.vision_tower.*": 3, "v_proj": 20},
    },
    "rslora": {"target_modules": r".*language_model.*(k|o|gate|down)_proj", "use_rslora": True, "r": 9},
    "dora": {"target_modules": ALL, "use_dora": True},
    "biases": {"target_modules": ["q_proj", "fc1", "linear_2"], "bias": "lora_only"},
    "bias of the second factor": {"target_modules": ["v_proj", "gate_proj", "linear_1"], "lora_bias": True},
    "whole modules": {
        "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "multi_modal_projector", "k_proj"],
    },
    "embeddings and head": {"target_modules": ["embed_tokens", "lm_head", "up_proj"], "use_rslora": True},
    "embeddings by DoRA": {"target_modules": ["embed_tokens", "o_proj"], "use_dora": True},
    "tokens": {"target_modules": ["down_proj"], "trainable_token_indices": list(range(3, 40))},
}  # fmt: skip
LLAMA_CASES = {
    "tied tokens": {"target_modules": ["q_proj"], "trainable_token_indices": list(range(3, 40))},
    "tied modules": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "untied modules": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "head": {"target_modules": ["lm_head", "v_proj"]},
}
SETTINGS = {"enable_lora": True, "max_loras": 9}
PARTS = [(5, "image", 30), (40,), ("image", 20)]


def adapt(oracle: Oracle, folder: Path, cases: dict[str, dict], engine: Engine) -> dict[str, Oracle]:
    """PEFT's opinions, by adapter; the engine serves them all."""
    oracles = {}
    for seed, (name, config) in enumerate(cases.items()):
        model = make_adapter(oracle.model, folder / name, seed=seed, **config)
        engine.adapter_store.load(name, folder / name)
        oracles[name] = replace(oracle, model=model)
    return oracles


def answers(engine: Engine, requests: list[tuple[str, Prompt]], **params) -> list[list[int]]:
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params}
    found: dict[str, list[int]] = {}
    for number, (adapter, prompt) in enumerate(requests):
        engine.add(EngineRequest(str(number), prompt, SamplingParams(**params), adapter=adapter))
        found[str(number)] = []
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += output.token_ids
    assert engine.stats().kv_blocks_used == 0
    return list(found.values())


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    oracle = llava_oracle(folder)
    engine = engine_for(oracle, **SETTINGS)
    return oracle, folder, engine, adapt(oracle, folder, LLAVA_CASES, engine)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    oracle = text_oracle(make_llama(folder, tie_word_embeddings=True))
    engine = engine_for(oracle, **SETTINGS)
    return oracle, folder, engine, adapt(oracle, folder, LLAMA_CASES, engine)


def compare(engine: Engine, oracle: Oracle, adapter: str, prompt: Prompt, *, atol: float = 1e-4) -> None:
    with record_logits(engine.runner.model.language_model) as rows:
        [answer] = answers(engine, [(adapter, prompt)])
    expected = oracle.forward(prompt, answer[:-1])
    torch.testing.assert_close(torch.cat(rows), expected, rtol=0, atol=atol)
    assert answer == expected.argmax(1).tolist()


@pytest.mark.parametrize("case", LLAVA_CASES)
def test_a_vlm_adapter_gives_pefts_logits(llava, case):
    oracle, _, engine, oracles = llava
    compare(engine, oracles[case], case, oracle.prompt(3, *PARTS[0]))


@pytest.mark.parametrize("case", LLAMA_CASES)
def test_tied_embedding_adapters_give_pefts_logits(llama, case):
    oracle, _, engine, oracles = llama
    compare(engine, oracles[case], case, oracle.prompt(3, 40))


def test_unsampled_rows_end_at_the_last_attention(llama):
    oracle, _, engine, oracles = llama
    rows: list[int] = []
    answers(engine, [("head", oracle.prompt(4, 40))])  # the first forward pass may record a program without rows
    layer = engine.runner.model.language_model.layers[-1]
    hook = layer.mlp.register_forward_pre_hook(lambda _, arguments: rows.append(len(arguments[0])))
    try:
        compare(engine, oracles["head"], "head", oracle.prompt(5, 40))
    finally:
        hook.remove()
    assert rows[0] == 1


def mixed_requests(oracle: Oracle, cases: list[str]) -> list[tuple[str, Prompt]]:
    """Of all adapters and of the model itself, in turn, about the same images and texts."""
    return [(case, oracle.prompt(seed, *parts)) for seed, parts in enumerate(PARTS) for case in ["", *cases]]


@pytest.fixture(scope="module")
def alone(llava) -> tuple[list[tuple[str, Prompt]], list[list[int]]]:
    """Requests and what each is answered by itself."""
    oracle, _, engine, oracles = llava
    requests = mixed_requests(oracle, list(oracles))
    return requests, [answers(engine, [request])[0] for request in requests]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7, "block_size": 4},
        {"max_loras": 2, "max_num_seqs": 6},
        {"kernels": "torch", "encoder_step_share": 0.01},
    ],
    ids=["together", "in chunks", "with few slots", "by torch"],
)
def test_adapters_do_not_change_what_others_are_answered(llava, alone, settings):
    oracle, folder, _, oracles = llava
    requests, expected = alone
    engine = engine_for(oracle, **{**SETTINGS, **settings})
    for name in oracles:
        engine.adapter_store.load(name, folder / name)
    assert answers(engine, requests) == expected
    # Again, with prefixes of the first time.
    assert answers(engine, requests[::-1]) == expected[::-1]
    assert engine.stats().prefix_cached_tokens > 0


def test_a_request_that_is_preempted_keeps_its_adapter(llava, alone):
    oracle, folder, _, oracles = llava
    requests, expected = alone
    engine = tight_cache(oracle, [prompt for _, prompt in requests], **SETTINGS)
    for name in oracles:
        engine.adapter_store.load(name, folder / name)
    assert answers(engine, requests) == expected
    assert engine.stats().preemptions > 0


def test_beams_logprobs_and_grammars_follow_the_adapter(llava):
    oracle, _, engine, oracles = llava
    prompt = oracle.prompt(3, 20)
    engine.add(EngineRequest("a", prompt, SamplingParams(max_tokens=3, prompt_logprobs=0), adapter="dora"))
    [output] = [out for _ in range(3) for out in engine.step() if out.prompt_logprobs]
    expected = oracles["dora"].forward(Prompt(prompt.token_ids[:1]), prompt.token_ids[1:]).log_softmax(1)
    for place, token in enumerate(prompt.token_ids[1:]):
        assert output.prompt_logprobs[place + 1].logprob == pytest.approx(float(expected[place, token]), abs=1e-4)
    engine.abort(["a"])
    search = BeamSearch(width=2)
    found = {}
    for adapter in ("", "dora"):
        engine.add(
            EngineRequest("b", prompt, SamplingParams(max_tokens=4, ignore_eos=True), beams=search, adapter=adapter)
        )
        while engine.has_work():
            for output in engine.step():
                found[adapter] = output.token_ids
    theirs = oracles["dora"].model.generate(
        input_ids=torch.tensor([prompt.token_ids]), max_new_tokens=4, num_beams=2, do_sample=False
    )
    assert found["dora"] == theirs[0, len(prompt.token_ids) :].tolist() != found[""]


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."], ids=["new", "old"])
def test_names_of_all_releases_of_transformers_are_read(llava, tmp_path, prefix):
    oracle, folder, engine, oracles = llava
    source = folder / "patterns"
    old = prefix != "model.language_model."
    config = (source / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config.replace("^model.vision", "^vision") if old else config)
    tensors = {}
    for key, tensor in load_file(source / "adapter_model.safetensors").items():
        name = key.replace("model.language_model.", prefix, 1) if "language_model" in key else key
        if old:
            name = name.replace("model.model.vision_tower.", "model.vision_tower.vision_model.")
            name = name.replace("model.model.multi_modal_projector.", "model.multi_modal_projector.")
            name = re.sub(r"lora_([AB])\.weight", r"lora_\1.default.weight", name)
            name = name.replace("base_model.model.model.language_model", "base_model.model.language_model")
        tensors[name] = tensor
    assert set(tensors) != set(load_file(source / "adapter_model.safetensors")) or not old
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    engine.adapter_store.load("renamed", tmp_path)
    prompt = oracle.prompt(3, *PARTS[0])
    [answer] = answers(engine, [("renamed", prompt)])
    assert answer == oracles["patterns"].greedy(prompt, 8)
    engine.adapter_store.unload("renamed")


@pytest.mark.parametrize("kind", ["int8", "int4", "gguf", "interleaved"])
def test_adapters_of_other_bases_give_pefts_logits(tmp_path, kind):
    """An adapter by DoRA, whose factors depend on the weights of the base: of few bits, in a GGUF file, and with rows
    of queries and keys in another order."""
    settings = {"quantize": kind} if kind.startswith("int") and kind[-1].isdigit() else {}
    if kind == "interleaved":
        oracle = text_oracle(make_text_model(tmp_path / "base", GlmForCausalLM, GlmConfig, head_dim=8, pad_token_id=0))
    else:
        make_llama(tmp_path / "base", **BLOCKS)
        file = tmp_path / "model.gguf" if kind == "gguf" else None
        if file is not None:
            write_gguf(tmp_path / "base", file, types="Q4_0")
        oracle = text_oracle(tmp_path / "base", file)
    engine = engine_for(oracle, **SETTINGS, **settings, kernels="torch")
    if settings:
        for name, place in engine.adapter_store.model.places.items():
            if not place.is_table:
                weight = oracle.model.get_parameter(
                    f"model.{name}.weight".replace("language_model.", "").replace("model.lm_head", "lm_head")
                )
                weight.data.copy_(engine.adapter_store.model.base_weight(name))
    prompt = oracle.prompt(3, 30)
    compare(engine, oracle, "", prompt)
    targets = ["q_proj", "k_proj", "down_proj", "lm_head"]
    [(name, adapted)] = adapt(oracle, tmp_path, {"dora": {"target_modules": targets, "use_dora": True}}, engine).items()
    compare(engine, adapted, name, prompt)


@pytest.mark.parametrize("family", ["qwen3.5 with shared keys", "lfm2", "lfm3", "gemma4 with keys as values"])
def test_unusual_models_take_adapters_of_all_layers(tmp_path: Path, family: str) -> None:
    oracle = text_oracle(make_family(tmp_path / "base", family))
    engine = engine_for(oracle, **SETTINGS)
    cases = {"lora": {"target_modules": ALL}, "dora": {"target_modules": ALL, "use_dora": True}}
    for name, adapted in adapt(oracle, tmp_path, cases, engine).items():
        compare(engine, adapted, name, oracle.prompt(3, 30))


def test_experts_take_adapters_of_attention_alone(tmp_path: Path) -> None:
    oracle = text_oracle(make_family(tmp_path / "base", "qwen3_moe"))
    engine = engine_for(oracle, **SETTINGS)
    targets = ["q_proj", "v_proj", "o_proj"]
    [(name, adapted)] = adapt(oracle, tmp_path, {"attention": {"target_modules": targets}}, engine).items()
    compare(engine, adapted, name, oracle.prompt(3, 30))
    path = tmp_path / "attention" / "adapter_model.safetensors"
    tensors = load_file(path)
    expert = "base_model.model.model.layers.0.mlp.experts.1.down_proj"
    tensors |= {f"{expert}.lora_A.weight": torch.ones(4, 32), f"{expert}.lora_B.weight": torch.ones(48, 4)}
    save_file(tensors, path)
    with pytest.raises(AdapterError, match=r"experts\.1\.down_proj.*adapters of experts and routers"):
        engine.adapter_store.load("experts", path.parent)
