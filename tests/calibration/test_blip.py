"""Calibrated BLIP checkpoints beside transformers: decoders that attend to images, or to questions about them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.blip import BEGIN, CLASSES, VOCABULARY, BlipOracle, make_blip
from tests.calibration.test_run import Interrupted, calibrate, interrupting, tensors_of
from tests.checkpoints import change_tensors
from tests.normalized import normalized
from tests.oracles import calibrated_weights as published
from tests.paged import PagedRun
from vlmserve.calibration.forward import encode_images
from vlmserve.calibration.mixed import SensitivityPass
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.quantized import save_quantized
from vlmserve.models.registry import load_model
from vlmserve.quant.grid import Grid
from vlmserve.quant.methods.rtn import round_to_nearest
from vlmserve.settings.quantization import QuantizationConfig, QuantizeMethod, Scheme
from vlmserve.types import Prompt

GROUPS_FIT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
DECODER, QUESTIONS = "text_decoder.bert.encoder.layer.", "text_encoder.encoder.layer."
CROSS = [f"{index}.crossattention.self.{part}" for index in (0, 1) for part in ("key", "value")]
LAYERS = {
    "language_model.cross_states": [DECODER + name for name in CROSS],
    "language_model.layers.1.self_attn.qkv_proj": [
        f"{DECODER}1.attention.self.{part}" for part in ("query", "key", "value")
    ],
    "language_model.layers.0.cross_attn.q_proj": [f"{DECODER}0.crossattention.self.query"],
    "language_model.layers.1.cross_attn.o_proj": [f"{DECODER}1.crossattention.output.dense"],
    "language_model.layers.1.mlp.down_proj": [f"{DECODER}1.output.dense"],
    "language_model.head_transform.dense": ["text_decoder.cls.predictions.transform.dense"],
    "vision_tower.encoder.layers.1.mlp.fc2": ["vision_model.encoder.layers.1.mlp.fc2"],
    "text_encoder.cross_states": [QUESTIONS + name for name in CROSS],
    "text_encoder.layers.1.cross_attn.o_proj": [f"{QUESTIONS}1.crossattention.output.dense"],
    "text_encoder.layers.1.mlp.down_proj": [f"{QUESTIONS}1.output.dense"],
}
"""Some layers, with those of transformers that they consist of."""


@pytest.fixture(scope="module", params=CLASSES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BlipOracle:
    folder = make_blip(tmp_path_factory.mktemp("blip"), request.param, text=GROUPS_FIT, intermediate_size=64)
    generator = torch.Generator().manual_seed(3)

    def change(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """Biases that are not zero, and values of which few are far larger than the others."""
        if name.endswith("bias"):
            tensor = tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        elif name.endswith("crossattention.self.value.weight"):
            tensor = tensor.clone()
            tensor[::11] *= 8
        return name, tensor

    change_tensors(folder, change)
    return BlipOracle.of(folder, request.param)


def prompts_of(oracle: BlipOracle, numbers: range) -> list[Prompt]:
    """Each about an image of its own, with a text that the decoder writes."""
    random = np.random.default_rng(numbers.start)
    prompts = [oracle.prompt(number, int(random.integers(2, 12)), number) for number in numbers]
    written = [[BEGIN, *random.integers(5, VOCABULARY, 2 + number % 15).tolist()] for number in numbers]
    return [msgspec.structs.replace(one, token_ids=ids) for one, ids in zip(prompts, written, strict=True)]


@pytest.fixture(scope="module")
def prompts(oracle: BlipOracle) -> list[Prompt]:
    return prompts_of(oracle, range(30))


@pytest.fixture(scope="module")
def inputs(oracle: BlipOracle, prompts: list[Prompt]) -> dict[str, Tensor]:
    """float64: what goes into each linear layer of transformers' model, by its name there."""
    model = oracle.model.double()
    seen: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, name=name: seen.setdefault(name, []).append(args[0].flatten(0, -2))
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.inference_mode():
        for prompt in prompts:
            assert prompt.cross is not None
            pixels = torch.from_numpy(normalized(prompt.cross.image)).double()
            states = model.vision_model(pixels).last_hidden_state
            if prompt.cross.token_ids:
                asked = torch.tensor([prompt.cross.token_ids])
                states = model.text_encoder(asked, encoder_hidden_states=states).last_hidden_state
            model.text_decoder(torch.tensor([prompt.token_ids]), encoder_hidden_states=states)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows) for name, rows in seen.items()}


def logits(folder: Path, prompts: list[Prompt]) -> Tensor:
    model = load_model(folder, LoadSettings(device=torch.device("cpu"), dtype=torch.float32, kernels="torch"))
    decoder = model.language_model
    assert model.vision is not None
    assert model.cross is not None
    asked = [prompt.cross for prompt in prompts if prompt.cross is not None]
    with torch.inference_mode():
        images = dict(encode_images(model.vision, model.device, prompts, torch.float32))
        states = model.cross.encode([images[one.image.key] for one in asked], [one.token_ids for one in asked])
        sequences = [decoder.embed(torch.tensor(prompt.token_ids)) for prompt in prompts]
        return torch.cat(PagedRun(decoder, sequences, cross_states=states).finish([len(one) for one in sequences]))


def test_errors_are_those_of_transformers_layers(
    oracle: BlipOracle, prompts: list[Prompt], inputs: dict[str, Tensor], tmp_path: Path
) -> None:
    config = QuantizationConfig(scheme="int8", vision=True)
    run = SensitivityPass(oracle.folder, tmp_path / "out", config, dict.fromkeys(prompts, 1.0))
    errors = run.measure(lambda done, total: None)
    weights = tensors_of(oracle.folder)
    schemes: list[tuple[Scheme, int]] = [("int8", 8), ("int4", 4)]
    named = {name: theirs for name, theirs in LAYERS.items() if theirs[0] in inputs}
    assert len(named) == (7 if oracle.kind == "caption" else len(LAYERS))
    for name, theirs in named.items():
        for scheme, bits in schemes:
            expected = 0.0
            for layer in theirs:
                plain = weights[f"{layer}.weight"]
                rounded = round_to_nearest(plain, bits=bits, group_size=32, symmetric=False).dequantize()
                expected += float(2 * (inputs[layer] @ (rounded - plain).double().T).square().sum(1).mean())
            assert errors[name][scheme] == pytest.approx(expected, rel=1e-3), name
    assert not any(".kv_proj" in name for name in errors)


def unpacked(tensors: Mapping[str, Tensor], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Integers from 0 to 15, and scales, of a weight of 4 bits."""
    packed = tensors[f"{name}.weight_packed"]
    values = torch.stack([packed >> 4 * place & 15 for place in range(8)], -1).flatten(1)
    return values.numpy(), tensors[f"{name}.weight_scale"].double().numpy()


def test_gptq_gives_the_integers_of_the_published_algorithm(
    oracle: BlipOracle, prompts: list[Prompt], inputs: dict[str, Tensor], tmp_path: Path
) -> None:
    config = QuantizationConfig(scheme="int4", method="gptq", symmetric=True)
    calibrate(oracle.folder, tmp_path / "out", config, prompts)
    written, plain = tensors_of(tmp_path / "out"), tensors_of(oracle.folder)
    # What these layers get is not changed by others that are quantized.
    for name in ("1.crossattention.self.value", "0.crossattention.output.dense"):
        weight = plain[f"{DECODER}{name}.weight"]
        scales = Grid.fit(weight, bits=4, group_size=32, symmetric=True).scales.double().numpy()
        h = published.hessian(inputs[DECODER + name].numpy())
        expected = published.gptq(weight.double().numpy(), h, scales, -8 * scales, 32, 4, 0.01)
        values, stored = unpacked(written, DECODER + name)
        np.testing.assert_allclose(stored, scales, rtol=1e-6)
        assert (values == expected).mean() > 0.999
        assert (np.round(weight.double().numpy() / scales.repeat(32, 1)) + 8 != expected).mean() > 0.1


@pytest.mark.parametrize("oracle", ["caption"], indirect=True)
def test_awqs_factors_go_from_values_into_what_follows(
    oracle: BlipOracle, prompts: list[Prompt], inputs: dict[str, Tensor], tmp_path: Path
) -> None:
    calibrate(oracle.folder, tmp_path / "out", QuantizationConfig(scheme="int4", method="awq", symmetric=True), prompts)
    written, plain = tensors_of(tmp_path / "out"), tensors_of(oracle.folder)
    prefix = f"{DECODER}0.crossattention."
    key, value = f"{prefix}self.key.bias", f"{prefix}self.value.bias"
    assert torch.equal(written[key], plain[key])
    factors = (plain[value] / written[value]).double().numpy()
    weight = plain[f"{prefix}output.dense.weight"].double().numpy()
    seen = inputs[f"{prefix}output.dense"].numpy()
    losses = {}
    for number, tried in enumerate(candidates := published.awq_candidates(weight, seen, 32)):
        grid = Grid.fit(torch.from_numpy(weight * tried), bits=4, group_size=32, symmetric=True)
        restored = published.rounded(weight * tried, grid.scales.numpy(), grid.minimums.numpy(), 32)
        losses[number] = (((seen / tried) @ restored.T - seen @ weight.T) ** 2).mean()
    best = min(losses, key=lambda number: losses[number])
    np.testing.assert_allclose(factors, candidates[best], rtol=1e-3)


@pytest.mark.parametrize("oracle", ["caption"], indirect=True)
def test_transformers_computes_the_same_with_what_was_written(
    oracle: BlipOracle, prompts: list[Prompt], tmp_path: Path
) -> None:
    rules = ("*.embed_tokens=none",)
    config = QuantizationConfig(scheme="int4", method="gptq", symmetric=True, layers=rules)
    calibrate(oracle.folder, tmp_path / "out", config, prompts[:8])
    theirs = type(oracle.model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    for prompt in prompts[:2]:
        assert prompt.cross is not None
        pixels = torch.from_numpy(normalized(prompt.cross.image))
        with torch.inference_mode():
            expected = theirs(pixel_values=pixels, input_ids=torch.tensor([prompt.token_ids])).logits[0]
        torch.testing.assert_close(logits(tmp_path / "out", [prompt]), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("scheme", "method"), [("int4", "gptq"), ("int8", "gptq")])
def test_logits_move_less_than_by_rounding(
    oracle: BlipOracle, prompts: list[Prompt], tmp_path: Path, scheme: Scheme, method: QuantizeMethod
) -> None:
    others = prompts_of(oracle, range(100, 110))
    config = QuantizationConfig(scheme=scheme, method=method, vision=scheme == "int8")
    result = calibrate(oracle.folder, tmp_path / "out", config, prompts)
    save_quantized(oracle.folder, tmp_path / "rounded", config)
    plain = logits(oracle.folder, others)
    out, rounded = (logits(tmp_path / name, others) - plain for name in ("out", "rounded"))
    assert out.norm() < 0.92 * rounded.norm()
    assert not result.notes
    assert ("text_encoder.layers.1.mlp.up_proj" in result.errors) == (scheme == "int8" and oracle.kind == "question")
    assert "language_model.head_transform.dense" in result.errors


@pytest.mark.parametrize(("oracle", "at"), [("caption", 1), ("question", 2)], indirect=["oracle"])
def test_interrupted_run_resumes_with_attended_inputs(
    oracle: BlipOracle, prompts: list[Prompt], tmp_path: Path, at: int
) -> None:
    config = QuantizationConfig(scheme="int4", method="gptq")
    expected = calibrate(oracle.folder, tmp_path / "whole", config, prompts[:8])
    with pytest.raises(Interrupted):
        calibrate(oracle.folder, tmp_path / "out", config, prompts[:8], progress=interrupting(at))
    assert calibrate(oracle.folder, tmp_path / "out", config, prompts[:8]) == expected
    whole, out = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "out")
    assert whole.keys() == out.keys()
    assert all(torch.equal(out[name], tensor) for name, tensor in whole.items())
    assert not list((tmp_path / "out").glob("*.unfinished"))
