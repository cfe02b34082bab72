"""A whole decoder by the kernels, through the device object, beside the same by torch's operations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from triton import knobs
from triton.runtime.interpreter import GridExecutor

from tests.checkpoints import make_llama, make_text_model
from tests.gemma4 import DECODER
from tests.kernels.test_torch_float8 import made
from tests.kernels.triton.interpreted import CPU, InterpretedDevice, randomize_norms
from tests.kernels.triton.interpreted import loaded as loaded_model
from tests.paged import BlockTables, PagedRun
from vlmserve.devices.device import Device
from vlmserve.kernels.adapters import AdapterRows, Change, LowRank
from vlmserve.kernels.operations import NO_EPILOGUE, Rounding
from vlmserve.kernels.torch_float8 import Float8LinearKernel
from vlmserve.kernels.triton import attention, products
from vlmserve.kernels.triton.float8 import TritonFloat8LinearKernel
from vlmserve.kernels.triton.products import MOST_ROWS, TritonLinearKernel
from vlmserve.layers.layer import arrange_layers
from vlmserve.layers.linear import Linear
from vlmserve.layers.norm import RMSNorm
from vlmserve.layers.residual import ResidualStream
from vlmserve.models.blocks.mlp import MLP as FeedForward
from vlmserve.models.vision.qwen import VisionMLP
from vlmserve.models.vision.qwen_spec import QwenVisionSpec
from vlmserve.quant.methods.rtn import round_to_nearest
from vlmserve.runner.memory import run_longest_step
from vlmserve.settings.quantization import QuantizationConfig

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are not interpreted where there is a GPU"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), **SMALL)


SMALL = {"num_hidden_layers": 2, "head_dim": 8, "vocab_size": 32}
"""Programs that are interpreted take most of a test's time, and there is one for each 32 outputs."""


def loaded(folder: Path, device: type[Device], quantize: Any = None) -> Any:
    return loaded_model(folder, device, quantize).language_model


class Launches(TorchDispatchMode):
    """Counts the operations that a GPU would launch a kernel for, those of torch and those in Triton.

    computes: whether kernels in Triton are interpreted, which takes most of a test's time, or only counted.
    interprets: whether one is at work. torch's operations in it are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.computes = self.interprets = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.interprets:
            return result
        inputs = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        views = isinstance(result, Tensor) and result.untyped_storage().data_ptr() in inputs
        name = f"{function.namespace}::{function.overloadpacket.__name__}"
        if name.endswith("_") or not (views or "empty" in name):
            self.names.append(name)
        return result


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    if not knobs.runtime.interpret:
        pytest.skip("launches of the interpreter are counted")
    counted = Launches()
    call = GridExecutor.__call__

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted.names.append(self.fn.__name__)
        if not counted.computes:
            return None
        counted.interprets = True
        try:
            return call(self, *args, **kwargs)
        finally:
            counted.interprets = False

    monkeypatch.setattr(GridExecutor, "__call__", counting)
    return counted


@torch.inference_mode()
def logits(model: Any, sequences: list[list[int]], steps: list[list[int]]) -> list[Tensor]:
    """Of all tokens, computed in chunks."""
    run = PagedRun(model, [model.embed(torch.tensor(tokens)) for tokens in sequences])
    for step in steps:
        run.step(step)
    return [torch.cat(rows) for rows in run.logits]


@pytest.mark.parametrize("bits", [None, "int8", "int4"])
def test_decoder_logits_equal_torch(folder: Path, bits: str | None) -> None:
    quantization = None if bits is None else QuantizationConfig(scheme=bits)
    ours, theirs = (loaded(folder, device, quantization) for device in (InterpretedDevice, Device))
    assert ours.backend.name == "triton"
    sequences = [[5, 9, 11, 3, 8], [7, 4, 6]]
    steps = [[4, 2], [1, 1]]
    with torch.inference_mode():
        for our, their in zip(logits(ours, sequences, steps), logits(theirs, sequences, steps), strict=True):
            torch.testing.assert_close(our, their, atol=2e-3 if bits == "int4" else 1e-4, rtol=1e-3)


def test_heads_are_normed_on_the_way(tmp_path: Path) -> None:
    folder = make_text_model(tmp_path, Qwen3ForCausalLM, Qwen3Config, **SMALL)
    models = [loaded(folder, device) for device in (InterpretedDevice, Device)]
    for model in models:
        torch.manual_seed(0)
        for layer in model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.data.uniform_(-1, 1)
    results = [logits(model, [[5, 9, 11], [7, 4]], [[2, 1], [1, 1]]) for model in models]
    for our, their in zip(*results, strict=True):
        torch.testing.assert_close(our, their, atol=1e-4, rtol=1e-3)


def test_norms_have_offsets() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(40, 1e-6, dtype=torch.float16, device=CPU, offset=1.0)
    norm.weight.data.normal_()
    x = torch.randn(3, 40).half()
    by_torch = norm(x)
    norm.arrange(InterpretedDevice(CPU))
    assert norm.kernel is not None
    torch.testing.assert_close(norm(x), by_torch, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("rows", [5, MOST_ROWS + 2])
def test_tower_mlp_rows_are_16_byte_aligned(rows: int) -> None:
    """With an adapter of one row."""
    torch.manual_seed(0)
    changes = [Change((LowRank(torch.randn(4, 32), torch.randn(18, 4), 18),)), Change(factor=torch.rand(32))]
    x, results = torch.randn(rows, 32), []
    spec = QwenVisionSpec(
        num_layers=1, hidden_size=32, intermediate_size=18, num_heads=2, num_channels=3, patch_size=4, merge=2,
        frames=2, output_size=24, activation="silu", gated=True,
    )  # fmt: skip
    weights = VisionMLP(spec, dtype=torch.float32, device=CPU)
    for parameter in weights.parameters():
        parameter.data.normal_()
    for device in (InterpretedDevice(CPU), Device(CPU)):
        mlp = VisionMLP(spec, dtype=torch.float32, device=CPU)
        mlp.load_state_dict(weights.state_dict())
        arrange_layers(mlp, device)
        assert mlp.gate_up_proj(x).shape[1] == (64 if isinstance(device, InterpretedDevice) else 18)
        slots = AdapterRows(1)
        slots.set([-1, 0, -1], [2, 1, rows - 3])
        for layer, change in zip((mlp.gate_up_proj, mlp.down_proj), changes, strict=True):
            layer.adapt(slots)
            layer.set_adapter(0, layer.prepare(change))
        stream = ResidualStream(x)
        stream.add(mlp(x))
        results.append(stream.rows)
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def layer_launches(model: Any, launches: Launches, context: int) -> list[str]:
    """Of all layers and the last norm, in a step of two decodes, one of them with so long a context."""
    run = PagedRun(model, [model.embed(torch.full((context,), 5)), model.embed(torch.tensor([7, 4]))])
    with torch.inference_mode():
        run.step([context - 1, 1])
        if model.adapter_rows is not None:
            model.adapter_rows.set([0, -1], [1, 1])
        through_layers, taken = model.executor.run, list[str]()

        def counted(*args: Any) -> Any:
            before = len(launches.names)
            with launches:
                result = through_layers(*args)
            taken.extend(launches.names[before:])
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.executor, "run", counted)
            run.step([1, 1])
    return [name for name in taken if name != "add_parts"]


ATTENTION = ["multiply", "attend_rows", "combine"]
OUTPUT, MLP = ["multiply"], ["multiply", "multiply"]


def test_a_layer_of_decodes_takes_six_launches(folder: Path, launches: Launches) -> None:
    """The first norm and the last one have launches of their own."""
    model = loaded(folder, InterpretedDevice)
    layer = [*ATTENTION, *OUTPUT, *MLP]
    assert layer_launches(model, launches, 16) == ["norm_rows", *layer, *layer, "norm_rows"]


def test_a_full_gpu_combines_no_splits(folder: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "multiprocessors", lambda _: 1)
    monkeypatch.setattr(attention, "UNEVEN_ROUNDS", (0, 1))
    layer = ["multiply", "attend_rows", *OUTPUT, *MLP]
    assert layer_launches(loaded(folder, InterpretedDevice), launches, 16) == ["norm_rows", *layer, *layer, "norm_rows"]


def test_decodes_beside_a_prompt_take_two_launches(folder: Path, launches: Launches) -> None:
    model = loaded(folder, InterpretedDevice)
    with launches:
        logits(model, [[5] * 9, [7] * 9], [[8, 0], [1, 9]])
    taken = [name for name in launches.names if name in ("rotate_and_write", "attend_rows", "combine")]
    assert taken == ["rotate_and_write", "attend_rows"] * 4


def test_a_step_of_decodes_divides_its_work_once(folder: Path, launches: Launches) -> None:
    model = loaded(folder, InterpretedDevice)
    logits(model, [[5], [7]], [[1, 1]])
    assert launches.names.count("divide_decodes") == 1
    assert "rotate_and_write" not in launches.names


def test_the_longest_step_allocates_all_that_lengths_need(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for splits and rotary tables is part of the memory profile, and captured steps keep reading both."""
    model = loaded_model(folder, InterpretedDevice)
    decoder: Any = model.language_model
    backend, plans = decoder.backend, []
    prepare = backend.prepare
    monkeypatch.setattr(backend, "prepare", lambda *args: plans.append(prepare(*args)) or plans[-1])
    run_longest_step(model, num_tokens=64, num_seqs=3, max_model_len=700, block_size=16)
    splits, table = plans[-1].sums, decoder.ropes[0].upto(700)[0]
    blocks = BlockTables([700] * 4, 16)
    for chunks in ([(0, 698, 1), (1, 698, 1), (2, 690, 9)], [(0, 698, 1)], [(3, 600, 64)]):
        metadata = blocks.metadata(chunks)
        if len(chunks) > 1:
            metadata = replace(metadata, decodes=torch.tensor([metadata.num_decodes], dtype=torch.int32))
        assert backend.prepare(metadata, 16, decoder.spec.attention, torch.float32).sums is splits
    assert decoder.ropes[0].upto(700)[0] is table


def test_products_that_reorder_their_inputs_get_normed_ones(folder: Path, launches: Launches) -> None:
    models = [loaded(folder, device) for device in (InterpretedDevice, Device)]
    for model in models:
        for layer in model.layers:
            for linear in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj):
                linear.input_order = torch.randperm(linear.in_features, generator=torch.Generator().manual_seed(0))
    launches.computes = True
    ours, theirs = (logits(model, [[5, 9, 11]], [[2], [1]])[0] for model in models)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    launches.computes = False
    assert layer_launches(models[0], launches, 3).count("norm_rows") == 5


def test_norms_of_heads_take_no_launches(tmp_path: Path, launches: Launches) -> None:
    folder = make_text_model(tmp_path, Qwen3ForCausalLM, Qwen3Config, **SMALL)
    layer = [*ATTENTION, *OUTPUT, *MLP]
    taken = layer_launches(loaded(folder, InterpretedDevice), launches, 3)
    assert taken == ["norm_rows", *layer, *layer, "norm_rows"]


EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def test_a_layer_with_experts_equals_torch(tmp_path: Path, launches: Launches) -> None:
    """Its launches are the same for all rows, and no choice comes to the host."""
    folder = make_text_model(tmp_path, Qwen3MoeForCausalLM, Qwen3MoeConfig, **{**SMALL, **EXPERTS, "vocab_size": 32})
    launches.computes, models = True, [loaded(folder, device) for device in (InterpretedDevice, Device)]
    ours, theirs = (logits(model, [[5, 9, 11]], [[2], [1]])[0] for model in models)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    launches.computes = False
    routed = ["multiply", "choose_experts", "count_rows", "sort_rows", *["multiply_by_expert"] * 2, "weigh_experts"]
    layer = [*ATTENTION, *OUTPUT, "norm_rows", *routed, "norm_rows"]
    taken = [name for name in layer_launches(models[0], launches, 3) if "::" not in name]
    assert taken == ["norm_rows", *layer, *layer]


def test_float8_matmuls_round_inputs_in_one_launch(launches: Launches) -> None:
    weight = made(torch.rand(32))
    arguments = weight, None, NO_EPILOGUE, torch.bfloat16
    counts = []
    for product in (Float8LinearKernel(*arguments, by_rows=True), TritonFloat8LinearKernel(*arguments)):
        launches.names.clear()
        with launches:
            product(torch.randn(3, 64).bfloat16())
        counts.append([name for name in launches.names if "randn" not in name])
    assert counts[1][-2:] == ["round_to_float8", "aten::_scaled_mm"]
    assert len(counts[0]) - len(counts[1]) >= 6


class Float8Device(InterpretedDevice):
    """A GPU that multiplies float8 with a scale for each row."""

    _multiplies_float8_rows = True


def quantized(linear: Linear, kind: Rounding) -> Linear:
    """With random weights, whose kernel rounds inputs."""
    plain = torch.randn(linear.out_features, linear.in_features) / 8
    octets = round_to_nearest(plain, bits=8, group_size=linear.in_features, symmetric=True)
    linear.quantize(made(torch.rand(linear.out_features) / 400) if kind == "float8" else octets, input_bits=8)
    return linear


@pytest.mark.parametrize("kind", get_args(Rounding))
def test_norms_and_activations_round_inputs(
    kind: Rounding, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch fewer for each matmul that reads a norm or an activation, and the same bits."""
    torch.manual_seed(0)
    monkeypatch.setattr(products, "MOST_ROWS", 1)
    of_model: Any = {"dtype": torch.bfloat16, "device": CPU}
    mlp, norms = FeedForward(64, 64, "silu", gated=True, bias=False, **of_model), [RMSNorm(64, 1e-6, **of_model)] * 2
    readers = [quantized(mlp.reader, kind), quantized(Linear(64, 32, bias=False, **of_model), kind)]
    modules = torch.nn.ModuleList([mlp, readers[1], quantized(mlp.last, kind), *norms])
    norms[0].weight.data.normal_()
    arrange_layers(modules, Float8Device(CPU))
    x, results, launches.computes = torch.randn(3, 64).bfloat16(), [], True
    for fuses in (False, True):
        for product in (TritonLinearKernel, TritonFloat8LinearKernel):
            monkeypatch.setattr(product, "fuses", fuses)
        launches.names.clear()
        with launches:
            stream = ResidualStream(x)
            stream.add(mlp(stream.normed(norms[0], mlp.reader)))
            results.append((readers[1](stream.normed(norms[1], readers[1])), [*launches.names]))
    (separate, many), (fused, few) = results
    assert torch.equal(separate, fused)
    rounds, multiplies = f"round_to_{kind}", "aten::_scaled_mm" if kind == "float8" else "multiply_bytes"
    assert few == ["norm_rows", multiplies, rounds, multiplies, "norm_rows", multiplies]
    assert many == [
        "norm_rows", rounds, multiplies, "activate_rows", rounds, multiplies, "norm_rows", rounds, multiplies
    ]  # fmt: skip


def test_adapters_of_a_product_take_two_launches(folder: Path, launches: Launches) -> None:
    model = loaded(folder, InterpretedDevice)
    rows = model.adapter_rows = AdapterRows(2)
    for layer in model.layers:
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            linear.adapt(rows)
            down, up = torch.randn(4, linear.in_features), torch.randn(linear.out_features, 4)
            linear.set_adapter(0, linear.prepare(Change((LowRank(down, up),))))
    expected = []
    for name in [*ATTENTION, *OUTPUT, "norm_rows", *MLP, "norm_rows"]:
        expected += ["multiply", "shrink", "add_changes"] if name == "multiply" else [name]
    assert layer_launches(model, launches, 3) == ["norm_rows", *expected, *expected]


def by_library(names: list[str]) -> list[str]:
    return ["library" if "::" in name else name for name in names]


def test_sums_of_many_rows_are_normed_once(folder: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MOST_ROWS", 1)
    gates = ["library", "activate_rows", "library"]
    layer = ["library", "attend_rows", "combine", "library", "norm_rows", *gates, "norm_rows"]
    taken = layer_launches(loaded(folder, InterpretedDevice), launches, 3)
    assert by_library(taken) == ["norm_rows", *layer, *layer]


def test_norms_are_not_left_to_the_library(folder: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only some products multiply so many rows themselves."""
    model = loaded(folder, InterpretedDevice)
    gates = [layer.mlp.gate_up_proj.kept().product for layer in model.layers]
    completes = TritonLinearKernel.are_few
    monkeypatch.setattr(TritonLinearKernel, "are_few", lambda self, rows: self not in gates and completes(self, rows))
    layer = [*ATTENTION, "multiply", "norm_rows", "library", "activate_rows", "multiply"]
    taken = by_library(layer_launches(model, launches, 3))
    assert taken == ["norm_rows", *layer, *layer, "norm_rows"]


@pytest.mark.parametrize("most_rows", [1, MOST_ROWS])
def test_norms_of_what_blocks_make_take_no_launches(
    tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    """Those before and behind a sum are one launch."""
    monkeypatch.setattr(products, "MOST_ROWS", most_rows)
    product, gates = (["multiply"], []) if most_rows > 1 else (["library"], ["activate_rows"])
    model = loaded(make_text_model(tmp_path, Gemma3ForCausalLM, Gemma3TextConfig, **SMALL), InterpretedDevice)
    layer = [*product, "attend_rows", "combine", *product, "norm_rows", *product, *gates, *product, "norm_rows"]
    taken = by_library(layer_launches(model, launches, 3))
    assert taken == ["norm_rows", *layer * len(model.layers)]


def test_layers_with_shared_keys_equal_torch(tmp_path: Path) -> None:
    """Prompts, whose last layers compute the last token alone, and decodes."""
    settings = {**DECODER, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": DECODER["layer_types"][:4]}
    folder, results = make_text_model(tmp_path, Gemma4ForCausalLM, Gemma4TextConfig, **{**SMALL, **settings}), []
    for device in (InterpretedDevice, Device):
        model = loaded(folder, device)
        assert model.backend.name == ("triton" if device is InterpretedDevice else "torch")
        results.append(logits(model, [[5, 9, 11], [7, 4]], [[2, 1], [1, 1]]))
    for our, their in zip(*results, strict=True):
        torch.testing.assert_close(our, their, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "config", "most_rows"),
    [
        (Gemma3ForCausalLM, Gemma3TextConfig, 1),
        (Gemma3ForCausalLM, Gemma3TextConfig, MOST_ROWS),
        (Olmo2ForCausalLM, Olmo2Config, MOST_ROWS),
        (PhiForCausalLM, PhiConfig, 1),
        (PhiForCausalLM, PhiConfig, MOST_ROWS),
        (GPTBigCodeForCausalLM, GPTBigCodeConfig, 1),
    ],
    ids=[
        "norms before and behind, library",
        "norms before and behind",
        "norms behind",
        "parallel blocks, library",
        "parallel blocks",
        "layer norms, library",
    ],
)
def test_sums_and_norms_equal_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Any, config: Any, most_rows: int
) -> None:
    monkeypatch.setattr(products, "MOST_ROWS", most_rows)
    folder, results = make_text_model(tmp_path, family, config, **SMALL), []
    for device in (InterpretedDevice, Device):
        model = loaded(folder, device)
        randomize_norms(model, device)
        results.append(logits(model, [[5, 9, 11], [7, 4]], [[2, 1], [1, 1]]))
    for our, their in zip(*results, strict=True):
        torch.testing.assert_close(our, their, atol=1e-4, rtol=1e-3)
