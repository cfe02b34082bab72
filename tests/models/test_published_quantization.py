"""Quantized checkpoints in the formats in which they are published, against transformers with the weights that they
stand for."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM

from tests.checkpoints import change_config, make_llama, make_llava, make_text_model
from tests.models.test_decoder import transformers_logits
from tests.oracles import quantized_weights as oracle
from tests.oracles.rounded_inputs import DOTS, INPUT_GROUP, logits_of_rounded_inputs
from tests.paged import PagedRun
from vlmserve.errors import MissingWeightsError, ModelLoadError, UnsupportedModelError
from vlmserve.kernels.extension import supported_isas
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.layers.linear import Weight
from vlmserve.models.decoder import Decoder
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import load_model
from vlmserve.quant.formats import gptq
from vlmserve.quant.formats.compressed_tensors import from_tensors
from vlmserve.quant.formats.layout import pack
from vlmserve.quant.formats.stored import stored_layouts

CPU = torch.device("cpu")
KERNELS = ["torch", *(["native"] if supported_isas() else [])]
SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2,
    "initializer_range": 0.1,
}  # fmt: skip
TOKENS = torch.randint(0, 50, (19,), generator=torch.Generator().manual_seed(0))

Held = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer by the ends of their names, and the weight that they stand for."""


def logits(folder: Path, kernels: str = "torch") -> Tensor:
    model = load_model(folder, LoadSettings(device=CPU, dtype=torch.float32, kernels=kernels)).language_model
    with torch.inference_mode():
        return PagedRun(model, [model.embed(TOKENS)]).finish([7])[0]


def publish(
    plain: Path, config: dict[str, Any], hold: Callable[[str, Tensor], Held | None], inner: str = "model.layers."
) -> tuple[Path, Path]:
    """A folder with the layers' weights held as `hold` says and one with the weights that they stand for."""
    tensors = load_file(plain / "model.safetensors")
    held: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        wanted = tensor.ndim == 2 and inner in name
        found = hold(name.removesuffix(".weight"), tensor) if wanted else None
        if found is None:
            held[name] = meant[name] = tensor
            continue
        parts, meaning = found
        held |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
        meant[name] = meaning.float().contiguous()
    folders = plain.parent / "held", plain.parent / "meant"
    original = json.loads((plain / "config.json").read_text())
    for folder, content, settings in zip(folders, (held, meant), ({"quantization_config": config}, {}), strict=True):
        folder.mkdir()
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**original, **settings}))
    return folders


def check(
    folders: tuple[Path, Path],
    plain: Path,
    kernels: str,
    bits: int | None,
    *,
    input_group: int | None = None,
    in_groups: bool = False,
) -> None:
    """bits: of weights that stay packed. Beside 4 the native kernels round inputs to 8 bits, beside 8 to 16, or to 8 as
    well if so many of them are to have a scale. in_groups: the weights are in groups, whose scales become float16."""
    actual, expected = logits(folders[0], kernels), transformers_logits(folders[1], [TOKENS])[0]
    if input_group and kernels == "native" and DOTS:
        rounded = logits_of_rounded_inputs(folders[1], TOKENS, input_group)
        moved = (expected - rounded).norm()
        if not in_groups:
            assert (actual - rounded).norm() < 0.3 * moved
        # Scales that became float16 tip inputs of later layers to the next integer: other errors, as large.
        assert 0.5 * moved < (actual - expected).norm() < 1.5 * moved
        return
    changed = (expected - transformers_logits(plain, [TOKENS])[0]).abs().mean()
    assert changed > 1e-3, "quantization that changes nothing did not happen"
    if bits == 4 and kernels == "native":
        assert (actual - expected).abs().mean() < 0.2 * changed
    else:
        assert (actual - expected).abs().max() < (1e-2 if bits == 8 and kernels == "native" else 2e-4)
        assert torch.equal(actual.argmax(-1), expected.argmax(-1))


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_awq(tmp_path: Path, group_size: int, kernels: str) -> None:
    plain = make_llama(tmp_path / "plain", **SHAPE, attention_bias=True)
    left_out = "model.layers.1.mlp.down_proj"

    def hold(layer: str, weight: Tensor) -> Held | None:
        if layer == left_out:
            return None
        rounded = oracle.rounded(weight, bits=4, group_size=group_size, symmetric=False)
        return oracle.awq(rounded), rounded.dequantized()

    config = {**AWQ, "group_size": group_size, "modules_to_not_convert": [left_out]}
    folders = publish(plain, config, hold)
    check(folders, plain, kernels, 4)
    layers = loaded_layers(folders[0])
    assert layers["layers.0.mlp.down_proj"] == 4
    assert layers["layers.1.mlp.down_proj"] is None


def loaded_layers(folder: Path, kernels: str = "torch") -> dict[str, int | None]:
    """Bits of the layers that stayed packed; None for plain ones."""
    decoder = load_model(folder, LoadSettings(device=CPU, dtype=torch.float32, kernels=kernels)).language_model
    assert isinstance(decoder, Decoder)
    return {name: module.bits for name, module in decoder.named_modules() if isinstance(module, Weight)}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric", "stored"),
    [(4, 32, True, "gptq"), (4, 64, False, "gptq"), (4, 128, False, "gptq_v2"), (4, -1, True, "gptq"),
     (8, 64, True, "gptq"), (8, 32, False, "gptq_v2"), (8, -1, True, "gptq")],
)  # fmt: skip
def test_gptq(tmp_path: Path, bits: int, group_size: int, symmetric: bool, stored: str, kernels: str) -> None:
    plain = make_llama(tmp_path / "plain", **SHAPE)

    def hold(layer: str, weight: Tensor) -> Held:
        size = weight.shape[1] if group_size < 0 else group_size
        rounded = oracle.rounded(weight, bits=bits, group_size=size, symmetric=symmetric)
        return oracle.gptq(rounded, bits, stored), rounded.dequantized()

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric, "desc_act": False}
    folders = publish(plain, {**config, "checkpoint_format": stored}, hold)
    # With one group for all of 256 inputs, kernels take it as they take groups of 128.
    served = bits == 4 or group_size < 0 or kernels == "native"
    layers = loaded_layers(folders[0], kernels)
    assert layers["layers.0.mlp.down_proj"] == layers["layers.0.self_attn.qkv_proj"] == (bits if served else None)
    check(folders, plain, kernels, bits)


def sorted_by_importance(layer: str, in_features: int) -> np.ndarray:
    """The group of each input with "desc_act", groups of 32: inputs were sorted by how much they matter, which is the
    same for projections of the same input, before they were cut into groups."""
    inputs = re.sub("(q|k|v|gate|up)_proj", "", layer)
    group_of = np.empty(in_features, np.int64)
    group_of[np.random.default_rng(list(inputs.encode())).permutation(in_features)] = np.arange(in_features) // 32
    return group_of


def desc_act(bits: int) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": True, "desc_act": True}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_scattered_inputs(tmp_path: Path, bits: int, kernels: str) -> None:
    plain = make_llama(tmp_path / "plain", **SHAPE, attention_bias=True)
    alone, uneven = "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.down_proj"

    def hold(layer: str, weight: Tensor) -> Held:
        group_of = sorted_by_importance(layer, weight.shape[1])
        if layer == alone:
            group_of = group_of[::-1]
        if layer == uneven:
            group_of[np.flatnonzero(group_of == 1)[0]] = 0
        rounded = oracle.rounded(weight, bits=bits, group_size=32, symmetric=True, group_of=group_of)
        return oracle.gptq(rounded, bits, "gptq"), rounded.dequantized()

    folders = publish(plain, desc_act(bits), hold)
    layers = loaded_layers(folders[0], kernels)
    packed = [name for name, kept in layers.items() if kept is not None]
    expected = ["0.self_attn.qkv_proj", "0.self_attn.o_proj", "0.mlp.gate_up_proj", "0.mlp.down_proj"]
    expected += ["1.self_attn.o_proj", "1.mlp.gate_up_proj"]
    assert packed == ([f"layers.{name}" for name in expected] if bits == 4 or kernels == "native" else [])
    check(folders, plain, kernels, bits if packed else None)
    # The same tokens in pieces, beside others.
    model = load_model(folders[0], LoadSettings(device=CPU, dtype=torch.float32, kernels=kernels)).language_model
    with torch.inference_mode():
        beside = PagedRun(model, [model.embed(tokens) for tokens in (TOKENS.flip(0), TOKENS)]).finish([4, 3])[1]
    torch.testing.assert_close(beside, logits(folders[0], kernels), atol=1e-4, rtol=1e-4)


def test_a_table_whose_inputs_were_sorted_is_plain(tmp_path: Path) -> None:
    """Its rows are read as well as multiplied."""
    plain = make_llama(tmp_path / "plain", **SHAPE, tie_word_embeddings=True, vocab_size=512)

    def hold(layer: str, weight: Tensor) -> Held:
        group_of = sorted_by_importance(layer, weight.shape[1])
        rounded = oracle.rounded(weight, bits=4, group_size=32, symmetric=True, group_of=group_of)
        return oracle.gptq(rounded, 4, "gptq"), rounded.dequantized()

    folders = publish(plain, desc_act(4), hold, inner="embed_tokens")
    assert loaded_layers(folders[0])["embed_tokens"] is None
    check(folders, plain, "torch", None)


def test_a_zero_point_of_zero_borrows() -> None:
    """Subtracting one from whole words is undone by adding one to whole words, and by nothing else."""
    zeros = np.array([[0], [3], [0], [15], [7], [1], [0], [2]])
    values = np.random.default_rng(0).integers(0, 16, (8, 32))
    weight = oracle.Rounded(values, np.full((8, 1), 0.5, np.float16), zeros, np.zeros(32, np.int64))
    (layout,) = gptq.layouts({"bits": 4, "group_size": 32})
    read = layout.read(oracle.gptq(weight, 4, "gptq"))
    assert not isinstance(read, Tensor)
    torch.testing.assert_close(read.dequantize().double(), weight.dequantized())


def library(format: str, **weights: Any) -> tuple[dict[str, Any], Callable[[str, Tensor], Held]]:
    """A ``quantization_config`` of compressed-tensors, and what the library itself makes of a weight."""
    arguments = QuantizationArgs(dynamic=False, **weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = BaseCompressor.get_value_from_registry(format)
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": arguments.model_dump(mode="json"),
                "input_activations": {"num_bits": 8, "dynamic": True, "strategy": "token", "type": "int"},
            }
        },
    }

    def hold(layer: str, weight: Tensor) -> Held:
        rows, columns = weight.shape
        tall, wide = arguments.block_structure or (1, 1)
        shape = {
            "tensor": (1,),
            "channel": (rows, 1),
            "group": (rows, columns // (arguments.group_size or 1)),
            "block": (-(-rows // tall), -(-columns // wide)),
        }[arguments.strategy]
        generator = torch.Generator().manual_seed(rows)
        most = 448 if arguments.type == "float" else 2 ** (arguments.num_bits - 1)
        # Of different sizes, so that one in the wrong place shows.
        scale = (1 + torch.rand(shape, generator=generator)) * weight.abs().max() / most
        state = {"weight": weight, "weight_scale": scale}
        if not arguments.symmetric:
            zero = torch.randint(-most // 4, most // 4, shape, generator=generator)
            state["weight_zero_point"] = zero.to(torch.int8)
        packed = compressor.compress(state, scheme)
        return packed, compressor.decompress(dict(packed), scheme)["weight"].double()

    return config, hold


IN_BYTE_GROUPS = ("W8A8, zero points", "W8A8, groups", "W8A16, groups", "W8A16, groups with zero points")
"""Formats that stay packed beside the native kernels only."""
FORMATS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "W8A8, a scale for each output": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, 8),
    "W8A8, one scale": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, 8),
    "W8A8, zero points": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, None),
    "W8A8, groups": ("int-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}, None),
    "W8A16": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, 8),
    "W8A16, one scale": ("pack-quantized", {"num_bits": 8, "strategy": "tensor"}, 8),
    "W8A16, groups": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64}, None),
    "W8A16, groups with zero points": (
        "pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False}, None,
    ),
    "W4A16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 64}, 4),
    "W4A16, zero points": (
        "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, 4,
    ),
    "W4 in bytes": ("naive-quantized", {"num_bits": 4, "strategy": "channel"}, 8),
    "float8, one scale": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, None),
    "float8, scales of outputs": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, None),
    "float8, blocks": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 32]}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_compressed_tensors(tmp_path: Path, name: str) -> None:
    plain = make_llama(tmp_path / "plain", **SHAPE)
    format, weights, bits = FORMATS[name]
    folders = publish(plain, *library(format, **weights))
    for kernels in KERNELS:
        kept = 8 if name in IN_BYTE_GROUPS and kernels == "native" else bits
        assert loaded_layers(folders[0], kernels)["layers.1.mlp.gate_up_proj"] == kept
        rounds_inputs = format in ("int-quantized", "naive-quantized")
        input_group = weights.get("group_size", INPUT_GROUP) if rounds_inputs else None
        check(folders, plain, kernels, kept, input_group=input_group, in_groups=name in IN_BYTE_GROUPS)


def test_float8_in_blocks(tmp_path: Path) -> None:
    """Blocks that the sizes of some layers are no multiples of, as DeepSeek's are of 128."""
    plain = make_llama(tmp_path / "plain", **{**SHAPE, "intermediate_size": 200})
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48], "activation_scheme": "dynamic"}
    folders = publish(plain, config, lambda layer, weight: oracle.float8_blocks(weight, 48))
    check(folders, plain, "torch", None)


@pytest.mark.parametrize(
    ("scale_name", "input_name"), [("weight_scale", "input_scale"), ("weight_scale_inv", "activation_scale")]
)
def test_float8_with_one_scale_for_a_layer(tmp_path: Path, scale_name: str, input_name: str) -> None:
    plain = make_llama(tmp_path / "plain", **SHAPE)

    def hold(layer: str, weight: Tensor) -> Held:
        scale = weight.abs().max() / 448
        packed = (weight / scale).to(torch.float8_e4m3fn)
        return {
            "weight": packed,
            scale_name: scale,
            input_name: torch.ones(()),
        }, packed.double() * scale.double()

    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    folders = publish(plain, config, hold)
    check(folders, plain, "torch", None)
    # Nothing says in which type to compute but the tensors that are not quantized.
    assert load_model(folders[0], LoadSettings(device=CPU)).dtype == torch.float32


def test_projections_of_one_input_quantized_differently(tmp_path: Path) -> None:
    plain = make_llama(tmp_path / "plain", **SHAPE)

    def hold(layer: str, weight: Tensor) -> Held | None:
        if layer.endswith(("k_proj", "up_proj")):
            return None
        rounded = oracle.rounded(weight, bits=4, group_size=32, symmetric=False)
        return oracle.awq(rounded), rounded.dequantized()

    folders = publish(plain, {**AWQ, "group_size": 32}, hold)
    check(folders, plain, "torch", None)
    layers = loaded_layers(folders[0])
    assert layers["layers.0.self_attn.qkv_proj"] is None
    assert layers["layers.0.self_attn.o_proj"] == 4


@pytest.mark.parametrize("packed_zeros", [True, False])
def test_compressed_tensors_groups_in_other_forms(packed_zeros: bool) -> None:
    """Groups whose inputs are told by an index, and zero points of the library's first releases, a byte each."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    group_of = np.random.default_rng(0).permutation(np.arange(64) // 32)
    rounded = oracle.rounded(weight, bits=4, group_size=32, symmetric=False, group_of=group_of)
    zeros = torch.from_numpy(rounded.zeros)
    tensors = {
        "weight_packed": pack(torch.from_numpy(rounded.values).to(torch.uint8), 4),
        "weight_scale": torch.from_numpy(rounded.scales),
        "weight_shape": torch.tensor(weight.shape),
        "weight_zero_point": pack(zeros.T.to(torch.uint8), 4).T if packed_zeros else (zeros - 8).to(torch.int8),
        "weight_g_idx": torch.from_numpy(group_of),
    }
    read = from_tensors(tensors, [32])
    assert isinstance(read, QuantizedWeight), "groups of the stated size stay as they are"
    torch.testing.assert_close(read.dequantize(), rounded.dequantized().float())


def test_a_model_that_sees_keeps_its_tower_plain(tmp_path: Path) -> None:
    plain = make_llava(tmp_path / "plain", text=SHAPE)

    def hold(layer: str, weight: Tensor) -> Held:
        rounded = oracle.rounded(weight, bits=4, group_size=32, symmetric=False)
        return oracle.awq(rounded), rounded.dequantized()

    config = {**AWQ, "group_size": 32, "modules_to_not_convert": ["vision_tower"]}
    folder, meant = publish(plain, config, hold, inner="language_model.layers.")
    expected = logits(meant)
    torch.testing.assert_close(logits(folder), expected, atol=2e-4, rtol=0)
    # Some tools write the settings beside those of the language model.
    settings = json.loads((plain / "config.json").read_text())
    settings["text_config"]["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(settings))
    torch.testing.assert_close(logits(folder), expected, atol=2e-4, rtol=0)
    assert load_model(folder, LoadSettings(device=CPU, dtype=torch.float32)).vision is not None


def test_one_line_says_what_stayed_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = make_text_model(tmp_path / "plain", Phi3ForCausalLM, Phi3Config, **SHAPE, pad_token_id=0)

    def hold(layer: str, weight: Tensor) -> Held:
        group_of = np.arange(weight.shape[1]) // 64
        if layer.endswith("1.mlp.down_proj"):
            group_of[64] = 0
        rounded = oracle.rounded(weight, bits=4, group_size=64, symmetric=False, group_of=group_of)
        return oracle.gptq(rounded, 4, "gptq_v2"), rounded.dequantized()

    settings = {"bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"}
    folder, _ = publish(plain, {"quant_method": "gptq", **settings}, hold)
    with caplog.at_level(logging.INFO):
        actual = logits(folder)
    (line,) = [record.getMessage() for record in caplog.records if "quantized checkpoint" in record.getMessage()]
    assert line == "quantized checkpoint: 7 layers stay quantized, 1 are dequantized to torch.float32"
    # Older ones have their settings in a file of their own.
    (folder / "config.json").write_text((plain / "config.json").read_text())
    with pytest.raises(MissingWeightsError):
        logits(folder)
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    assert torch.equal(logits(folder), actual)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**AWQ, "version": "gemv"}, "'awq' with version 'gemv' .* supported: gemm"),
        ({**AWQ, "backend": "llm-awq"}, "llm-awq"),
        ({**AWQ, "bits": 3}, "bits 3 .* supported: 4"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 .* supported: 4, 8; load the unquantized model"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin.* supported: gptq, gptq_v2"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "marlin"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "e3m4"),
        ({"quant_method": "mxfp4"}, "'mxfp4', which is not supported; supported are awq, .*gptq, fp8"),
        ({"bits": 4}, "None, which is not supported"),
    ],
)  # fmt: skip
def test_unknown_kinds_are_named(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        stored_layouts(config)


def test_settings_that_are_no_settings_are_refused(tmp_path: Path) -> None:
    folder = make_llama(tmp_path, **SHAPE)
    change_config(folder, quantization_config="awq")
    with pytest.raises(ModelLoadError, match="quantization_config is 'awq', not an object"):
        logits(folder)


def test_tensors_of_impossible_shapes_are_named(tmp_path: Path) -> None:
    plain = make_llama(tmp_path / "plain", **SHAPE)

    def hold(layer: str, weight: Tensor) -> Held:
        flat = {"qweight": torch.zeros(8, dtype=torch.int32), "qzeros": torch.zeros(1, 8), "scales": torch.ones(1, 8)}
        return flat, weight.double()

    folder, _ = publish(plain, {"quant_method": "gptq", "bits": 4}, hold)
    with pytest.raises(ModelLoadError, match=r"q_proj\.weight: qweight \(8,\), .* do not belong together"):
        logits(folder)


def a_layer(bits: int = 4) -> dict[str, Tensor]:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    rounded = oracle.rounded(weight, bits=bits, group_size=32, symmetric=True)
    return oracle.gptq(rounded, bits, "gptq")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("qweight", torch.zeros(8, 15, dtype=torch.int32)),
        ("scales", torch.ones(3, 16)),
        ("g_idx", torch.full((64,), 2, dtype=torch.int32)),
        ("g_idx", torch.zeros(63, dtype=torch.int32)),
    ],
)
def test_tensors_that_do_not_belong_together(part: str, value: Tensor) -> None:
    (layout,) = gptq.layouts({"bits": 4, "group_size": 32})
    with pytest.raises(ModelLoadError, match=r"do not (make|fit)"):
        layout.read({**a_layer(), part: value})


def test_a_float8_weight_needs_its_scale(tmp_path: Path) -> None:
    plain = make_llama(tmp_path / "plain", **SHAPE)

    def hold(layer: str, weight: Tensor) -> Held:
        packed, meant = oracle.float8_blocks(weight, 128)
        if layer.endswith("1.mlp.down_proj"):
            del packed["weight_scale_inv"]
        return packed, meant

    folder, _ = publish(plain, {"quant_method": "fp8", "weight_block_size": [128, 128]}, hold)
    with pytest.raises(MissingWeightsError, match=r"1\.mlp\.down_proj\.weight_scale_inv"):
        logits(folder)
