"""Programs of native kernels: the same numbers as call by call, and no value written over before its last use."""

from __future__ import annotations

import ctypes
import gc
import logging
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.blip import make_blip
from tests.checkpoints import make_gemma3, make_llama, make_qwen_vl
from tests.gguf_files import write_gguf
from tests.models.test_families import FAMILIES, MIXTURES, make
from tests.native import built
from tests.paged import PagedRun
from vlmserve.devices import cpu
from vlmserve.devices.cpu import ProgramExecutor
from vlmserve.kernels import extension
from vlmserve.kernels.attention import LayerCache
from vlmserve.kernels.blocks import allocate_states
from vlmserve.kernels.cpu_native import NativeHeadsNorm, NativeNorm, PackedLinear
from vlmserve.kernels.cpu_program import (
    INPUT,
    OUTPUT,
    NotRecordable,
    Program,
    Recording,
    assign_buffers,
)
from vlmserve.kernels.cpu_record import LINEAR, MULTIPLY, NORM, Operation, mismatch
from vlmserve.kernels.operations import NormedHeads
from vlmserve.layer_specs import CacheType
from vlmserve.layers.rope import RopeTables
from vlmserve.layers.step import StepContext
from vlmserve.models.decoder import Decoder
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import load_model
from vlmserve.settings.quantization import QuantizationConfig


def load_decoder(folder: Path, dtype: torch.dtype, quantize: str = "none", **options: Any) -> Decoder:
    quantization = QuantizationConfig(scheme=quantize, group_size=32)
    model = load_model(
        folder,
        LoadSettings(device=torch.device("cpu"), dtype=dtype, kernels="native", quantization=quantization, **options),
    ).language_model
    assert isinstance(model, Decoder)
    return model


def logits(decoder: Decoder, counts: list[list[int]]) -> torch.Tensor:
    """Of three sequences, computed in batches that take so many tokens of each."""
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 300, (length,), generator=generator) for length in (61, 1, 23)]
    run = PagedRun(decoder, [decoder.embed(sequence) for sequence in sequences], block_size=16)
    for count in counts:
        run.step(count)
    return torch.cat(run.finish([1, 1, 1]))


def program_of(decoder: Decoder, caches: list[LayerCache]) -> Program | None:
    """What runs the decoder's layers over these caches."""
    nothing: Any = None
    tables = [RopeTables(rope, torch.arange(1), 1, decoder.dtype) for rope in decoder.ropes]
    size = 0 if decoder.spec.per_layer is None else decoder.spec.per_layer.size * len(decoder.spec.mixers)
    x = torch.empty(1, decoder.hidden_size + size, dtype=decoder.dtype)
    states = allocate_states(decoder.state_specs, 2, decoder.dtype, torch.device("cpu"))
    step = StepContext(nothing, tables, nothing, states=states)
    assert isinstance(decoder.executor, ProgramExecutor)
    return decoder.executor.program(decoder.through_layers, x, caches, step)


@built
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overrides", [{}, {"attention_bias": True, "num_key_value_heads": 6}], ids=["plain", "biases"])
@pytest.mark.parametrize("cache_type", ["auto", "int8"])
def test_program_equals_its_kernels_run_separately(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    quantize: str,
    overrides: dict[str, Any],
    cache_type: CacheType,
) -> None:
    folder = make_llama(tmp_path, **overrides)
    counts = [[40, 1, 5], [1, 0, 9], [1, 0, 1]]
    programs = []
    record = cpu.record
    monkeypatch.setattr(cpu, "record", lambda *args: programs.append(record(*args)) or programs[-1])
    at_once = logits(load_decoder(folder, dtype, quantize, cache_type=cache_type), counts)
    assert len(programs) == 1
    assert programs[0] is not None
    monkeypatch.setattr(cpu, "record", lambda *args: None)
    one_by_one = load_decoder(folder, dtype, quantize, cache_type=cache_type)
    assert torch.equal(logits(one_by_one, counts), at_once)


@built
def test_superblocks_run_as_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
    folder = make_llama(tmp_path / "folder", **sizes)
    path = write_gguf(folder, tmp_path / "model.gguf", types={"attn_v": "Q6_K", "": "Q4_K"})
    programs, counts = [], [[40, 1, 5], [1, 0, 9], [1, 0, 1]]
    record = cpu.record
    monkeypatch.setattr(cpu, "record", lambda *args: programs.append(record(*args)) or programs[-1])
    at_once = logits(load_decoder(path, torch.bfloat16), counts)
    assert len(programs) == 1
    assert programs[0] is not None
    monkeypatch.setattr(cpu, "record", lambda *args: None)
    assert torch.equal(logits(load_decoder(path, torch.bfloat16), counts), at_once)


@built
@pytest.mark.parametrize(
    "name", [*FAMILIES, *MIXTURES, "qwen3.5 with shared keys", "lfm2", "lfm3", "lfm3 without gates"]
)
def test_every_family_runs_as_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = make(tmp_path, name)
    counts = [[40, 1, 5], [1, 0, 9], [1, 0, 1]]
    decoder = load_decoder(folder, torch.bfloat16)
    assert program_of(decoder, decoder.allocate_cache(3, 16)) is not None
    at_once = logits(decoder, counts)
    monkeypatch.setattr(cpu, "record", lambda *args: None)
    assert torch.equal(logits(load_decoder(folder, torch.bfloat16), counts), at_once)


@built
@pytest.mark.parametrize(
    "make_model", [partial(make_qwen_vl, kind="qwen3_vl"), make_gemma3], ids=["qwen3_vl", "gemma3"]
)
def test_vision_families_decoders_run_as_one_program(tmp_path: Path, make_model: Callable[[Path], Path]) -> None:
    decoder = load_decoder(make_model(tmp_path), torch.bfloat16)
    assert program_of(decoder, decoder.allocate_cache(3, 16)) is not None


@built
def test_cross_attention_runs_kernel_by_kernel(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    decoder = load_decoder(make_blip(tmp_path), torch.float32)
    with caplog.at_level(logging.INFO, "vlmserve"):
        assert program_of(decoder, decoder.allocate_cache(3, 16)) is None
    assert "decodes small models more slowly (no kernel for cross-attention)" in caplog.text


@built
def test_new_caches_are_recorded_anew(tmp_path: Path) -> None:
    decoder = load_decoder(make_llama(tmp_path), torch.float32)
    assert torch.equal(logits(decoder, [[61, 1, 23]]), logits(decoder, [[61, 1, 23]]))
    first, second = decoder.allocate_cache(3, 16), decoder.allocate_cache(3, 16)
    program = program_of(decoder, first)
    assert program_of(decoder, first) is program
    assert program_of(decoder, second) is not program


@built
def test_a_program_keeps_no_cache_alive(tmp_path: Path) -> None:
    decoder = load_decoder(make_llama(tmp_path), torch.float32)
    caches = decoder.allocate_cache(3, 16)
    assert program_of(decoder, caches) is not None
    memory = [weakref.ref(tensor) for cache in caches for tensor in (cache.keys, cache.values)]
    gc.disable()
    try:
        del caches
        assert all(tensor() is None for tensor in memory)
    finally:
        gc.enable()


@built
def test_unsupported_operations_are_not_recorded() -> None:
    recording = Recording(8, torch.float32)
    with pytest.raises(NotRecordable, match="8 features"):
        NativeNorm(torch.ones(9), None, 1e-5)(recording.input)
    with pytest.raises(NotRecordable, match="bfloat16"):
        PackedLinear(torch.ones(4, 8).bfloat16())(recording.input)
    in_place = NativeHeadsNorm([NormedHeads(0, torch.ones(2, 4), 1e-5, centered=False)], torch.float32)
    in_place(recording.input)
    with pytest.raises(NotRecordable, match="input"):
        recording.finish(NativeNorm(torch.ones(8), None, 1e-5)(recording.input))
    part = recording.input[:, 2:6]
    with pytest.raises(NotRecordable, match="4 of 8 columns"):
        NativeNorm(torch.ones(4), None, 1e-5)(part)
    for operation in (
        torch.relu,
        lambda x: x + 1,
        lambda x: x.float(),
        lambda x: x[0],
        lambda x: x * 2,
        lambda x: x * torch.ones(8),
    ):
        with pytest.raises(NotRecordable):
            operation(recording.input)
    with pytest.raises(NotRecordable):
        recording.finish(recording.input)


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[Operation], list[int]]:
    """Products and multiplications over values of two widths, the last of which is the result."""
    widths = [draw(st.sampled_from([8, 16]))]
    operations = []
    for target in range(1, draw(st.integers(2, 20))):
        # A value that nobody reads would have no last use; kernels leave none.
        source = draw(st.integers(max(0, target - 4), target - 1))
        if source > 0 and draw(st.integers(0, 3)) == 0:
            operations.append(Operation(NORM, source, source))
        width = draw(st.sampled_from([8, 16]))
        alike = [value for value in range(target) if widths[value] == width]
        if draw(st.booleans()):
            residual = draw(st.sampled_from([-1, *alike]))
            operations.append(Operation(LINEAR, source, target, residual))
        else:
            operations.append(Operation(MULTIPLY, source, target, draw(st.sampled_from(range(target)))))
        widths.append(width)
    return operations, widths


@given(networks())
@settings(max_examples=100, deadline=None)
def test_values_survive_until_their_last_use(network: tuple[list[Operation], list[int]]) -> None:
    operations, widths = network
    assigned, buffer_widths = assign_buffers(operations, widths, len(widths) - 1)
    held = {INPUT: 0, -1: -1}
    for wanted, operation in zip(operations, assigned, strict=True):
        assert held[operation.source] == wanted.source
        assert held[operation.residual] == wanted.residual
        assert operation.target != INPUT
        assert (operation.target == operation.source) == (wanted.target == wanted.source)
        assert buffer_widths[operation.target] == widths[wanted.target]
        held[operation.target] = wanted.target
    assert held[OUTPUT] == len(widths) - 1


FIELDS: list[tuple[str, Any]] = [(name, kind) for name, kind, *_ in Operation._fields_]
WRONG_TWINS = {
    "order": [FIELDS[1], FIELDS[0], *FIELDS[2:]],
    "offset": [FIELDS[0], ("added", ctypes.c_int64), *FIELDS[1:]],
    "size": [(name, ctypes.c_int32 if name == "adapters" else kind) for name, kind in FIELDS],
    "type": [(name, ctypes.c_int64 if name == "eps" else kind) for name, kind in FIELDS],
    "length": FIELDS[:-1],
}


@built
@pytest.mark.parametrize("fields", WRONG_TWINS.values(), ids=WRONG_TWINS)
def test_wrong_twins_of_the_record_are_rejected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fields: Any
) -> None:
    assert mismatch(extension.extension()) is None
    assert extension.load() is not None
    twin = type("Twin", (ctypes.Structure,), {"_fields_": fields})
    monkeypatch.setattr(extension, "mismatch", partial(mismatch, record=twin))
    assert extension.load() is None
    assert "Operation has" in caplog.text


@built
def test_kernels_without_a_record_are_outdated() -> None:
    native = extension.extension()
    assert mismatch(SimpleNamespace(interface=native.interface)) is not None  # type: ignore[arg-type]
    described = SimpleNamespace(operation_fields=native.operation_fields, NORM=1, LINEAR=0, ATTENTION=2)
    assert "has 1 in C++ and 0 in Python" in str(mismatch(described))  # type: ignore[arg-type]


def test_operations_have_no_unknown_fields() -> None:
    with pytest.raises(AttributeError, match="in_feature"):
        Operation(NORM, 0, 1, in_feature=8)
