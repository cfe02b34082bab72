"""Calibrated checkpoints: what they compute, in every family, and what happens when something goes wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoints import change_tensors, make_llama, make_llava
from tests.models.test_families import FAMILIES, ONLY_POSITIONS, make
from tests.paged import PagedRun
from vlmserve.calibration import run
from vlmserve.calibration.forward import encode_images
from vlmserve.calibration.run import Calibration, Result
from vlmserve.errors import ConfigurationError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.layers.linear import Linear
from vlmserve.models.expert_choices import ExpertChoices
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.quantized import save_quantized
from vlmserve.models.registry import load_model
from vlmserve.quant.calibration import Observer
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import MediaConfig
from vlmserve.settings.quantization import QuantizationConfig, QuantizeMethod
from vlmserve.types import Prompt

CPU = torch.device("cpu")
GROUPS_FIT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
NOT_ALONE = ("gemma4", "gemma4 without sharing", "gemma4 with keys as values")
"""Layers that read keys of others, embeddings of their own or keys as values, so that they cannot be calibrated."""
METHODS: list[QuantizeMethod] = ["gptq", "awq", "awq+gptq"]


def random_prompts(count: int = 12, length: int = 40, seed: int = 0) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length, (count,), generator=generator).tolist()
    return [Prompt(torch.randint(0, 50, (length,), generator=generator).tolist()) for length in lengths]


PROMPTS = random_prompts()
TOKENS = torch.tensor(random_prompts(1, 90, seed=1)[0].token_ids)


def calibrate(
    folder: Path,
    out: Path,
    config: QuantizationConfig,
    prompts: list[Prompt] = PROMPTS,
    *,
    image_weight: float = 1.0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Result:
    config = config.model_copy(update={"image_weight": image_weight})
    return Calibration(folder, out, config, dict.fromkeys(prompts, 1.0)).run(progress)


def logits(folder: Path, tokens: Tensor = TOKENS, **options: Any) -> Tensor:
    model = load_model(folder, LoadSettings(device=CPU, dtype=torch.float32, **options)).language_model
    with torch.inference_mode():
        return PagedRun(model, [model.embed(tokens)]).finish([len(tokens)])[0]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_transformers_computes_the_same_with_what_was_written(
    tmp_path: Path, method: QuantizeMethod, tied: bool
) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT, tie_word_embeddings=tied, attention_bias=True)
    # That library cannot load a tied table that is quantized.
    rules = ("*.embed_tokens=none",) if tied else ()
    config = QuantizationConfig(scheme="int4", method=method, symmetric=True, layers=rules)
    calibrate(folder, tmp_path / "out", config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        expected = model(input_ids=TOKENS[None]).logits[0]
    torch.testing.assert_close(logits(tmp_path / "out", kernels="torch"), expected, atol=2e-2, rtol=0)
    assert not torch.allclose(expected, logits(folder), atol=0.1)


HYBRIDS = ("qwen3.5 with shared keys", "lfm2", "lfm3")


@pytest.mark.parametrize("name", [*(name for name in FAMILIES if name not in ONLY_POSITIONS + NOT_ALONE), *HYBRIDS])
def test_factors_cancel_out_in_every_family(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "plain", name)
    config = QuantizationConfig(scheme="int8", method="awq+gptq")
    result = calibrate(folder, tmp_path / "out", config)
    save_quantized(folder, tmp_path / "rounded", config)
    plain = logits(folder)
    moved = [(logits(tmp_path / name, kernels="torch") - plain).norm() for name in ("out", "rounded")]
    assert moved[0] < 1.5 * moved[1] < 0.15 * plain.norm()
    assert result.errors
    assert max(result.errors.values()) < 1e-3


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("mixtral", "awq+gptq"),
        ("mixtral", "smoothquant"),
        ("qwen3.5 with experts", "awq+gptq"),
        ("gemma4 with experts", "awq+gptq"),
    ],
)
def test_factors_cancel_out_in_experts(tmp_path: Path, name: str, method: QuantizeMethod) -> None:
    folder = make(tmp_path / "plain", name)
    config = QuantizationConfig(scheme="int8", method=method)
    weighted = {prompt: 1.0 + number % 2 for number, prompt in enumerate(random_prompts(60))}
    result = Calibration(folder, tmp_path / "out", config, weighted).run()
    save_quantized(folder, tmp_path / "rounded", config)
    choices = ExpertChoices()
    with choices.record():
        plain = logits(folder, kernels="torch")
    moved = []
    for copy in ("out", "rounded"):
        with choices.replay([(0, len(TOKENS))]):
            moved.append((logits(tmp_path / copy, kernels="torch") - plain).norm())
    assert moved[0] < 1.5 * moved[1] < 0.15 * plain.norm()
    assert any(".experts." in layer for layer in result.errors)
    assert max(result.errors.values()) < 1e-3


def test_folds_name_the_experts_own_layers(tmp_path: Path) -> None:
    folder = make(tmp_path, "gemma4 with experts")
    layer = load_model(folder, LoadSettings(device=CPU, dtype=torch.float32)).language_model.layers[0]
    consumers = [name for fold in layer.folds() for name in fold.consumers if ".experts." in name]
    assert len(consumers) == 8
    assert all(isinstance(layer.get_submodule(name), Linear) for name in consumers)


def test_awq_puts_factors_into_norms_and_layers(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT)
    calibrate(folder, tmp_path / "out", QuantizationConfig(scheme="int8", method="awq"))
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    for norm in ("input_layernorm", "post_attention_layernorm"):
        assert not torch.equal(after[f"model.layers.0.{norm}.weight"], before[f"model.layers.0.{norm}.weight"])
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])


@pytest.mark.parametrize("method", METHODS)
def test_outputs_move_less_than_by_rounding(tmp_path: Path, method: QuantizeMethod) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT)

    def make_loud(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """Few inputs are far larger than the others, as in trained models."""
        if name.endswith("layernorm.weight"):
            tensor = tensor.clone()
            tensor[::17] *= 12
        return name, tensor

    change_tensors(folder, make_loud)
    prompts = random_prompts(60)
    tokens = torch.tensor(prompts[0].token_ids + prompts[1].token_ids)
    config = QuantizationConfig(scheme="int4", method=method)
    calibrate(folder, tmp_path / "out", config, prompts)
    save_quantized(folder, tmp_path / "rounded", config)
    plain = logits(folder, tokens)
    moved = [(logits(tmp_path / name, tokens, kernels="torch") - plain).norm() for name in ("out", "rounded")]
    assert moved[0] < 0.9 * moved[1]


def image_prompts(folder: Path, count: int) -> list[Prompt]:
    preparer = RequestPreparer(folder, read_settings(MediaConfig, {}))
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (42, 42, 3), generator=generator).byte().numpy() for _ in range(count)]
    return [preparer.text(f"<image> a b c {number}", [image], allow_local=True) for number, image in enumerate(images)]


def test_a_vision_tower_is_calibrated_with_images(tmp_path: Path) -> None:
    folder = make_llava(tmp_path / "plain", text=GROUPS_FIT, published_names=True, vision={"num_hidden_layers": 3})
    prompts = image_prompts(folder, 8)
    for name, method in (("out", "gptq"), ("rounded", "rtn")):
        config = QuantizationConfig(scheme="int4", method=method, vision=True)
        rules = ("*.layers.*=int8", "multi_modal_projector.*=int8")
        config = config.model_copy(update={"scheme": "int8", "layers": rules})
        run = calibrate if method == "gptq" else save_quantized
        run(folder, tmp_path / name, config, *([prompts] if method == "gptq" else []))
    towers = [
        load_model(tmp_path / name, LoadSettings(device=CPU, dtype=torch.float32, kernels="torch"))
        for name in ("plain", "out", "rounded")
    ]
    with torch.inference_mode():
        plain, out, rounded = (
            torch.cat([rows for _, rows in encode_images(one.vision, one.device, prompts, torch.float32)])
            for one in towers
        )
    assert 0 < (out - plain).norm() < (rounded - plain).norm()


def test_tokens_of_images_can_count_less(tmp_path: Path) -> None:
    folder = make_llava(tmp_path / "plain", text=GROUPS_FIT)
    prompts = image_prompts(folder, 6)
    config = QuantizationConfig(scheme="int4", method="gptq")
    for weight in (1.0, 0.1):
        calibrate(folder, tmp_path / str(weight), config, prompts, image_weight=weight)
    one, less = (tensors_of(tmp_path / str(weight)) for weight in (1.0, 0.1))
    name = next(name for name in one if name.endswith("layers.0.mlp.down_proj.weight_packed"))
    assert not torch.equal(one[name], less[name])


def test_doubled_weight_equals_two_prompts(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT)
    config = QuantizationConfig(scheme="int4", method="gptq")
    first, *others = PROMPTS
    weighted = {first: 2.0, **dict.fromkeys(others, 1.0)}
    repeated = dict.fromkeys([first, Prompt(first.token_ids), *others], 1.0)
    found = [
        Calibration(folder, tmp_path / name, config, prompts).run().errors
        for name, prompts in (("weighted", weighted), ("repeated", repeated), ("once", dict.fromkeys(PROMPTS, 1.0)))
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0] != pytest.approx(found[2], rel=1e-3)


class Interrupted(Exception):
    pass


def interrupting(at: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done == at:
            raise Interrupted

    return progress


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, QuantizationConfig, Any]:
    """A folder with a checkpoint and what a whole run makes of it, how, and what the run says."""
    base = tmp_path_factory.mktemp("uninterrupted")
    config = QuantizationConfig(scheme="int4", method="awq+gptq")
    return base, config, calibrate(make_llama(base / "plain", **GROUPS_FIT), base / "whole", config)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupted_run_goes_on_where_it_was(
    uninterrupted: tuple[Path, QuantizationConfig, Any], tmp_path: Path, at: int
) -> None:
    base, config, expected = uninterrupted
    folder = base / "plain"
    with pytest.raises(Interrupted):
        calibrate(folder, tmp_path / "out", config, progress=interrupting(at))
    seen: list[int] = []
    result = calibrate(folder, tmp_path / "out", config, progress=lambda done, total: seen.append(done))
    assert seen[0] == at
    assert result == expected
    whole, out = tensors_of(base / "whole"), tensors_of(tmp_path / "out")
    assert whole.keys() == out.keys()
    assert all(torch.equal(out[name], tensor) for name, tensor in whole.items())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in (base / "whole").iterdir()}


def test_unfinished_folder_rejects_other_settings(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT)
    with pytest.raises(Interrupted):
        calibrate(folder, tmp_path / "out", QuantizationConfig(scheme="int4", method="gptq"), progress=interrupting(2))
    with pytest.raises(ConfigurationError, match="other settings"):
        calibrate(folder, tmp_path / "out", QuantizationConfig(scheme="int8", method="gptq"))
    with pytest.raises(ConfigurationError, match="other settings"):
        calibrate(folder, tmp_path / "out", QuantizationConfig(scheme="int4", method="gptq"), random_prompts(seed=5))


def test_unfinished_folder_takes_the_same_prompts_from_elsewhere(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT)
    config = QuantizationConfig(scheme="int4", method="gptq", calibration="prompts.jsonl")
    with pytest.raises(Interrupted):
        calibrate(folder, tmp_path / "out", config, progress=interrupting(2))
    seen: list[int] = []
    moved = config.model_copy(update={"calibration": str(tmp_path / "prompts.jsonl")})
    calibrate(folder, tmp_path / "out", moved, progress=lambda done, total: seen.append(done))
    assert seen[0] == 2


def test_rarely_chosen_experts_are_rounded(tmp_path: Path) -> None:
    folder = make(tmp_path / "plain", "mixtral")
    result = calibrate(folder, tmp_path / "out", QuantizationConfig(scheme="int8", method="awq+gptq"), PROMPTS[:1])
    expert = r"model\.layers\.\d\.mlp\.experts\.\d\.\w+: (no input was|\d inputs were) seen, so it was rounded"
    found = [note for note in result.notes if re.search(expert, note)]
    assert found
    assert all(note.partition(":")[0] not in result.errors for note in found)


def test_experts_observed_in_turn_become_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "plain", "qwen3.5 with experts")
    config = QuantizationConfig(scheme="int8", method="awq+gptq")
    at_once = calibrate(folder, tmp_path / "at once", config, PROMPTS[:1])
    monkeypatch.setattr(run, "EXPERTS_BYTES", 3 * 4 * 48**2)
    observed: list[int] = []

    def observer(modules: Mapping[str, Linear]) -> Observer:
        observed.append(len(modules))
        return Observer(modules)

    monkeypatch.setattr(run, "Observer", observer)
    in_turn = calibrate(folder, tmp_path / "in turn", config, PROMPTS[:1])
    assert len(observed) > 2 * 3
    assert in_turn.errors == at_once.errors
    for file in (tmp_path / "at once").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "in turn" / file.name).read_bytes()


def test_unrelated_folder_is_rejected(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="new or an empty folder"):
        calibrate(folder, tmp_path / "out", QuantizationConfig(scheme="int4", method="gptq"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_nan_model_is_rounded_with_a_warning(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT)

    def break_norm(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        return name, torch.full_like(tensor, torch.nan) if name.endswith("layers.1.input_layernorm.weight") else tensor

    change_tensors(folder, break_norm)
    config = QuantizationConfig(scheme="int4", method="awq+gptq")
    result = calibrate(folder, tmp_path / "out", config)
    assert any("layers.1.self_attn.qkv_proj" in note and "rounded to nearest" in note for note in result.notes)
    save_quantized(folder, tmp_path / "rounded", config)
    out, rounded = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "rounded")
    name = "model.layers.1.mlp.down_proj.weight_packed"
    assert torch.equal(out[name], rounded[name])


def test_inputs_that_are_always_zero_are_reported(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT)

    def silence(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        if name.endswith("layers.0.mlp.up_proj.weight"):
            tensor = tensor.clone()
            tensor[[3, 5]] = 0
        return name, tensor

    change_tensors(folder, silence)
    result = calibrate(folder, tmp_path / "out", QuantizationConfig(scheme="int4", method="gptq"))
    assert result.notes == ["language_model.layers.0.mlp.down_proj: 2 of 96 inputs were always zero"]


def test_overrides_mix_8_and_4_bits(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT, shard_size="60KB")
    rules = ("*.layers.1.*=int8", "*.down_proj=none")
    config = QuantizationConfig(scheme="int4", method="awq+gptq", layers=rules)
    calibrate(folder, tmp_path / "out", config)
    tensors = tensors_of(tmp_path / "out")
    widths = {
        name: tensors[f"model.layers.{name}.weight_packed"].shape[1] for name in ("0.mlp.up_proj", "1.mlp.up_proj")
    }
    assert widths == {"0.mlp.up_proj": 8, "1.mlp.up_proj": 16}
    assert "model.layers.0.mlp.down_proj.weight" in tensors
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert torch.isfinite(logits(tmp_path / "out")).all()


def test_no_prompts_are_an_error(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT)
    with pytest.raises(ConfigurationError, match="at least one prompt"):
        calibrate(folder, tmp_path / "out", QuantizationConfig(scheme="int4", method="gptq"), [])


@pytest.mark.parametrize("name", NOT_ALONE)
def test_layers_that_read_other_inputs_are_not_calibrated(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "plain", name)
    with pytest.raises(ConfigurationError, match="cannot be calibrated"):
        calibrate(folder, tmp_path / "out", QuantizationConfig(scheme="int8", method="gptq"))
