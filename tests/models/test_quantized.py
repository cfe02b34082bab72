"""Quantized checkpoints: written, read again, and read as the library whose format they have reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from typer.testing import CliRunner

from tests.checkpoints import make_llama, make_llava
from tests.paged import PagedRun
from vlmserve.calibration.run import Calibration
from vlmserve.cli import app
from vlmserve.errors import ConfigurationError, MissingWeightsError, ModelLoadError, UnsupportedModelError
from vlmserve.kernels.extension import supported_isas
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.layers.linear import Linear
from vlmserve.models.decoder import Decoder
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.quantized import save_quantized
from vlmserve.models.registry import load_model
from vlmserve.quant.formats.compressed_tensors import from_tensors, to_tensors
from vlmserve.quant.formats.layout import pack, unpack
from vlmserve.quant.methods.rtn import round_to_nearest
from vlmserve.settings.quantization import QuantizationConfig, QuantizeMethod
from vlmserve.types import Prompt

CPU = torch.device("cpu")
KERNELS = ["torch", *(["native"] if supported_isas() else [])]
GROUPS_FIT: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
TOKENS = torch.randint(0, 50, (19,), generator=torch.Generator().manual_seed(0))


def logits(folder: Path, **options: Any) -> Tensor:
    model = load_model(folder, LoadSettings(device=CPU, dtype=torch.float32, **options)).language_model
    with torch.inference_mode():
        return PagedRun(model, [model.embed(TOKENS)]).finish([len(TOKENS)])[0]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "config",
    [
        QuantizationConfig(scheme="int8"),
        QuantizationConfig(scheme="int4"),
        QuantizationConfig(scheme="int4", zero_points=True),
        QuantizationConfig(
            scheme="int4",
            symmetric=True,
            layers=("*.layers.1.*=int8", "*.down_proj=none"),
        ),
    ],
    ids=["int8", "int4", "zero points", "mixed"],
)
def test_saved_models_equal_those_quantized_at_load(
    tmp_path: Path, config: QuantizationConfig, tied: bool, kernels: str
) -> None:
    folder = make_llama(
        tmp_path / "plain", **GROUPS_FIT, tie_word_embeddings=tied, attention_bias=True, shard_size="60KB"
    )
    done = []
    saving = save_quantized(folder, tmp_path / "saved", config, lambda *progress: done.append(progress))
    assert saving.after < saving.before
    assert done[-1][0] == done[-1][1] == len(done)
    actual = logits(tmp_path / "saved", kernels=kernels)
    assert torch.equal(actual, logits(folder, kernels=kernels, quantization=config))
    assert not torch.allclose(actual, logits(folder, kernels=kernels), atol=1e-2)
    assert sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors")) >= saving.after


def test_a_saved_vlm_keeps_its_tower(tmp_path: Path) -> None:
    folder = make_llava(tmp_path / "plain", text=GROUPS_FIT, published_names=True)
    save_quantized(folder, tmp_path / "saved", QuantizationConfig(scheme="int8", vision=True))
    files = {path.name for path in folder.iterdir()}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == files
    pixels = torch.randn(1, 3, 42, 42, generator=torch.Generator().manual_seed(0))
    config = QuantizationConfig(scheme="int8", vision=True)
    saved, at_load = (
        load_model(place, LoadSettings(device=CPU, dtype=torch.float32, quantization=choice)).vision
        for place, choice in ((tmp_path / "saved", None), (folder, config))
    )
    assert saved is not None
    assert at_load is not None
    with torch.inference_mode():
        assert torch.equal(saved.encode([pixels])[0], at_load.encode([pixels])[0])


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_transformers_reads_a_saved_model(tmp_path: Path, scheme: str) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT, tie_word_embeddings=False)
    save_quantized(folder, tmp_path / "saved", QuantizationConfig(scheme=scheme, symmetric=True))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    with torch.inference_mode():
        expected = model(input_ids=TOKENS[None]).logits[0]
    torch.testing.assert_close(logits(tmp_path / "saved", kernels="torch"), expected, atol=2e-2, rtol=0)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_transformers_reads_zero_points(tmp_path: Path, method: QuantizeMethod) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT, tie_word_embeddings=False)
    # That library dequantizes all layers by one scheme, and without dequantizing takes no packed zero points at all.
    config = QuantizationConfig(scheme="int4", method=method, zero_points=True, layers=("*.lm_head=none",))
    if method == "rtn":
        save_quantized(folder, tmp_path / "saved", config)
    else:
        prompts = {Prompt(TOKENS.tolist()): 1.0}
        Calibration(folder, tmp_path / "saved", config, prompts).run()
    stored = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "compressed-tensors"
    dequantize = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, quantization_config=dequantize
    )
    with torch.inference_mode():
        expected = model(input_ids=TOKENS[None]).logits[0]
    ours = logits(tmp_path / "saved", kernels="torch")
    # It computes weights in the scales' type, bfloat16.
    assert (ours - expected).norm() < 0.01 * expected.norm()
    assert (logits(folder) - expected).norm() > 0.05 * expected.norm()


def scheme_of(bits: int, columns: int, *, symmetric: bool) -> QuantizationScheme:
    groups = {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": columns // 2}
    return QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=bits, symmetric=symmetric, **groups)
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "columns"), [(4, 64), (4, 36), (8, 64), (8, 37)])
def test_packed_tensors_come_back_as_they_were(bits: int, columns: int, symmetric: bool) -> None:
    weight = round_to_nearest(
        torch.randn(21, columns, generator=torch.Generator().manual_seed(0)),
        bits=bits,
        group_size=columns // 2,
        symmetric=symmetric,
    )
    assert torch.equal(unpack(pack(weight.values, bits), bits, columns), weight.values)
    tensors = to_tensors(weight, symmetric=symmetric)
    assert torch.equal(from_tensors(tensors, [columns // 2]).dequantize(), weight.dequantize())
    if symmetric:
        unpacked = PackedQuantizationCompressor.decompress(tensors, scheme_of(bits, columns, symmetric=True))
        # The library computes in the scales' type.
        torch.testing.assert_close(unpacked["weight"].float(), weight.dequantize(), atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("columns", [64, 36])
def test_the_library_unpacks_zero_points(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(21, columns, generator=generator) + 0.7
    rounded = round_to_nearest(weight, bits=4, group_size=columns // 2, symmetric=False, zero_points=True)
    tensors = to_tensors(rounded, symmetric=False, zero_points=True)
    assert torch.equal(from_tensors(tensors, [columns // 2]).dequantize(), rounded.dequantize())
    unpacked = PackedQuantizationCompressor.decompress(tensors, scheme_of(4, columns, symmetric=False))
    torch.testing.assert_close(unpacked["weight"].float(), rounded.dequantize(), atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("bits", "columns", "symmetric"), [(4, 64, False), (4, 32, True), (8, 37, True), (8, 64, False)]
)
def test_tensors_that_the_library_packed_are_read(bits: int, columns: int, symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = 2 if bits == 4 else 1
    state = {
        "weight": torch.randn(21, columns, generator=generator),
        "weight_scale": torch.rand(21, groups, generator=generator) + 0.1,
        "weight_zero_point": torch.zeros(21, groups, dtype=torch.int8),
    }
    if not symmetric:
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
        state["weight_zero_point"] = torch.randint(low, high, (21, groups), generator=generator).to(torch.int8)
    scheme = scheme_of(bits, columns, symmetric=symmetric)
    packed = PackedQuantizationCompressor.compress(state, scheme)
    expected = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    torch.testing.assert_close(from_tensors(packed, [columns // 2]).dequantize(), expected, atol=1e-5, rtol=1e-5)


def quantized_llama(folder: Path, change: Any) -> Path:
    """An int8 checkpoint whose tensors and quantization_config went through `change`."""
    plain = make_llama(folder / "plain", **GROUPS_FIT)
    save_quantized(plain, folder / "saved", QuantizationConfig(scheme="int8"))
    weights, config_file = folder / "saved/model.safetensors", folder / "saved/config.json"
    config, tensors = json.loads(config_file.read_text()), load_file(weights)
    change(tensors, config["quantization_config"])
    save_file(tensors, weights, metadata={"format": "pt"})
    config_file.write_text(json.dumps(config))
    return folder / "saved"


def test_groups_without_kernels_are_dequantized(tmp_path: Path) -> None:
    layer = "model.layers.0.mlp.down_proj"
    expected = {}

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(0)
        values = torch.randint(0, 256, (64, 96), generator=generator, dtype=torch.uint8)
        scales = torch.rand(64, 3, generator=generator) / 100
        tensors[f"{layer}.weight_packed"], tensors[f"{layer}.weight_scale"] = pack(values, 8), scales
        config["config_groups"]["group_0"]["weights"] |= {"strategy": "group", "group_size": 32}
        expected["weight"] = QuantizedWeight(8, 32, values, scales, -128 * scales).dequantize()

    folder = quantized_llama(tmp_path, change)
    decoder = load_model(folder, LoadSettings(device=CPU, dtype=torch.float32, kernels="torch")).language_model
    assert isinstance(decoder, Decoder)
    down = decoder.get_submodule("layers.0.mlp.down_proj")
    assert isinstance(down, Linear)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(down(x), x @ expected["weight"].T, atol=1e-4, rtol=1e-4)


def _other_method(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["quant_method"] = "hqq"


def _floats(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["config_groups"]["group_0"]["weights"]["type"] = "float"


def _transforms(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["transform_config"] = {"config_groups": {"u": {"type": "hadamard"}}}


def _sparse(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["sparsity_config"] = {"format": "sparse-24-bitmask"}


def _tiny_floats(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized"


def _no_scale(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del tensors["model.layers.0.mlp.down_proj.weight_scale"]


def _short_scale(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["model.layers.0.mlp.down_proj.weight_scale"] = torch.ones(3, 1)


def _no_zeros(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["config_groups"]["group_0"]["weights"]["symmetric"] = False


def _other_shape(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    for part, tensor in to_tensors(
        round_to_nearest(torch.ones(64, 64), bits=8, group_size=64, symmetric=True), symmetric=True
    ).items():
        tensors[f"model.layers.0.mlp.down_proj.{part}"] = tensor


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (_other_method, UnsupportedModelError, "'hqq', which is not supported; supported are awq, compressed-tensors"),
        (_floats, UnsupportedModelError, "float"),
        (_transforms, UnsupportedModelError, "transform_config"),
        (_sparse, UnsupportedModelError, "sparse-24-bitmask"),
        (_tiny_floats, UnsupportedModelError, "nvfp4-pack-quantized.* supported: pack-quantized, int-quantized"),
        (_no_scale, MissingWeightsError, "down_proj.weight_scale"),
        (_short_scale, ModelLoadError, "down_proj.weight.* do not fit"),
        (_no_zeros, ModelLoadError, "weight_zero_point and weight_minimum are missing"),
        (_other_shape, ModelLoadError, "down_proj"),
    ],
)
def test_loading_errors_say_why(tmp_path: Path, change: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        logits(quantized_llama(tmp_path, change))


def test_saving_errors_say_why(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "plain", **GROUPS_FIT)
    int8 = QuantizationConfig(scheme="int8")
    with pytest.raises(ConfigurationError, match="a new or an empty folder"):
        save_quantized(folder, folder, int8)
    with pytest.raises(ConfigurationError, match="no layer is left"):
        save_quantized(folder, tmp_path / "none", QuantizationConfig())
    with pytest.raises(ConfigurationError, match="groups of 128"):
        save_quantized(folder, tmp_path / "groups", QuantizationConfig(scheme="int4", group_size=128))
    save_quantized(folder, tmp_path / "saved", int8)
    with pytest.raises(ConfigurationError, match="already"):
        save_quantized(tmp_path / "saved", tmp_path / "again", int8)
    with pytest.raises(ConfigurationError, match="already"):
        logits(tmp_path / "saved", quantization=int8)


def test_the_command_writes_what_can_be_loaded(tmp_path: Path) -> None:
    folder, out = make_llama(tmp_path / "plain", **GROUPS_FIT), tmp_path / "saved"
    result = CliRunner().invoke(app, ["quantize", str(folder), str(out), "--bits", "4"])
    assert result.exit_code == 0, result.output
    assert "MB" in result.output
    assert torch.equal(logits(out), logits(folder, quantization=QuantizationConfig(scheme="int4")))
    again = CliRunner().invoke(app, ["quantize", str(folder), str(out), "--bits", "4"])
    assert again.exit_code == 2
    assert "a new or an empty folder" in again.output
