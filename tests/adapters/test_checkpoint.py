"""What is refused, by name, and that nothing is loaded then."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_llama
from tests.engine.test_parity import engine_for, text_oracle
from tests.peft_adapters import make_adapter
from vlmserve.adapters.checkpoint import AdapterCheckpoint, LoraConfig
from vlmserve.errors import AdapterError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    oracle = text_oracle(make_llama(folder))
    make_adapter(oracle.model, folder / "good", target_modules=["q_proj", "down_proj"])
    return folder, engine_for(oracle, enable_lora=True, max_lora_rank=8)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def edit_tensors(change):
    def edit(folder):
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return edit


def edit_config(**fields):
    def edit(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return edit


def _pickle(folder):
    torch.save({}, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


def _put(key, *shape, value=0.0):
    return edit_tensors(lambda tensors: tensors.__setitem__(key, torch.full(shape, value)))


def _both(first, second):
    def edit(folder):
        first(folder)
        second(folder)

    return edit


BAD = {
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json cannot be read"),
    "broken config": (lambda folder: (folder / "adapter_config.json").write_text("{"), "not valid JSON"),
    "pickle": (_pickle, "a pickle, adapter_model.bin, which could run code"),
    "broken weights": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 64), "is broken"),
    "another kind": (edit_config(peft_type="VERA"), "type 'VERA' is not supported"),
    "activated": (edit_config(alora_invocation_tokens=[1]), "alora_invocation_tokens is set"),
    "unknown field": (edit_config(use_new_thing=True), "use_new_thing is not supported"),
    "changed base": (edit_config(init_lora_weights="pissa"), "init_lora_weights 'pissa' changes the base model"),
    "bad pattern": (edit_config(rank_pattern={"(": 4}), "no regular expression"),
    "pattern with lookahead": (edit_config(alpha_pattern={"(?=q)q": 4}), "alpha_pattern: .* lookaround"),
    "long pattern": (edit_config(rank_pattern={"a" * 501: 4}), "has 501 characters; at most 500"),
    "huge pattern": (edit_config(rank_pattern={r"\w{500}": 4}), "is too large"),
    "set operators": (edit_config(rank_pattern={"[a&&b]": 4}), "no regular expression"),
    "rank 0": (edit_config(r=0), "r is 0; a rank is at least 1"),
    "rank 0 by pattern": (edit_config(rank_pattern={"q_proj": 0}), r"rank_pattern\['q_proj'\] is 0"),
    "infinite rank": (edit_config(r=float("inf")), "does not describe an adapter"),
    "huge alpha": (edit_config(lora_alpha=1e30), r"lora_alpha is 1e\+30; allowed are"),
    "NaN alpha": (edit_config(lora_alpha=float("nan")), "lora_alpha is nan"),
    "NaN alpha by pattern": (edit_config(alpha_pattern={"q": float("nan")}), "alpha_pattern.* is nan"),
    "patterns in a list": (edit_config(rank_pattern=["q_proj"]), "does not describe an adapter"),
    "tokens of no list": (edit_config(trainable_token_indices={"embed": 1}), "does not describe an adapter"),
    "deep config": (lambda folder: (folder / "adapter_config.json").write_text("[" * 10**5), "not valid JSON"),
    "infinity": (_put(f"{Q}.lora_A.weight", 4, 48, value=float("inf")), "not finite"),
    "huge values": (_put(f"{Q}.lora_B.weight", 48, 4, value=1e30), "holds values beyond 65504"),
    "huge values when scaled": (
        _both(_put(f"{Q}.lora_B.weight", 48, 4, value=100.0), edit_config(lora_alpha=60000)),
        "lora_B times its scale holds values beyond",
    ),
    "rank of the config": (edit_config(r=5), r"has shape \(4, .*it would be \(5, "),
    "large rank": (edit_config(r=9), "rank is 9, and at most 8 is allowed; --max-lora-rank"),
    "nan": (_put(f"{Q}.lora_A.weight", 4, 48, value=float("nan")), "not finite"),
    "wrong base": (_put(f"{Q}.lora_B.weight", 99, 4), r"shape \(99, 4\), and for this model it would be \(48, 4\)"),
    "one factor": (edit_tensors(lambda tensors: tensors.pop(f"{Q}.lora_B.weight")), "only one of its two factors"),
    "unknown layer": (_put("base_model.model.model.layers.9.mlp.up_proj.weight", 2, 2), "has no layer model.layers.9"),
    "norm": (_put("base_model.model.model.norm.weight", 48), "adapters of model.norm are not supported"),
    "bias": (_put(f"{Q}.base_layer.bias", 48), "has no bias in this model"),
    "unknown tensor": (_put(f"{Q}.lora_C", 2), "is a tensor that vlmserve does not know"),
    "magnitude": (edit_config(use_dora=True), "lacks its lora_magnitude_vector"),
    "integers": (edit_tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 48).long()})), "type I64"),
    "resized": (
        _put("base_model.model.lm_head.base_layer.weight", 3, 48), "lm_head.base_layer.weight has shape",
    ),
    "other embeddings": (
        edit_tensors(lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.randn(_VOCAB, 48)})),
        "is not the weight of this model",
    ),
}  # fmt: skip
_VOCAB = 0


@pytest.mark.parametrize("case", BAD)
def test_a_bad_adapter_loads_nothing(base, tmp_path, case):
    global _VOCAB
    folder, engine = base
    _VOCAB = engine.info.vocab_size
    for path in (folder / "good").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    edit, message = BAD[case]
    edit(tmp_path)
    with pytest.raises(AdapterError, match=message):
        engine.adapter_store.load("bad", tmp_path)
    assert "bad" not in engine.adapter_store.names
    engine.adapter_store.load("good", folder / "good")


def test_a_huge_tensor_is_refused_by_its_header(base, tmp_path):
    """Of 10 GB that the file claims and a sparse file has, nothing is read."""
    folder, engine = base
    (tmp_path / "adapter_config.json").write_text((folder / "good" / "adapter_config.json").read_text())
    size = 10 * 10**9 // 192 * 192
    header = json.dumps(
        {f"{Q}.lora_A.weight": {"dtype": "F32", "shape": [size // 192, 48], "data_offsets": [0, size]}}
    ).encode()
    with (tmp_path / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    with pytest.raises(AdapterError, match="only one of its two factors"):
        engine.adapter_store.load("huge", tmp_path)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("location.MAX_HEADER_BYTES", r"safetensors has a header of [\d,]+ bytes; at most 2 are supported"),
        ("checkpoint.MAX_TENSORS", r"safetensors has [\d,]+ tensors; at most 2 are supported"),
        ("checkpoint.MAX_KEY", r"has [\d,]+ characters; a tensor's name has at most 2"),
    ],
)
def test_many_tensors_and_long_names_are_rejected(base, monkeypatch, limit, message):
    folder, _ = base
    AdapterCheckpoint(folder / "good")
    monkeypatch.setattr(f"vlmserve.adapters.{limit}", 2)
    with pytest.raises(AdapterError, match=message):
        AdapterCheckpoint(folder / "good")


def test_scales_are_those_of_peft():
    config = LoraConfig.parse(
        {"r": 8, "lora_alpha": 4, "rank_pattern": {"q_proj": 2, ".*q_proj": 3}, "alpha_pattern": {"layers.1.mlp.up": 6}}
    )
    assert config.rank_of("model.layers.0.q_proj") == 2, "the first that fits"
    assert config.rank_of("model.layers.0.xq_proj") == 3, "a whole name, or a regular expression"
    assert config.scale_of("model.layers.0.k_proj") == 0.5
    assert config.scale_of("model.layers.1.mlp.up") == 0.75
    assert LoraConfig.parse({"r": 16, "lora_alpha": 4, "use_rslora": True}).scale_of("x") == 1


@pytest.mark.parametrize("pattern", [r"(?:\w+\.?)+x", "(a|aa)+$", r"(.*)*(.*)*(.*)*z", r"([a-z.0-9_]+)*#"])
def test_a_backtracking_pattern_takes_linear_time(pattern):
    """Python's re would need minutes for each name."""
    config = LoraConfig.parse({"rank_pattern": {pattern: 2}, "alpha_pattern": {pattern: 2}})
    began = time.thread_time()
    for layer in range(50):
        assert config.rank_of(f"model.{'a' * 40}.layers.{layer}.self_attn.q_proj") == 8
        assert config.scale_of(f"model.{'a' * 40}.layers.{layer}.self_attn.q_proj") == 1
    assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    "pattern", ["q_proj", r"layers\.[0-3]\..*", ".*q_proj", "^model.layers.1.*", "a|.*b", "(?i:Q_PROJ)", "$"]
)
@pytest.mark.parametrize("name", ["q_proj", "model.layers.1.self_attn.q_proj", "x.aq_proj", "model.b", "a", "ba", ""])
def test_patterns_match_as_in_peft(pattern, name):
    expected = 2 if re.match(rf"(.*\.)?({pattern})$", name) else 8
    assert LoraConfig.parse({"rank_pattern": {pattern: 2}}).rank_of(name) == expected


def test_many_slow_patterns_are_refused(monkeypatch):
    monkeypatch.setattr("vlmserve.adapters.patterns.MAX_SECONDS", 0.5)
    slow = {rf"\w{{200}}{number}": 4 for number in range(100)}
    with pytest.raises(AdapterError, match="rank_pattern: its patterns take longer than"):
        LoraConfig.parse({"rank_pattern": slow})


def test_the_digest_covers_configuration_and_every_value(base, tmp_path):
    folder, _ = base
    before = AdapterCheckpoint(folder / "good").digest()
    for path in (folder / "good").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert AdapterCheckpoint(tmp_path).digest() == before, "wherever it is"
    edit_config(lora_alpha=99)(tmp_path)
    assert AdapterCheckpoint(tmp_path).digest() != before
    edit_config(lora_alpha=8, base_model_name_or_path="elsewhere")(tmp_path)
    assert AdapterCheckpoint(tmp_path).digest() == before
    edit_tensors(lambda tensors: tensors[f"{Q}.lora_B.weight"][-1, -1].add_(1e-3))(tmp_path)
    assert AdapterCheckpoint(tmp_path).digest() != before
