"""Memory that a model will take, and models that do not fit."""

from __future__ import annotations

import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from tests.checkpoints import make_llama, make_llava, make_text_model
from tests.gguf_files import write_gguf
from tests.models.test_families import make
from tests.mtp_checkpoints import add_glm_mtp, add_mtp
from tests.paged import PagedRun
from tests.ranks import Meeting, ThreadRanks
from vlmserve.devices import cpu
from vlmserve.devices.cpu import CpuDevice
from vlmserve.engine import create_engine, lengths, loading
from vlmserve.errors import ConfigurationError, ModelLoadError
from vlmserve.layers.layer import allocate
from vlmserve.layers.linear import Weight
from vlmserve.models import footprint as module
from vlmserve.models import weights
from vlmserve.models.footprint import LIBRARIES, check_memory, footprint, footprint_of
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.quantized import save_quantized
from vlmserve.models.registry import load_model
from vlmserve.models.weights import Checkpoint
from vlmserve.quant.model import Quantizer
from vlmserve.settings.config import EngineConfig
from vlmserve.settings.quantization import QuantizationConfig, Scheme

SIZES: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 1536, "vocab_size": 4096, "dtype": torch.bfloat16}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "not tied"])
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), tie_word_embeddings=request.param, **SIZES)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of whole superblocks."""
    sizes = {**SIZES, "hidden_size": 768, "intermediate_size": 1024, "vocab_size": 2048}
    return make_llama(tmp_path_factory.mktemp("wide"), **sizes)


@pytest.mark.parametrize("scheme", get_args(Scheme))
def test_footprint_is_what_loading_leaves(llama: Path, scheme: Scheme) -> None:
    quantization = QuantizationConfig(scheme=scheme)
    settings = LoadSettings(device=torch.device("cpu"), dtype=torch.bfloat16, quantization=quantization)
    model = load_model(llama, settings)
    assert footprint(llama, scheme).weights == pytest.approx(model.weight_bytes, rel=0.05)


@pytest.mark.parametrize("scheme", get_args(Scheme))
def test_footprint_counts_plain_embeddings_of_layers(tmp_path: Path, scheme: Scheme) -> None:
    layers: dict[str, Any] = {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 4096, "pad_token_id": 0}
    sizes = {**SIZES, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "global_head_dim": 64}
    config = {**sizes, **layers, "num_kv_shared_layers": 0, "tie_word_embeddings": True}
    folder = make_text_model(tmp_path, Gemma4ForCausalLM, Gemma4TextConfig, **config)
    quantization = QuantizationConfig(scheme=scheme)
    settings = LoadSettings(device=torch.device("cpu"), dtype=torch.bfloat16, quantization=quantization)
    assert footprint(folder, scheme).weights == pytest.approx(load_model(folder, settings).weight_bytes, rel=0.05)


def test_footprint_counts_plain_gates_of_states(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "qwen3.5")
    file = write_gguf(folder, tmp_path / "model.gguf")
    assert footprint(folder, "int4").weights == footprint(file, "int4").weights


def test_footprint_leaves_out_audio_towers(tmp_path: Path, llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    save_file({**tensors, "model.audio_tower.weight": torch.zeros(512, 512)}, tmp_path / "model.safetensors")
    assert footprint(tmp_path, "none") == footprint(llama, "none")


@pytest.mark.parametrize("kind", ["folder", "GGUF", "GLM"])
def test_footprint_counts_mtp_layers_for_drafts_only(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path / "folder", "glm4_moe" if kind == "GLM" else "qwen3.5")
    alone = footprint(write_gguf(path, tmp_path / "alone.gguf") if kind == "GGUF" else path, "none")
    path = add_glm_mtp(path) if kind == "GLM" else add_mtp(path)
    if kind == "GGUF":
        path = write_gguf(path, tmp_path / "model.gguf")
    assert footprint(path, "none", drafts=False) == alone
    assert footprint(path, "none").weights > alone.weights
    config = EngineConfig(model=str(path), speculation="off", device="cpu", dtype="bfloat16")
    assert (
        footprint_of(config, path).weights
        < footprint_of(config.model_copy(update={"speculation": "auto"}), path).weights
    )


def test_towers_stay_plain(tmp_path: Path) -> None:
    folder = make_llava(tmp_path)
    plain, text, whole = (footprint(folder, *args[:1], vision=args[1]).weights for args in CASES)
    assert whole < text < plain


CASES: list[tuple[Scheme, bool]] = [("none", False), ("int8", False), ("int8", True)]


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS", "IQ4_NL"])
def test_gguf_tensors_keep_their_bits(wide: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "superblocks_are_as_fast", lambda isa: True)
    file = write_gguf(wide, tmp_path / "model.gguf", types=kind)
    model = load_model(file, LoadSettings(device=torch.device("cpu")))
    assert footprint(file, "none").weights == pytest.approx(model.weight_bytes, rel=0.1)


@pytest.mark.parametrize("kind", ["Q2_K", "Q6_K"])
def test_inputs_of_16_bits_need_more_memory(
    wide: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(wide, tmp_path / "model.gguf", types=kind)
    model = load_model(file, LoadSettings(device=torch.device("cpu"), input_bits=16))
    assert footprint(file, "none", input_bits=16).weights == pytest.approx(model.weight_bytes, rel=0.1)
    assert footprint(file, "none", kernels="torch").weights >= footprint(file, "none", kernels="avx2").weights
    free(monkeypatch, footprint(file, "none", input_bits=16).loading + module.LIBRARIES - 1)
    with pytest.raises(ModelLoadError, match="of memory to load"):
        check_memory(EngineConfig(model=str(file), device="cpu", input_bits=16), file)


def free(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr(module, "free_memory", lambda: int(size))


def test_model_that_does_not_fit_names_what_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_llama(tmp_path, **SIZES)
    plain, int8, int4 = (footprint(folder, scheme) for scheme in ("none", "int8", "int4"))
    config = EngineConfig(model=str(folder), device="cpu")
    free(monkeypatch, plain.loading + module.LIBRARIES)
    check_memory(config, folder)
    monkeypatch.setattr(module, "LIBRARIES", 0)
    big = module.Footprint(10**10, 10**10)
    monkeypatch.setattr(module, "footprint", lambda _, scheme, **__: {"none": big, "int8": int8, "int4": int4}[scheme])
    free(monkeypatch, int8.loading + module.LIBRARIES)
    with pytest.raises(ModelLoadError, match=r"needs 10\.0 GB .* free; with --quantize int8 it needs"):
        check_memory(config, folder)
    free(monkeypatch, int4.loading + module.LIBRARIES)
    with pytest.raises(ModelLoadError, match="with --quantize int4"):
        check_memory(config, folder)
    free(monkeypatch, int4.loading + module.LIBRARIES - 1)
    with pytest.raises(ModelLoadError, match="a smaller model"):
        check_memory(config, folder)


def test_engines_ask_before_they_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_llama(tmp_path)
    free(monkeypatch, LIBRARIES)
    with pytest.raises(ModelLoadError, match="of memory to load"):
        create_engine(EngineConfig(model=str(folder), device="cpu"))


def test_models_for_gpus_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_llama(tmp_path)
    free(monkeypatch, 0)
    check_memory(EngineConfig(model=str(folder), device="cuda"), folder)


def test_device_without_enough_memory_rejects_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_llama(tmp_path, **SIZES)
    monkeypatch.setattr(Checkpoint, "load", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setattr(module, "SCRATCH", 0)  # more than these weights
    needed = footprint(folder, "int4").loading
    monkeypatch.setattr(loading, "free_device_memory", lambda device: needed)
    with pytest.raises(ModelLoadError, match="are free; with --quantize int4 it needs"):
        loading.load(EngineConfig(model=str(folder), device="cpu"))
    monkeypatch.setattr(loading, "free_device_memory", lambda device: needed - 1)
    with pytest.raises(ModelLoadError, match="a smaller model"):
        loading.load(EngineConfig(model=str(folder), device="cpu", quantize="int4"))


@pytest.mark.parametrize("by_rows", [True, False])
def test_weights_take_memory_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_rows: bool) -> None:
    """Empty tensors take memory here. Plain weights get it one layer after another, or never if rows are rounded."""
    folder = make_llama(tmp_path, num_hidden_layers=6, **SIZES)
    settings = LoadSettings(
        device=torch.device("cpu"), kernels="torch", dtype=torch.float32, quantization=QuantizationConfig(scheme="int4")
    )
    expected = load_model(folder, settings)
    plain: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    held: list[int] = []

    def allocated(layer: torch.nn.Module, device: torch.device) -> None:
        allocate(layer, device)
        plain.update(parameter for parameter in layer.parameters(recurse=False) if parameter.ndim > 1)
        held.append(sum(parameter.nbytes for parameter in plain if parameter.shape[0] != SIZES["vocab_size"]))

    monkeypatch.setattr(CpuDevice, "overcommits", False)
    monkeypatch.setattr(weights, "allocate", allocated)
    if not by_rows:
        monkeypatch.setattr(Quantizer, "rows", lambda *_: None)
    model = load_model(folder, settings)
    layer = 4 * (SIZES["hidden_size"] * 3 * SIZES["intermediate_size"])
    assert max(held) == 0 if by_rows else layer < 3 * max(held) < 6 * layer
    for ours, theirs in zip(model.language_model.parameters(), expected.language_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    tokens = torch.arange(5, 25)
    logits = [
        PagedRun(one.language_model, [one.language_model.embed(tokens)]).finish([20])[0] for one in (model, expected)
    ]
    assert torch.equal(*logits)


def test_tables_and_heads_are_quantized_first(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    quantize = Quantizer.quantize

    def quantized(quantizer: Quantizer, module: torch.nn.Module) -> None:
        if isinstance(module, Weight):
            sizes.append(module.num_bytes)
        quantize(quantizer, module)

    monkeypatch.setattr(Quantizer, "quantize", quantized)
    quantization = QuantizationConfig(scheme="int4")
    load_model(llama, LoadSettings(device=torch.device("cpu"), dtype=torch.bfloat16, quantization=quantization))
    assert sizes[0] == max(sizes) == 2 * SIZES["vocab_size"] * SIZES["hidden_size"]
    assert sizes.count(sizes[0]) == 1


def test_ranks_read_packed_weights_into_device_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_quantized(make_llama(tmp_path / "plain", **SIZES), tmp_path / "saved", QuantizationConfig(scheme="int8"))
    settings = LoadSettings(device=torch.device("cpu"), kernels="torch", dtype=torch.float32)
    monkeypatch.setattr(CpuDevice, "overcommits", False)
    tokens, meeting = torch.arange(5, 25), Meeting(2)

    def logits(rank: int | None) -> torch.Tensor:
        ranks = None if rank is None else ThreadRanks(meeting, rank)
        model = load_model(tmp_path / "saved", settings, ranks=ranks).language_model
        with torch.inference_mode():
            return PagedRun(model, [model.embed(tokens)]).finish([20])[0]

    expected = logits(None)
    with ThreadPoolExecutor(2) as threads:
        for own in threads.map(logits, range(2)):
            torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)


def test_broken_files_are_left_to_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_llama(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    free(monkeypatch, 0)
    check_memory(EngineConfig(model=str(folder), device="cpu"), folder)


def test_footprint_needs_no_torch() -> None:
    code = "import sys, vlmserve.models.footprint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


WRONG_LENGTHS = [
    ({"max_model_len": 10**6}, "--max-model-len 1000000 is more"),
    ({"max_model_len": 128, "kv_cache_memory": 16384}, "--kv-cache-memory holds .* fewer than --max-model-len 128"),
    ({"kv_cache_memory": 100}, "--kv-cache-memory 100 holds no token: a block of 16 tokens needs"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG_LENGTHS)
def test_wrong_lengths_are_told_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], message: str
) -> None:
    monkeypatch.setattr(lengths, "check_configuration", lambda *_: None)
    monkeypatch.setattr(Checkpoint, "load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigurationError, match=message):
        create_engine(EngineConfig(model=str(make_llama(tmp_path)), device="cpu", **settings))


def test_wrong_lengths_are_told_without_torch(tmp_path: Path) -> None:
    folder = make_llama(tmp_path)
    code = f"""
import re, sys
from vlmserve import LLM
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig
from vlmserve.engine import create_engine
from vlmserve.errors import ConfigurationError
from vlmserve.server.run import serve

def start_server(model, **settings):
    serve(EngineConfig(model=model, **settings), MediaConfig(), ServerConfig(port=0))

def start_engine(model, **settings):
    create_engine(EngineConfig(model=model, **settings))

LARGE = ("torch", "vlmserve.frontend.requests", "vlmserve.server.app")
for settings, message in {WRONG_LENGTHS}:
    for start in (start_engine, LLM, start_server):
        try:
            start({str(folder)!r}, device="cpu", **settings)
        except ConfigurationError as error:
            assert re.search(message, str(error)), error
            assert not sys.modules.keys() & LARGE
        else:
            raise AssertionError(settings)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
