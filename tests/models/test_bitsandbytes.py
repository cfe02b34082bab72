"""Checkpoints quantized by bitsandbytes, against transformers with the weights that they stand for."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import make_llama, make_llava
from tests.models.test_decoder import transformers_logits
from tests.models.test_published_quantization import (
    KERNELS,
    SHAPE,
    TOKENS,
    Held,
    check,
    loaded_layers,
    logits,
    publish,
)
from tests.oracles import quantized_weights as oracle
from vlmserve.errors import ConfigurationError, MissingWeightsError, ModelLoadError, UnsupportedModelError
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import load_model
from vlmserve.quant.formats.stored import stored_layouts
from vlmserve.settings.quantization import QuantizationConfig

CPU = torch.device("cpu")
METHOD = {"quant_method": "bitsandbytes"}
BITS4 = {**METHOD, "load_in_4bit": True, "load_in_8bit": False}
BITS8 = {**METHOD, "load_in_4bit": False, "load_in_8bit": True}
STATE = "weight.quant_state.bitsandbytes__nf4"


def read(parts: dict[str, Tensor], kind: str = "nf4") -> Tensor:
    layouts = stored_layouts({**BITS4, "bnb_4bit_quant_type": kind})
    found = next(layout for layout in layouts if layout.mark in parts).read(parts)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize(
    ("kind", "shape", "block", "nested", "storage"),
    [
        ("nf4", (48, 64), 64, False, torch.uint8),
        ("nf4", (300, 130), 64, True, torch.uint8),  # blocks that end within rows, and two blocks of factors
        ("nf4", (15, 9), 128, True, torch.uint8),  # an odd number of values
        ("fp4", (48, 64), 64, True, torch.bfloat16),
        ("fp4", (20, 100), 256, False, torch.float32),
    ],
)
def test_weights_of_4_bits(kind: str, shape: tuple[int, int], block: int, nested: bool, storage: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts, meant = oracle.bitsandbytes4(weight, kind, block=block, nested=nested, storage=storage)
    torch.testing.assert_close(read(parts, kind).double(), meant, rtol=1e-6, atol=1e-7)
    assert (meant - weight).norm() < 0.15 * weight.norm(), "the oracle's weights are near those it was given"


def test_what_the_library_wrote_is_what_it_dequantizes() -> None:
    library = pytest.importorskip("bitsandbytes").functional
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    for kind, nested, storage in itertools.product(("nf4", "fp4"), (True, False), (torch.uint8, torch.bfloat16)):
        settings = {"quant_type": kind, "compress_statistics": nested, "quant_storage": storage}
        packed, state = library.quantize_4bit(weight, **settings)
        beside = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        expected = library.dequantize_4bit(packed, state)
        torch.testing.assert_close(read({"weight": packed, **beside}, kind), expected, rtol=1e-6, atol=1e-7)


def hold4(layer: str, weight: Tensor) -> Held | None:
    return None if layer.endswith("1.mlp.down_proj") else oracle.bitsandbytes4(weight, "nf4")


def test_4_bits_become_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = make_llama(tmp_path / "plain", **SHAPE, attention_bias=True)
    config = {
        **BITS4,
        "bnb_4bit_quant_type": "nf4",
        "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp.down_proj"],
    }
    folders = publish(plain, config, hold4)
    expected = transformers_logits(folders[1], [TOKENS])[0]
    assert (expected - transformers_logits(plain, [TOKENS])[0]).abs().mean() > 1e-3
    for kernels in KERNELS:
        with caplog.at_level(logging.INFO):
            torch.testing.assert_close(logits(folders[0], kernels), expected, atol=1e-4, rtol=0)
        assert "quantized checkpoint: 0 layers stay quantized, 7 are dequantized to torch.float32" in caplog.text
    with pytest.raises(ConfigurationError, match="quantized already"):
        load_model(
            folders[0], LoadSettings(device=CPU, dtype=torch.float32, quantization=QuantizationConfig(scheme="int8"))
        )


@pytest.mark.parametrize("kernels", KERNELS)
def test_8_bits_stay_packed(tmp_path: Path, kernels: str) -> None:
    plain = make_llama(tmp_path / "plain", **SHAPE)
    folders = publish(plain, BITS8, lambda layer, weight: oracle.bitsandbytes8(weight))
    layers = loaded_layers(folders[0], kernels)
    assert [bits for name, bits in layers.items() if name.startswith("layers.")] == [8] * 8
    check(folders, plain, kernels, 8)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_vlm_has_its_tower_quantized(tmp_path: Path, bits: int) -> None:
    """All linear layers but the head are, unless the settings name them."""
    plain = make_llava(tmp_path / "plain", text=SHAPE, published_names=True)

    def hold(layer: str, weight: Tensor) -> Held | None:
        if "embed" in layer or layer.endswith("lm_head"):
            return None
        return oracle.bitsandbytes8(weight) if bits == 8 else oracle.bitsandbytes4(weight, "fp4", storage=torch.float32)

    held, meant = publish(plain, BITS8 if bits == 8 else BITS4, hold, inner="")
    assert (
        sum(name.endswith("quant_map") or name.endswith("SCB") for name in load_file(held / "model.safetensors")) > 24
    )
    pixels = torch.randn(1, 3, 42, 42, generator=torch.Generator().manual_seed(0))
    models = [
        load_model(folder, LoadSettings(device=CPU, dtype=torch.float32, kernels="torch"))
        for folder in (held, meant, plain)
    ]
    with torch.inference_mode():
        seen = [model.vision.encode([pixels])[0] for model in models if model.vision is not None]
    torch.testing.assert_close(seen[0], seen[1], atol=1e-4, rtol=0)
    assert (seen[0] - seen[2]).abs().mean() > 1e-3
    torch.testing.assert_close(logits(held), logits(meant), atol=1e-4, rtol=0)


def changed(**changes: Any) -> dict[str, Tensor]:
    """The tensors of a layer whose state says something else."""
    parts, _ = oracle.bitsandbytes4(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), "nf4")
    state = {**json.loads(bytes(parts[STATE].tolist())), **changes}
    return {**parts, STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (changed(quant_type="int3"), "quant_type 'int3' .* supported: nf4, fp4"),
        (changed(shape=[16, 65]), "a weight of 16 x 65 needs 520 bytes, not 512"),
        (changed(shape=None), "shape is None"),
        (changed(shape=[16, -64]), "shape is .*-64"),
        (changed(blocksize=128), "1024 values in blocks of 128 do not fit 16 factors"),
        (changed(blocksize=0), "blocksize is 0"),
        (changed(nested_blocksize=8), "16 values in blocks of 8 do not fit 1 factors"),
        (changed(nested_offset="1"), "nested_offset is '1'"),
        ({**changed(), STATE: changed()[STATE][:30]}, "quant_state is broken or truncated"),
        ({**changed(), STATE: torch.zeros(3, dtype=torch.uint8)}, "quant_state is broken or truncated"),
        ({**changed(), STATE: torch.tensor(list(b"[1]"), dtype=torch.uint8)}, "quant_type None"),
        ({**changed(), "weight.quant_map": torch.zeros(15)}, "quant_map has 15 numbers, not 16"),
        ({**changed(), "weight.nested_quant_map": torch.zeros(16)}, "nested_quant_map has 16 numbers, not 256"),
        ({**changed(), "weight.absmax": torch.zeros(15)}, "1024 values in blocks of 64 do not fit 15 factors"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_belong_together(parts: dict[str, Tensor], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        read(parts)


@pytest.mark.parametrize("missing", ["weight.absmax", "weight.quant_map", "weight.nested_absmax", STATE])
def test_missing_tensors_are_named(tmp_path: Path, missing: str) -> None:
    plain = make_llama(tmp_path / "plain", **SHAPE)
    folder, _ = publish(plain, {**BITS4, "bnb_4bit_quant_type": "nf4"}, hold4)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.0.mlp.up_proj.{missing}"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingWeightsError, match=rf"up_proj.*{missing}"):
        logits(folder)


def test_8_bit_tensors_need_scales_in_order() -> None:
    parts, _ = oracle.bitsandbytes8(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))
    (layout,) = stored_layouts(BITS8)
    assert layout.needed == ("SCB",)
    with pytest.raises(ModelLoadError, match=r"SCB \(15,\) does not fit a weight \(16, 64\)"):
        layout.read({**parts, "SCB": torch.ones(15)})
    with pytest.raises(UnsupportedModelError, match=r"weight_format 2 .* supported: 0"):
        layout.read({**parts, "weight_format": torch.tensor(2)})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (METHOD, "flags 'none' .* supported: load_in_4bit, load_in_8bit"),
        ({**BITS4, "bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type 'af4' .* supported: nf4, fp4"),
    ],
)
def test_settings_that_are_not_supported(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        stored_layouts(config)
