"""Memory that is expected before a model is loaded, beside what it takes then."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from tests.checkpoints import make_gemma3, make_llama, make_llava, make_qwen_vl
from vlmserve.cli import app
from vlmserve.engine.engine import Engine
from vlmserve.errors import ConfigurationError
from vlmserve.kernels.extension import supported_isas
from vlmserve.models.estimate import MemoryEstimate
from vlmserve.models.hub import resolve_model
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.quantized import save_quantized
from vlmserve.models.registry import load_model
from vlmserve.settings.config import EngineConfig
from vlmserve.settings.quantization import QuantizationConfig

CPU = torch.device("cpu")
KERNELS = ["torch", *(["native"] if supported_isas() else [])]
MIXED = ("*.layers.1.*=int8", "*.down_proj=none")
SCHEMES = {
    "plain": None,
    "int8": QuantizationConfig(scheme="int8"),
    "int4": QuantizationConfig(scheme="int4"),
    "int4, groups of 64": QuantizationConfig(scheme="int4", group_size=64, symmetric=True),
    "mixed, with the tower": QuantizationConfig(scheme="int4", vision=True, layers=MIXED),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {
        "llama": make_llama(folder / "llama", tie_word_embeddings=True, attention_bias=True),
        "qwen2": make_llama(folder / "qwen2", Qwen2ForCausalLM, Qwen2Config),
        "llava": make_llava(folder / "llava", dtype=torch.bfloat16),
        "qwen2.5-vl": make_qwen_vl(folder / "qwen", "qwen2_5_vl"),
        "gemma3": make_gemma3(folder / "gemma3"),
        "pixie": resolve_model("pixie"),
    }


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_models_take_what_was_expected(families: dict[str, Path], scheme: str, kernels: str) -> None:
    for name, folder in families.items():
        estimate = MemoryEstimate(folder, CPU, kernels)
        model = load_model(folder, LoadSettings(device=CPU, kernels=kernels, quantization=SCHEMES[scheme]))
        expected = estimate.weights(SCHEMES[scheme])
        assert expected == pytest.approx(model.weight_bytes, rel=0.03), name
        assert estimate.dtype == model.dtype
        block = model.language_model.allocate_cache(1, 16)
        held = sum(tensor.nbytes for layer in block for tensor in layer.tensors)
        assert estimate.token_bytes * 16 == pytest.approx(held, rel=0.03), name


def test_a_written_checkpoint_takes_what_was_expected(tmp_path: Path) -> None:
    config = QuantizationConfig(scheme="int4", layers=("*.down_proj=int8",))
    save_quantized(resolve_model("pixie"), tmp_path / "out", config)
    expected = MemoryEstimate(resolve_model("pixie"), CPU).weights(config)
    assert expected == pytest.approx(load_model(tmp_path / "out", LoadSettings(device=CPU)).weight_bytes, rel=0.03)
    with pytest.raises(ConfigurationError, match="quantized already"):
        MemoryEstimate(tmp_path / "out", CPU)


def test_the_cache_gets_what_weights_leave(monkeypatch: pytest.MonkeyPatch, families: dict[str, Path]) -> None:
    monkeypatch.setattr("vlmserve.devices.cpu.free_memory", lambda: 1000)
    estimate = MemoryEstimate(families["llama"], CPU)
    assert (estimate.cache(200, 0.9), estimate.cache(2000, 0.9)) == (400, 0)


def test_the_log_says_expected_and_actual_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vlmserve"):
        engine = Engine(EngineConfig(quantize="int4", kv_cache_memory=2**23))
    text = "\n".join(caplog.messages)
    expected, found = re.search(r"weights: (.*) MB in memory; (.*) MB were expected", text).groups()
    assert float(expected) == pytest.approx(float(found), rel=0.03)
    assert text.index(f"weights: {found} MB are expected; --quantize none: ") < text.index("MB in memory")
    assert f"room for {engine.stats().kv_blocks_total * 16 // 2048} requests of 2048\n" in text + "\n"


def test_a_dry_run_writes_nothing(families: dict[str, Path], tmp_path: Path) -> None:
    line = ["quantize", str(families["pixie"]), str(tmp_path / "out"), "--dry-run", "--bits", "4", "--group-size", "64"]
    result = CliRunner().invoke(app, line, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    cells = [re.split("  +", line.strip()) for line in result.stdout.splitlines()]
    rows = {row[0]: float(row[1]) for row in cells if len(row) == 4 and row[0] != "weights"}
    estimate = MemoryEstimate(families["pixie"], CPU)
    for name, config in (
        ("plain", None), ("int8", SCHEMES["int8"]), ("these flags", QuantizationConfig(scheme="int4", group_size=64))
    ):  # fmt: skip
        assert rows[name] == pytest.approx(estimate.weights(config) / 1e6, abs=0.06)
    assert "for 1,000 tokens" in result.stdout
    assert not list(tmp_path.iterdir())


def test_a_dry_run_reports_what_runs_report(families: dict[str, Path]) -> None:
    line = ["quantize", str(families["llama"]), "--dry-run", "--bits", "4"]
    result = CliRunner().invoke(app, line, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "48 inputs, which groups of 32 do not divide: add --layers language_model." in result.stderr
