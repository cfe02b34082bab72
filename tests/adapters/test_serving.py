"""Adapters that come and go while requests run: nobody is answered by another one's weights, and nothing leaks."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.adapters.test_parity import answers
from tests.checkpoints import make_llama
from tests.engine.test_parity import engine_for, text_oracle
from vlmserve.errors import AdapterError, ConfigurationError, UnknownModelError
from vlmserve.types import EngineRequest, SamplingParams


def write_adapter(folder, seed: int):
    """A random adapter of one layer, whose answers differ from those of other seeds."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    key = "base_model.model.model.layers.1.self_attn.v_proj"
    tensors = {f"{key}.lora_A.weight": torch.randn(2, 48, generator=random)}
    tensors[f"{key}.lora_B.weight"] = torch.randn(16, 2, generator=random)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8}))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model, adapters by number, and what the model and each of them answer."""
    folder = tmp_path_factory.mktemp("base")
    oracle = text_oracle(make_llama(folder))
    prompt = oracle.prompt(0, 20)
    engine = engine_for(oracle, enable_lora=True, max_loras=8)
    known = {"": answers(engine, [("", prompt)])[0]}
    for number in range(4):
        engine.adapter_store.load("a", write_adapter(folder / f"adapter-{number}", number))
        known[str(number)] = answers(engine, [("a", prompt)])[0]
    assert len({tuple(answer) for answer in known.values()}) == 5, "they can be told apart by their answers"
    return oracle, folder, prompt, known


def load(engine, name: str, folder) -> None:
    engine.load_adapter(7, name, str(folder))
    while not (finished := engine.finished_loads()):
        engine.step()
    [(number, error)] = finished
    assert number == 7
    if error is not None:
        raise error


OPERATIONS = st.one_of(
    st.tuples(st.just("load"), st.sampled_from("ab"), st.integers(0, 3)),
    st.tuples(st.just("unload"), st.sampled_from("ab")),
    st.tuples(st.just("ask"), st.sampled_from(["", "a", "b"])),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("step"), st.integers(1, 6)),
)


@pytest.fixture(scope="module")
def small(base):
    """An engine with room for few adapters, requests and blocks."""
    oracle = base[0]
    settings = {"max_loras": 1, "max_cpu_loras": 2, "max_num_seqs": 3, "block_size": 4, "kv_cache_memory": "100KiB"}
    return engine_for(oracle, enable_lora=True, **settings)


@given(st.lists(OPERATIONS, max_size=25))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_keep_the_adapter_they_named(base, small, operations):
    _, folder, prompt, known = base
    engine, served, expected, found = small, {}, {}, {}

    def step() -> None:
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += output.token_ids

    for number, (kind, *arguments) in enumerate(operations):
        if kind == "load":
            name, content = arguments
            engine.load_adapter(7, name, str(folder / f"adapter-{content}"))
            while not (finished := engine.finished_loads()):
                step()
            assert finished[0].error is None
            served[name] = str(content)
        elif kind == "unload" and arguments[0] in served:
            engine.unload_adapter(arguments[0])
            del served[arguments[0]]
        elif kind == "ask":
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            request = EngineRequest(str(number), prompt, params, adapter=arguments[0])
            if arguments[0] and arguments[0] not in served:
                with pytest.raises(UnknownModelError):
                    engine.add(request)
            else:
                engine.add(request)
                expected[str(number)], found[str(number)] = known[served.get(arguments[0], "")], []
        elif kind == "abort":
            engine.abort([str(arguments[0])])
            expected.pop(str(arguments[0]), None)
        elif kind == "step":
            for _ in range(arguments[0]):
                step()
    while engine.has_work():
        step()
    for number, answer in expected.items():
        assert found[number] == answer
    stats = engine.stats()
    assert stats.kv_blocks_used == stats.adapters_active == 0
    assert stats.adapters_loaded <= 2
    for name in served:
        engine.unload_adapter(name)
    assert engine.stats().adapters_loaded == 0, "nobody has what is served no more"


def test_more_adapters_than_slots_are_answered(base, tmp_path):
    oracle, _, prompt, _ = base
    count = 200
    engine = engine_for(oracle, enable_lora=True, max_loras=4, max_cpu_loras=8)
    for number in range(count):
        engine.adapter_store.load(str(number), write_adapter(tmp_path / str(number), 1000 + number))
    assert engine.stats().adapters_loaded == 8
    found = answers(engine, [(str(number), prompt) for number in range(count)], max_tokens=3)
    assert engine.stats().adapters_loaded <= 8
    assert engine.stats().adapter_evictions >= 2 * (count - 8) - 8
    alone = engine_for(oracle, enable_lora=True, max_loras=1)
    for number in (0, 99, 199):
        alone.adapter_store.load("alone", tmp_path / str(number))
        assert answers(alone, [("alone", prompt)], max_tokens=3) == [found[number]]


def test_requests_wait_for_no_other_requests_adapter(base, tmp_path):
    """A request for an adapter without a slot waits for one that runs; those behind it do not."""
    oracle, folder, prompt, _ = base
    engine = engine_for(oracle, enable_lora=True, max_loras=1)
    for name in ("0", "1"):
        engine.adapter_store.load(name, folder / f"adapter-{name}")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for name, adapter in (("runs", "0"), ("waits", "1"), ("overtakes", "")):
        engine.add(EngineRequest(name, prompt, params, adapter=adapter))
    order = []
    while engine.has_work():
        order += [output.request_id for output in engine.step() if output.finish_reason]
    assert order == ["runs", "overtakes", "waits"]


def test_replaced_adapters_meet_no_old_blocks(base, tmp_path):
    oracle, folder, prompt, known = base
    engine = engine_for(oracle, enable_lora=True, block_size=4)
    for content in ("0", "1", "0"):
        shutil.copytree(folder / f"adapter-{content}", tmp_path / "same", dirs_exist_ok=True)
        load(engine, "same", tmp_path / "same")
        before = engine.stats().prefix_cached_tokens
        assert answers(engine, [("same", prompt)]) == [known[content]]
    assert engine.stats().prefix_cached_tokens > before, "the first content again is what was cached"


def test_changed_files_fail_only_their_requests(base, tmp_path):
    oracle, folder, prompt, known = base
    engine = engine_for(oracle, enable_lora=True, max_loras=1, max_cpu_loras=1)
    shutil.copytree(folder / "adapter-0", tmp_path / "changed")
    load(engine, "changed", tmp_path / "changed")
    load(engine, "other", folder / "adapter-1")
    write_adapter(tmp_path / "changed", 77)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for name in ("changed", "other"):
        engine.add(EngineRequest(name, prompt, params, adapter=name))
    tokens, errors = [], {}
    while engine.has_work():
        for output in engine.step():
            tokens += output.token_ids
            if output.error is not None:
                errors[output.request_id] = output.error
    assert tokens == known["1"]
    assert list(errors) == ["changed"]
    assert "files have changed" in errors["changed"]
    assert engine.stats().kv_blocks_used == 0


def test_restored_files_are_read_again(base, tmp_path):
    oracle, folder, prompt, known = base
    engine = engine_for(oracle, enable_lora=True, max_loras=1, max_cpu_loras=1)
    shutil.copytree(folder / "adapter-0", tmp_path / "restored")
    load(engine, "restored", tmp_path / "restored")
    load(engine, "other", folder / "adapter-1")
    (tmp_path / "restored" / "adapter_model.safetensors").unlink()
    for _ in range(2):
        [failed] = [output for output in finish(engine, "restored", prompt) if output.error is not None]
        assert "cannot be read again" in failed.error
    shutil.copytree(folder / "adapter-0", tmp_path / "restored", dirs_exist_ok=True)
    assert answers(engine, [("restored", prompt)]) == [known["0"]]


def finish(engine, adapter: str, prompt):
    """The outputs of one request."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.add(EngineRequest("one", prompt, params, adapter=adapter))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def test_settings_that_do_not_fit_are_rejected(base):
    oracle, folder, _, _ = base
    path = folder / "adapter-0"
    for options, message in [
        ({"lora_modules": [f"a={path}"]}, "needs --enable-lora"),
        ({"enable_lora": True, "lora_modules": ["a"]}, "write name=path"),
        ({"enable_lora": True, "lora_modules": [f"a={path}", f"a={path}"]}, "two adapters 'a'"),
        ({"enable_lora": True, "lora_modules": ["a=/nowhere"]}, "a=/nowhere: /nowhere is no folder"),
        ({"enable_lora": True, "max_cpu_loras": 1}, "less than --max-loras 8"),
        ({"enable_lora": True, "lora_modules": [f"a={path}"], "lora_memory": 10}, "--lora-memory"),
        ({"enable_lora": True, "model_impl": "transformers"}, "takes no adapters"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            engine_for(oracle, **options)
    entry = json.dumps({"name": "b", "path": str(path)})
    engine = engine_for(oracle, enable_lora=True, lora_modules=[f"a={path}", entry])
    assert [adapter.name for adapter in engine.adapters] == ["a", "b"]
    with pytest.raises(AdapterError, match="printable"):
        engine.load_adapter(0, "\n", str(path))
