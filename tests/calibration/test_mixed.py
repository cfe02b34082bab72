"""Bits of layers within a budget of memory, by what fewer of them cost."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.checkpoints import change_tensors, make_llama
from tests.models.test_quantized import GROUPS_FIT
from tests.paged import PagedRun
from vlmserve.calibration import process
from vlmserve.calibration.mixed import Choice, SensitivityPass, assign, choose_bits
from vlmserve.calibration.quantizing import quantize_checkpoint
from vlmserve.engine import calibrated
from vlmserve.engine.loading import load
from vlmserve.errors import ConfigurationError
from vlmserve.models.estimate import MemoryEstimate
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import load_model
from vlmserve.quant.methods.rtn import round_to_nearest
from vlmserve.settings.config import EngineConfig
from vlmserve.settings.quantization import QuantizationConfig, Scheme
from vlmserve.types import Prompt

SCHEMES: tuple[Scheme, ...] = ("none", "int8", "int4")
CPU = torch.device("cpu")
PROMPTS = [
    Prompt(torch.randint(0, 50, (30,), generator=torch.Generator().manual_seed(seed)).tolist()) for seed in (0, 1)
]


def nothing(done: int, total: int) -> None:
    pass


def choice_of(size: int, to_int8: float, to_int4: float) -> Choice:
    sizes: dict[Scheme, int] = {"none": 4 * size, "int8": 2 * size, "int4": size}
    return Choice(sizes, {"none": 0.0, "int8": to_int8, "int4": to_int8 + to_int4})


choices = st.lists(
    st.builds(choice_of, st.integers(1, 30), st.floats(0, 1), st.floats(0, 10)), min_size=1, max_size=5
).map(lambda some: {str(number): one for number, one in enumerate(some)})


def total(choices: dict[str, Choice], chosen: dict[str, Scheme]) -> tuple[int, float]:
    return (
        sum(one.sizes[chosen[name]] for name, one in choices.items()),
        sum(one.errors[chosen[name]] for name, one in choices.items()),
    )


@given(choices, st.floats(0, 1))
def test_budget_holds_with_near_minimal_error(choices: dict[str, Choice], share: float) -> None:
    plain = sum(one.sizes["none"] for one in choices.values())
    budget = plain - int(share * (plain - plain // 4))
    size, error = total(choices, assign(choices, plain - budget))
    assert size <= budget
    combinations = itertools.product(SCHEMES, repeat=len(choices))
    every = [total(choices, dict(zip(choices, each, strict=True))) for each in combinations]
    # Of divisible layers the steps in that order are the best; the last one may save more than was needed.
    largest = max(max(one.errors.values()) for one in choices.values())
    assert error <= min(other for size, other in every if size <= budget) + largest + 1e-9


def test_what_cannot_be_saved_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"--weight-memory: the weights take at least 2\.0 MB more"):
        assign({"a": choice_of(1_000_000, 0, 0)}, 5_000_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which one MLP has inputs, and down projection, that are far larger than those of the others."""
    folder = make_llama(tmp_path_factory.mktemp("models") / "plain", **GROUPS_FIT, tie_word_embeddings=True)

    def make_loud(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        return name, tensor * 30 if name.endswith("layers.1.post_attention_layernorm.weight") else tensor

    change_tensors(folder, make_loud)
    return folder


def test_errors_are_those_of_the_layers_outputs(folder: Path, tmp_path: Path) -> None:
    config = QuantizationConfig(scheme="int8", image_weight=1.0)
    errors = SensitivityPass(folder, tmp_path / "out", config, dict.fromkeys(PROMPTS, 1.0)).measure(nothing)
    model = load_model(folder, LoadSettings(device=CPU, dtype=torch.float32, kernels="torch")).language_model
    layer = model.layers[1].mlp.gate_up_proj
    seen: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].double()))
    with torch.inference_mode():
        for prompt in PROMPTS:
            PagedRun(model, [model.embed(torch.tensor(prompt.token_ids))]).finish([len(prompt.token_ids)])
    weight = load_file(folder / "model.safetensors")
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
    plain = torch.cat([weight[name] for name in names])
    for scheme, bits in (("int8", 8), ("int4", 4)):
        difference = round_to_nearest(plain, bits=bits, group_size=32, symmetric=False).dequantize().double() - plain
        expected = 2 * (torch.cat(seen) @ difference.T).square().sum(1).mean()
        assert errors["language_model.layers.1.mlp.gate_up_proj"][scheme] == pytest.approx(float(expected), rel=1e-2)
    assert "language_model.embed_tokens" not in errors


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_mixed_model_fits_and_keeps_important_bits(folder: Path, tmp_path: Path, method: Any) -> None:
    estimate = MemoryEstimate(folder, CPU)
    few, many = (estimate.weights(QuantizationConfig(scheme=scheme)) for scheme in ("int4", "int8"))
    budget = (few + 2 * many) // 3
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "a b c d"}\n{"prompt": "e f g"}\n')
    how = QuantizationConfig(
        weight_memory=budget, method=method, calibration=str(data), layers=("*.layers.2.mlp.down_proj=none",)
    )
    stages: list[float] = []
    _, notes = quantize_checkpoint(
        folder, tmp_path / "out", how, "auto", lambda done, total: stages.append(done / total)
    )
    assert stages == sorted(stages)
    assert stages[-1] == 1
    assert notes[0].endswith("1 unquantized")
    model = load_model(tmp_path / "out", LoadSettings(device=CPU))
    assert 0.8 * budget < model.weight_bytes <= 1.03 * budget
    bits = {name: getattr(module, "bits", None) for name, module in model.language_model.named_modules()}
    assert bits["layers.1.mlp.down_proj"] == 8
    assert bits["layers.2.mlp.down_proj"] is None
    assert bits["embed_tokens"] == 8
    assert 4 in bits.values()


def test_small_budget_error_names_the_shortfall(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"the weights take at least .* MB more"):
        choose_bits(
            folder,
            tmp_path / "out",
            QuantizationConfig(weight_memory=1000),
            dict.fromkeys(PROMPTS, 1.0),
            "auto",
            nothing,
        )


def test_a_server_keeps_what_it_has_chosen(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(calibrated, "run_job", lambda job: process.make_copy(job, nothing))
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "a b c d"}\n')
    budget = MemoryEstimate(folder, CPU).weights(QuantizationConfig(scheme="int8")) - 1000
    config = EngineConfig(model=str(folder), weight_memory=budget, quantize_calibration=str(data))
    assert load(config).weight_bytes <= 1.03 * budget
    monkeypatch.setattr(calibrated, "run_job", None)
    assert load(config).weight_bytes <= 1.03 * budget
