"""SmoothQuant: what is written, and what it is for, products with inputs that are rounded to 8 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.calibration.test_run import GROUPS_FIT, calibrate, logits, random_prompts, tensors_of
from tests.checkpoints import change_tensors, make_llama
from tests.oracles.rounded_inputs import DOTS, logits_of_rounded_inputs
from vlmserve.errors import ConfigurationError
from vlmserve.layers.linear import Linear
from vlmserve.layers.norm import RMSNorm
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.quantized import save_quantized
from vlmserve.models.registry import load_model
from vlmserve.quant.calibration import Fold, Target, quantize_layers
from vlmserve.quant.statistics import InputStatistics
from vlmserve.settings.config import EngineConfig
from vlmserve.settings.quantization import QuantizationConfig

CPU = torch.device("cpu")
CONFIG = QuantizationConfig(scheme="int8", method="smoothquant", layers=("*.embed_tokens=none",))
PROMPTS = random_prompts(30)
TOKENS = torch.tensor(PROMPTS[0].token_ids + PROMPTS[1].token_ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which few inputs are far larger than the others, as in trained ones."""
    folder = make_llama(tmp_path_factory.mktemp("models") / "plain", **GROUPS_FIT, tie_word_embeddings=True)

    def make_loud(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        if name.endswith("layernorm.weight"):
            tensor = tensor.clone()
            tensor[::17] *= 10
        return name, tensor

    change_tensors(folder, make_loud)
    return folder


@pytest.fixture(scope="module")
def smoothed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "smoothed"
    calibrate(folder, out, CONFIG, PROMPTS)
    return out


def their_logits(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=TOKENS[None]).logits[0]


def test_rounded_inputs_cost_less(folder: Path, smoothed: Path, tmp_path: Path) -> None:
    plain = their_logits(AutoModelForCausalLM.from_pretrained(folder))
    save_quantized(folder, tmp_path / "rounded", CONFIG.model_copy(update={"method": "rtn"}))
    # That library rounds inputs by itself where the configuration says so.
    out = their_logits(AutoModelForCausalLM.from_pretrained(smoothed, dtype=torch.float32))
    assert (out - plain).norm() < 0.9 * (logits_of_rounded_inputs(tmp_path / "rounded", TOKENS) - plain).norm()
    assert not torch.allclose(out, logits(smoothed, TOKENS, kernels="torch"), atol=1e-3)


def rounded_to_8_bits(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def test_factors_go_from_inputs_into_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(64, 1e-5, dtype=torch.float32, device=torch.device("cpu"))
    layer = Linear(64, 48, bias=False, dtype=torch.float32, device=torch.device("cpu"))
    norm.weight.data.uniform_(0.5, 1.5, generator=generator)
    norm.weight.data[::17] *= 40
    layer.weight.data.normal_(generator=generator)
    x, weight = torch.randn(300, 64, generator=generator), layer.weight.data.clone()
    inputs = norm(x)
    expected = inputs @ weight.T
    statistics = InputStatistics(64)
    statistics.add(inputs)
    fold = Fold(("layer",), norm=norm)
    outcome = quantize_layers({"layer": Target(layer, 8)}, [fold], {"layer": statistics}, CONFIG)
    assert outcome.changed == [norm]
    assert (norm(x) @ layer.weight.T - expected).norm() < 0.02 * expected.norm()
    usual = rounded_to_8_bits(inputs) @ rounded_to_8_bits(weight).T - expected
    smooth = rounded_to_8_bits(norm(x)) @ outcome.weights["layer"].dequantize().T - expected
    assert smooth.norm() < 0.4 * usual.norm()


@pytest.mark.skipif(not DOTS, reason="no instruction here adds the products of bytes up")
def test_inputs_have_8_bits_where_kernels_round_them(folder: Path, smoothed: Path, tmp_path: Path) -> None:
    save_quantized(folder, tmp_path / "rounded", CONFIG.model_copy(update={"method": "rtn"}))
    exact = logits(tmp_path / "rounded", TOKENS, kernels="torch")
    expected = logits_of_rounded_inputs(tmp_path / "rounded", TOKENS)
    config = QuantizationConfig(scheme="w8a8", layers=CONFIG.layers)
    ours = logits(folder, TOKENS, kernels="native", quantization=config)
    assert (ours - expected).norm() < 0.3 * (expected - exact).norm()
    cases: list[tuple[Path, dict[str, Any], int]] = [
        (smoothed, {}, 8),
        (folder, {"quantization": config}, 8),
        (tmp_path / "rounded", {}, 16),
    ]
    for path, options, bits in cases:
        decoder = load_model(
            path, LoadSettings(device=CPU, dtype=torch.float32, kernels="native", **options)
        ).language_model
        assert decoder.layers[0].mlp.down_proj.kept().product.settings["input_bits"] == bits


def test_smoothquant_writes_w8a8_checkpoint(smoothed: Path) -> None:
    config = json.loads((smoothed / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "int-quantized")
    group = config["config_groups"]["group_0"]
    assert group["weights"]["num_bits"] == group["input_activations"]["num_bits"] == 8
    assert group["input_activations"]["dynamic"]
    tensors = tensors_of(smoothed)
    name = "model.layers.0.mlp.down_proj"
    assert tensors[f"{name}.weight"].dtype == torch.int8
    assert tensors[f"{name}.weight_scale"].shape == (64, 1)
    assert tensors["model.embed_tokens.weight"].dtype == torch.float32


def test_4_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="smoothquant is for 8 bits"):
        QuantizationConfig(scheme="int8", method="smoothquant", layers=("*.down_proj=int4",))


def test_w8a8_is_8_bits_by_rounding_or_smoothing() -> None:
    for method in ("rtn", "smoothquant"):
        config = EngineConfig(quantize="w8a8", quantize_method=method).quantization
        assert (config.usual, config.rounds_inputs) == ("int8", True)
    assert not EngineConfig(quantize="int8").quantization.rounds_inputs
    with pytest.raises(ValueError, match="to round inputs of others, use quantize w8a8"):
        EngineConfig(quantize="int8", input_bits=8)
    with pytest.raises(ConfigurationError, match="w8a8 goes with the methods rtn and smoothquant"):
        _ = EngineConfig(quantize="w8a8", quantize_method="gptq").quantization


@pytest.mark.parametrize("options", [{"quantize": "w8a8"}, {"quantize_method": "smoothquant"}])
def test_8_bit_inputs_reject_a_weight_memory(options: Any) -> None:
    with pytest.raises(ConfigurationError, match="are for 8 bits: leave the memory for weights out"):
        _ = EngineConfig(weight_memory="1GiB", **options).quantization
