"""What an X-LoRA checkpoint mixes, changed while it is served: against PEFT, whose classifier has no outputs for the
adapters that are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.adapters.test_parity import answers, compare
from tests.checkpoints import make_llama
from tests.engine.test_parity import engine_for, text_oracle
from tests.peft_adapters import make_adapter, make_xlora, with_pool
from vlmserve.errors import AdapterError
from vlmserve.types import EngineRequest, SamplingParams

ALL = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
ADAPTERS = [{"target_modules": ALL}, {"target_modules": ["v_proj", "down_proj"], "r": 2}, {"target_modules": ALL}]
CASES = {
    "softmax": {"xlora_depth": 2, "softmax_temperature": 0.5},
    "layerwise, top k": {"layerwise_scalings": True, "top_k_lora": 2, "global_scaling_weight": 0.5},
    "softmax over top k": {"enable_softmax": False, "enable_softmax_topk": True, "top_k_lora": 1, "xlora_depth": 2},
    "another scaling pass": {"xlora_depth": 2, "scaling_pass_value": 0.4, "top_k_lora": 2, "layerwise_scalings": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """PEFT's opinion of the model, the folder of the checkpoints and of an adapter "other", and PEFT's checkpoints."""
    folder = tmp_path_factory.mktemp("pool")
    oracle = text_oracle(make_llama(folder))
    made = {}
    for seed, (name, config) in enumerate(CASES.items()):
        made[name] = make_xlora(oracle.model, folder / name, ADAPTERS, seed=10 * seed, **config)
    make_adapter(oracle.model, folder / "other", seed=70, target_modules=["q_proj", "down_proj"], r=3)
    make_adapter(oracle.model, folder / "gate", seed=71, target_modules=["gate_proj"])
    make_adapter(oracle.model, folder / "large", seed=72, target_modules=["q_proj"], r=9)
    return oracle, folder, made


@pytest.fixture(scope="module")
def engine(base):
    return engine_for(base[0], enable_lora=True, max_loras=6, max_lora_rank=8)


def change(engine, name, folder, pool) -> None:
    """As a server has an engine do it."""
    engine.load_adapter(3, name, str(folder / name), pool)
    while not (finished := engine.finished_loads()):
        engine.step()
    [(_, error)] = finished
    if error is not None:
        raise error


@pytest.mark.parametrize("case", CASES)
def test_leftover_requests_are_computed_as_if_alone(base, engine, case):
    oracle, folder, made = base
    prompt = oracle.prompt(3, 30)
    change(engine, case, folder, None)
    [first] = answers(engine, [(case, prompt)])
    for left in ([0, 2], [1, 2]) if case == "softmax" else ([0, 2],):
        pool = {str(number): "" for number in range(3) if number not in left}
        change(engine, case, folder, pool)
        folders = [folder / case / str(number) for number in left]
        model = with_pool(oracle.model, made[case], folders, left, **CASES[case])
        expected = replace(oracle, model=model, answers={})
        compare(engine, expected, case, prompt)
        assert answers(engine, [(case, prompt)]) == [expected.greedy(prompt, 8)]
    change(engine, case, folder, {"1": str(folder / case / "1")})
    assert answers(engine, [(case, prompt)]) == [first]


def test_another_adapter_takes_the_place_of_one(base, engine):
    oracle, folder, made = base
    case, prompt = "layerwise, top k", oracle.prompt(5, 30)
    change(engine, case, folder, {"1": str(folder / "other")})
    folders = [folder / case / "0", folder / "other", folder / case / "2"]
    expected = with_pool(oracle.model, made[case], folders, [0, 1, 2], **CASES[case])
    compare(engine, replace(oracle, model=expected), case, prompt)


def test_layers_keep_scalings_when_adapters_leave(base, engine):
    """PEFT would count other layers then, so its classifier says nothing for the one that is left out instead."""
    oracle, folder, _ = base
    adapters = [{"target_modules": ["v_proj", "up_proj"]}, {"target_modules": ["q_proj", "down_proj"]}]
    config = {"layerwise_scalings": True, "xlora_depth": 1}
    model = make_xlora(oracle.model, folder / "apart", adapters, seed=80, **config)
    change(engine, "apart", folder, {"1": ""})
    [*_, last] = model.base_model.internal_xlora_classifier.layers
    last.bias.data.view(-1, 2)[:, 1] = -1e9
    compare(engine, replace(oracle, model=model), "apart", oracle.prompt(6, 30))


@pytest.mark.parametrize(
    ("case", "pool", "message"),
    [
        ("softmax", {"3": ""}, "no output for '3', only for 0, 1, 2"),
        ("softmax", {"0": "", "1": "", "2": ""}, "0 of 3 adapters would be left, and at least 1 is needed"),
        ("layerwise, top k", {"0": "", "1": ""}, "1 of 3 adapters would be left, and top_k_lora chooses 2"),
        ("layerwise, top k", {"0": "gate"}, "no scalings for .*gate_proj, which one of the adapters changes"),
        ("softmax", {"0": "large"}, "rank is 9, and at most 8 is allowed"),
        ("softmax", {"0": "softmax"}, "is no folder with an adapter"),
        ("softmax", {"0": "nowhere"}, "nowhere is no folder with an adapter"),
        ("other", {"0": ""}, "is no X-LoRA checkpoint"),
    ],
)
def test_impossible_classifier_changes_are_rejected(base, engine, case, pool, message):
    _, folder, _ = base
    change(engine, case, folder, None)
    before = engine.adapter_store[case]
    with pytest.raises(AdapterError, match=message):
        change(engine, case, folder, {name: path and str(folder / path) for name, path in pool.items()})
    assert engine.adapter_store[case] is before


@pytest.mark.parametrize("case", ["softmax", "another scaling pass"])
def test_requests_keep_their_first_mix(base, case):
    oracle, folder, _ = base
    engine = engine_for(oracle, enable_lora=True, max_loras=3, block_size=4)
    prompt = oracle.prompt(7, 20)

    def cached() -> tuple[int, list[int]]:
        before = engine.stats().prefix_cached_tokens
        [found] = answers(engine, [(case, prompt)])
        return engine.stats().prefix_cached_tokens - before, found

    change(engine, case, folder, None)
    (none, first), (whole, again) = cached(), cached()
    assert (none, whole, again) == (0, len(prompt.token_ids) - 1, first)
    change(engine, case, folder, {"0": ""})
    assert engine.adapters[0].mixes == ["1", "2"]
    none, second = cached()
    assert none == 0, "what was computed with another pool is not used"
    assert second != first
    change(engine, case, folder, {})
    assert cached() == (whole, first)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = {"before": [], "after": []}
    engine.add(EngineRequest("before", prompt, params, adapter=case))
    for step in range(30):
        if step == 2:
            engine.adapter_store.load(case, folder / case, {"0": ""})
            engine.add(EngineRequest("after", prompt, params, adapter=case))
        for output in engine.step() if engine.has_work() else ():
            assert output.error is None
            found[output.request_id] += output.token_ids
    assert found == {"before": first, "after": second}
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().adapters_loaded == 1, "of pools that nobody has nothing is kept"


def test_an_evicted_pool_is_read_again(base):
    oracle, folder, _ = base
    engine = engine_for(oracle, enable_lora=True, max_loras=1, max_cpu_loras=1)
    prompt = oracle.prompt(8, 20)
    change(engine, "softmax", folder, {"2": "", "0": str(folder / "other")})
    [expected] = answers(engine, [("softmax", prompt)])
    engine.adapter_store.load("other", folder / "other")
    answers(engine, [("other", prompt)])
    loads = engine.stats().adapter_loads
    assert answers(engine, [("softmax", prompt)]) == [expected]
    assert engine.stats().adapter_loads > loads
