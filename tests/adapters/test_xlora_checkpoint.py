"""X-LoRA checkpoints in both layouts, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters.test_checkpoint import edit_config, edit_tensors
from tests.adapters.test_parity import answers, compare
from tests.checkpoints import make_llama
from tests.engine.test_parity import engine_for, text_oracle
from tests.peft_adapters import make_adapter, make_xlora
from vlmserve.errors import AdapterError
from vlmserve.types import EngineRequest, SamplingParams

ADAPTERS = [{"target_modules": ["q_proj", "down_proj"]}, {"target_modules": ["v_proj"], "r": 2}]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    oracle = text_oracle(make_llama(folder))
    model = make_xlora(oracle.model, folder / "good", ADAPTERS, xlora_depth=2, layerwise_scalings=True)
    engine = engine_for(oracle, enable_lora=True, max_lora_rank=8)
    engine.adapter_store.load("good", folder / "good")
    return replace(oracle, model=model), folder, engine


def as_mistral_has_it(source, target, *, relu: bool, ordered: bool = True) -> None:
    """A checkpoint of PEFT in mistral.rs' layout, its adapters under names and in an order of their own."""
    target.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    kept = {key: value for key, value in config.items() if key.startswith(("xlora", "layerwise", "hidden", "enable"))}
    kept |= {"base_model_id": "base", "use_bias": True, "enable_relu_and_dropout": relu}
    paths = {"first": "someone/model/experts/a/", "second": "someone/model/experts/b/"}
    kept["adapters"] = dict(reversed(paths.items())) if ordered else paths
    (target / "xlora_config.json").write_text(json.dumps(kept))
    for number, name in enumerate("ab"):
        shutil.copytree(source / str(number), target / "experts" / name)
    tensors = load_file(source / "adapter_model.safetensors")
    numbers = sorted({int(key.split(".")[-2]) for key in tensors})
    names = {number: f"inner.{place}" for place, number in enumerate(numbers)} | {numbers[-1]: "last"}
    renamed = {f"{names[int(key.split('.')[-2])]}.{key.split('.')[-1]}": value for key, value in tensors.items()}
    save_file(renamed, target / "xlora_classifier.safetensors")
    if ordered:
        layers = [f"model.layers.{layer}.{part}" for layer in range(3) for part in
                  ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")]  # fmt: skip
        content = {"order": ["first", "second"], "layers": {name: place for place, name in enumerate(layers)}}
        (target / "x-ordering.json").write_text(json.dumps({**content, "base_model_id": "base"}))


@pytest.mark.parametrize("ordered", [True, False], ids=["with an ordering file", "without"])
def test_the_layout_of_mistral_rs_is_read(base, tmp_path, ordered):
    oracle, folder, engine = base
    as_mistral_has_it(folder / "good", tmp_path / "mistral", relu=True, ordered=ordered)
    engine.adapter_store.load("mistral", tmp_path / "mistral")
    compare(engine, oracle, "mistral", oracle.prompt(3, 30))


def test_relu_comes_with_its_flag_only(base, tmp_path):
    oracle, folder, engine = base
    as_mistral_has_it(folder / "good", tmp_path / "mistral", relu=False)
    engine.adapter_store.load("mistral", tmp_path / "mistral")
    classifier = oracle.model.base_model.internal_xlora_classifier
    products = [layer for layer in classifier.layers if isinstance(layer, torch.nn.Linear)]
    before, classifier.layers = classifier.layers, torch.nn.Sequential(*products)
    try:
        compare(engine, oracle, "mistral", oracle.prompt(3, 30))
    finally:
        classifier.layers = before


def test_adapters_are_found_beside_the_checkpoint_as_well(base, tmp_path):
    """As PEFT leaves them: the configuration has their paths, and where they would be it writes the classifier."""
    _, folder, engine = base
    shutil.copytree(folder / "good", tmp_path / "mixed")
    junk = load_file(folder / "good" / "adapter_model.safetensors")
    for number in "01":
        (tmp_path / "mixed" / number).rename(tmp_path / f"expert-{number}")
        shutil.copytree(tmp_path / f"expert-{number}", tmp_path / "mixed" / number)
        save_file(junk, tmp_path / "mixed" / number / "adapter_model.safetensors")
    paths = {number: str(tmp_path / f"expert-{number}") for number in "01"}
    edit_config(adapters=paths)(tmp_path / "mixed")
    engine.adapter_store.load("beside", tmp_path / "mixed")
    [beside, good] = [info for info in engine.adapters if info.name in ("beside", "good")][::-1]
    assert {beside.digest} == {good.digest}, "wherever they are"
    edit_config(adapters={number: "/" for number in "01"})(tmp_path / "mixed")
    with pytest.raises(AdapterError, match="no adapter '0': put it into the folder '0'"):
        engine.adapter_store.load("nowhere", tmp_path / "mixed")


def _drop_layer(tensors):
    for key in [key for key in tensors if ".layers.0." in key]:
        del tensors[key]


def _expert(number, **config):
    """Another adapter in place of one."""

    def edit(folder):
        make_adapter(_oracle.model, folder / str(number), **config)

    return edit


_oracle = None
BAD = {
    "no classifier": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safe"),
    "as PEFT saves it": (edit_tensors(_drop_layer), "1 of the classifier's 2 layers; PEFT's save_pretrained"),
    "broken classifier": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"1" * 30), "is broken"),
    "another tensor": (edit_tensors(lambda t: t.update(head=torch.ones(2))), "head is no tensor of a classifier"),
    "nan": (edit_tensors(lambda t: t[min(t)].fill_(float("nan"))), "not finite"),
    "other sizes": (edit_tensors(lambda t: t.update({max(t): torch.ones(18, 5)})), "do not fit each other"),
    "fewer outputs": (edit_config(layerwise_scalings=False), "has 18 outputs, but needs 2: one for each of 2 adapters"),
    "hidden size": (edit_config(hidden_size=64), "hidden_size is 64, and this model's is 48"),
    "top k": (edit_config(top_k_lora=3), "top_k_lora must be 1 to 2"),
    "temperature": (edit_config(softmax_temperature=0), "softmax_temperature must be above 0"),
    "pass value": (edit_config(scaling_pass_value="much"), "does not describe an X-LoRA model"),
    "unknown field": (edit_config(use_new_thing=1), "not supported: use_new_thing"),
    "no adapters": (edit_config(adapters={}), "names no adapters"),
    "names": (edit_config(adapters={"a": "a", "b": "b"}), 'adapters must have the names "0" to "1", not a, b'),
    "too many": (edit_config(adapters={str(number): "" for number in range(65)}), "at most 64 can be mixed"),
    "no adapter": (lambda folder: shutil.rmtree(folder / "1"), "no adapter '1'"),
    "outside": (
        lambda folder: (shutil.move(folder / "1", folder.parent.parent / "1"), (folder / "1").symlink_to("../../1")),
        "no adapter '1'",
    ),
    "dora": (_expert(1, target_modules=["v_proj"], use_dora=True), "adapter 1: .*only low-rank changes"),
    "bias": (_expert(0, target_modules=["q_proj"], lora_bias=True), "adapter 0: .*only low-rank changes"),
    "modules": (_expert(1, target_modules=["v_proj"], modules_to_save=["lm_head"]), "adapter 1: .*only low-rank"),
    "head": (_expert(1, target_modules=["lm_head"]), "lm_head is not one of them"),
    "rank": (_expert(0, target_modules=["q_proj"], r=9), "rank is 9, and at most 8 is allowed"),
    "other layers": (_expert(0, target_modules=["q_proj"]), "has 18 outputs, but needs 12: one for each"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_loads_nothing(base, tmp_path, case):
    global _oracle
    oracle, folder, engine = base
    _oracle = replace(oracle, model=text_oracle(folder).model)
    shutil.copytree(folder / "good", tmp_path / "around" / "bad")
    edit, message = BAD[case]
    edit(tmp_path / "around" / "bad")
    with pytest.raises(AdapterError, match=message):
        engine.adapter_store.load("bad", tmp_path / "around" / "bad")
    assert "bad" not in engine.adapter_store.names


def test_the_digest_covers_classifier_configuration_and_adapters(base, tmp_path):
    _, folder, engine = base

    def digest() -> bytes:
        return engine.adapter_store.load("copy", tmp_path / "copy").digest

    shutil.copytree(folder / "good", tmp_path / "copy")
    found = [digest()]
    assert found == [engine.adapter_store["good"].digest]
    for edit in (
        edit_config(softmax_temperature=0.5),
        edit_tensors(lambda tensors: tensors[max(tensors)].add_(1e-3)),
        lambda folder: edit_tensors(lambda tensors: tensors[max(tensors)].add_(1e-3))(folder / "1"),
    ):
        edit(tmp_path / "copy")
        found.append(digest())
    assert len(set(found)) == 4
    edit_config(base_model_name_or_path="elsewhere")(tmp_path / "copy")
    assert digest() == found[-1]
    engine.adapter_store.unload("copy")


def test_checkpoints_come_and_go_while_requests_run(base, tmp_path):
    """A request keeps what its name stood for when it came, in both passes."""
    oracle, folder, engine = base
    make_xlora(text_oracle(folder).model, tmp_path / "other", ADAPTERS, seed=9, xlora_depth=2, scaling_pass_value=0.5)
    prompt = oracle.prompt(4, 20)
    store = engine.adapter_store
    other = store.load("name", tmp_path / "other")
    assert store.scaling_pass(other) is not None
    [second] = answers(engine, [("name", prompt)])
    engine.adapter_store.load("name", folder / "good")
    [first] = answers(engine, [("name", prompt)])
    assert first != second
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = {"before": [], "after": []}
    engine.add(EngineRequest("before", prompt, params, adapter="name"))
    for step in range(40):
        if step == 2:
            engine.adapter_store.load("name", tmp_path / "other")
            engine.add(EngineRequest("after", prompt, params, adapter="name"))
        if step == 4:
            engine.unload_adapter("name")
        for output in engine.step() if engine.has_work() else ():
            assert output.error is None
            found[output.request_id] += output.token_ids
    assert found == {"before": first, "after": second}
    assert engine.stats().kv_blocks_used == 0
    assert store.scaling_pass(other) is None, "of what is served no more nothing is kept"
    assert store.scaling_pass(store["good"]) is not None
