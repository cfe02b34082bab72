"""GGUF files against transformers, which reads the same model from a folder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import gguf
import pytest
import torch
import transformers
from gguf.quants import dequantize

from tests.checkpoints import QWEN35, make_llama, make_text_model
from tests.gguf_files import write_gguf
from tests.models.test_decoder import LLAMA3, assert_equal, load, paged_run, token_sequences, transformers_logits
from tests.models.test_families import FAMILIES as MODELS
from tests.models.test_families import GEMMA4, LONGROPE, MIXTURES, SLIDING, YARN
from tests.native import built
from tests.oracles.rounded_inputs import DOTS
from vlmserve.devices.cpu import NativeCpuDevice
from vlmserve.errors import MissingWeightsError, ModelLoadError, UnsupportedModelError, VLMServeError
from vlmserve.families.registry import LANGUAGE_FAMILIES
from vlmserve.frontend.defaults import default_sampling
from vlmserve.gguf.config import read_config
from vlmserve.gguf_header import FLOAT32, read_header
from vlmserve.kernels.cpu_native import PackedLinear
from vlmserve.kernels.extension import selected_isa
from vlmserve.kernels.isas import SUPERBLOCK_BYTES
from vlmserve.layers.linear import Embedding, Linear, TiedEmbedding
from vlmserve.models import weights
from vlmserve.models.footprint import footprint
from vlmserve.models.gguf_blocks import UNPACK
from vlmserve.models.gguf_tensors import GGUFFile
from vlmserve.models.hub import resolve_model
from vlmserve.models.identity import weights_digest
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.quantized import save_quantized
from vlmserve.models.registry import Description, load_model
from vlmserve.models.weights import Checkpoint
from vlmserve.prompt.checkpoint import read_prompt_files
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.quant.memory import own_bytes
from vlmserve.settings.quantization import QuantizationConfig

CPU = torch.device("cpu")
BLOCKS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
"""Sizes that all types of blocks divide."""
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Ministral 3's, after a context of 16 tokens."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}),
    "llama, tied, with biases": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama with heads of its own size": ("Llama", {"head_dim": 24}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama with yarn": ("Llama", {"rope_parameters": YARN}),
    "llama with linear rope": ("Llama", {"rope_parameters": LINEAR}),
    "mistral with a window": ("Mistral", {"sliding_window": 7}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": GROWING}),
    "ministral3 whose attention grows": ("Ministral3", {"rope_parameters": {**GROWING, "mscale_all_dim": 0.0}}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 with experts": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "phi": ("Phi", {"num_key_value_heads": 6, "partial_rotary_factor": 0.5, "rms_norm_eps": None}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3 with a window": ("Phi3", {"pad_token_id": 0, "sliding_window": 9}),
    "phi3 with longrope": (
        "Phi3",
        {"pad_token_id": 0, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    ),
    "stablelm": ("StableLm", {"num_key_value_heads": 6}),
    "stablelm 2": ("StableLm", {"use_qkv_bias": True, "use_parallel_residual": True, "qk_layernorm": True}),
    "gpt_bigcode": ("GPTBigCode", {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 512, "n_inner": 80}),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2 with a window": ("Starcoder2", {"sliding_window": 6, "use_bias": False}),
    "glm": ("Glm", {"head_dim": 8, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "gemma": ("Gemma", {"head_dim": 8, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 20, "layer_types": SLIDING}),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4 with keys as values": MODELS["gemma4 with keys as values"],
    "gemma4 with experts": MIXTURES["gemma4 with experts"],
    "smollm3": ("SmolLM3", {"pad_token_id": 0, "no_rope_layer_interval": 4, "num_hidden_layers": 4}),
    "olmo2": ("Olmo2", {}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5, "block_multiple_of": 16}),
    "olmo2 with biases": ("Olmo2", {"attention_bias": True}),
    "qwen3.5": ("Qwen3_5", QWEN35),
    "qwen3.5 with shared keys": ("Qwen3_5", {**QWEN35, "linear_num_value_heads": 6, "linear_value_head_dim": 16}),
    "qwen3.5 with experts": ("Qwen3_5Moe", {**QWEN35, **EXPERTS, "shared_expert_intermediate_size": 48}),
}


def make(folder: Path, name: str, **overrides: Any) -> Path:
    family, traits = FAMILIES[name]
    config_class = getattr(
        transformers, family + ("TextConfig" if family in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else "Config")
    )
    model_class = getattr(transformers, family + "ForCausalLM")
    return make_text_model(folder, model_class, config_class, **{**traits, **overrides})


def native_layers(model: LoadedModel) -> dict[str, Linear]:
    """Linear layers that a kernel multiplies with, by name."""
    return {
        name: module
        for name, module in model.language_model.named_modules()
        if isinstance(module, Linear) and isinstance(product_of(module), PackedLinear)
    }


def product_of(layer: Linear | TiedEmbedding | Embedding) -> Any:
    """The kernel's weight. None: torch computes it."""
    kept = layer.kept()
    return None if kept is None else kept.product


def bits(model: LoadedModel) -> dict[str, int]:
    """Bits of the weights of the first layer's packed layers, 0 for plain ones."""
    return {
        name.removeprefix("layers.0."): layer.bits or 0
        for name, layer in native_layers(model).items()
        if name.startswith("layers.0.")
    }


def in_superblocks(kind: str, input_bits: int | None = None) -> bool:
    """Whether this machine multiplies with weights of that type as they are in the file."""
    is_one = gguf.GGMLQuantizationType[kind] in SUPERBLOCK_BYTES
    return is_one and NativeCpuDevice(CPU, selected_isa()).multiplies_superblocks(input_bits)


def rounds_inputs(kind: str, input_bits: int | None = None, *, repacked: bool = False) -> bool:
    """Return whether matmuls with this type round their inputs to 8 bits. input_bits: as asked for. repacked: not in
    superblocks."""
    if input_bits is None and kind in ("Q4_0", "Q4_1", "Q4_K"):
        return True
    return input_bits == 8 or (in_superblocks(kind, input_bits) and not repacked)


def kept_bits(kind: str, input_bits: int | None = None) -> int:
    own = int(kind.lstrip("IQ")[0])
    return own if in_superblocks(kind, input_bits) or own == 4 else 8


def test_every_architecture_is_tested() -> None:
    tested = {FAMILIES[name][0].lower() for name in FAMILIES}
    called = {
        "mistral3": "ministral3",
        "phi2": "phi",
        "starcoder": "gptbigcode",
        "chatglm": "glm",
        "qwen2vl": "qwen2",
        "qwen3vl": "qwen3",
        "qwen35": "qwen3_5",
        "qwen35moe": "qwen3_5moe",
        "qwen3vlmoe": "qwen3moe",
        # Of PaddleOCR-VL, with which it is tested.
        "paddleocr": "llama",
    }
    known = {name for family in LANGUAGE_FAMILIES.values() for name in family.gguf}
    assert {called.get(name, name) for name in known} <= tested


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "folder", name)
    path = write_gguf(folder, tmp_path / "model.gguf")
    sequences = token_sequences(300, [40, 1, 23])
    actual = paged_run(load(path), sequences).finish([9, 9, 9])
    assert_equal(actual, transformers_logits(folder, sequences))
    # What families call the tensors of their checkpoints has nothing to do with the names that they have here.
    assert Checkpoint(path, Description.read(path).family.rename).names == set(GGUFFile(path).keys())


def test_glm_ocr_text_is_reordered_glm4(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "mrope_section": [2, 2, 2]}
    folder = make(tmp_path / "folder", "glm4", rope_parameters=rope, num_nextn_predict_layers=1)
    metadata = {"glm4.rope.dimension_sections": [2, 2, 2, 0]}
    path = write_gguf(folder, tmp_path / "model.gguf", metadata=metadata)
    sequences = token_sequences(300, [40, 1, 23])
    assert_equal(paged_run(load(path), sequences).finish([9, 9, 9]), transformers_logits(folder, sequences))


def test_the_text_part_of_qwen3_vl_is_qwen3(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "qwen3")
    metadata = {"qwen3vl.rope.dimension_sections": [24, 20, 20, 0], "qwen3vl.n_deepstack_layers": 3}
    path = write_gguf(folder, tmp_path / "model.gguf", metadata=metadata, architecture=gguf.MODEL_ARCH.QWEN3VL)
    sequences = token_sequences(300, [40, 1, 23])
    assert_equal(paged_run(load(path), sequences).finish([9, 9, 9]), transformers_logits(folder, sequences))


SHARED_KEYS: dict[str, Any] = {"linear_num_value_heads": 8, "linear_value_head_dim": 64, "hidden_size": 256}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
def test_value_heads_move_without_loss(tmp_path: Path, kind: str) -> None:
    folder = make(tmp_path / "folder", "qwen3.5", **SHARED_KEYS)
    path = write_gguf(folder, tmp_path / "model.gguf", types={"ssm_out": kind, "attn_qkv": kind})
    file = GGUFFile(path)
    for name in ("out_proj", "in_proj_qkv"):
        stored = f"language_model.layers.0.linear_attn.{name}.weight"
        packed = file.quantized(stored)
        assert packed is not None
        assert torch.equal(packed.dequantize(), file.get_tensor(stored))
    assert file.blocks("language_model.layers.0.linear_attn.out_proj.weight") is None
    sequences = token_sequences(300, [21, 4])
    assert_equal(paged_run(load(path), sequences).finish([9, 9]), transformers_logits(folder, sequences))


@built
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_moved_superblocks_stay_quantized(tmp_path: Path, kind: str) -> None:
    """A superblock holds two heads, so its groups move alone."""
    folder = make(tmp_path / "folder", "qwen3.5", **{**SHARED_KEYS, "linear_value_head_dim": 128})
    path = write_gguf(folder, tmp_path / "model.gguf", types={"ssm_out": kind})
    layer = load_model(path, LoadSettings(device=CPU, dtype=torch.bfloat16)).language_model.layers[0]
    out_proj, x = layer.linear_attn.out_proj, torch.randn(5, 1024).bfloat16()
    assert out_proj.bits == (4 if kind == "Q4_K" else 8)
    expected = x.float() @ GGUFFile(path).get_tensor("language_model.layers.0.linear_attn.out_proj.weight").T
    torch.testing.assert_close(out_proj(x).float(), expected, atol=0.02 * float(expected.abs().max()), rtol=0.02)


def test_float_gates_leave_projections_quantized(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "qwen3.5", **SHARED_KEYS)
    path = write_gguf(folder, tmp_path / "model.gguf", types={"attn_qkv": "Q8_0", "attn_gate": "Q4_0"})
    assert read_header(path).tensors["blk.0.ssm_alpha.weight"].type == FLOAT32
    layer = load_model(path, LoadSettings(device=CPU, dtype=torch.bfloat16)).language_model.layers[0].linear_attn
    assert (layer.in_proj.bits, layer.in_proj_gates.bits) == (8, None)


def test_groups_across_value_heads_are_dequantized(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "qwen3.5", **{**SHARED_KEYS, "linear_value_head_dim": 16})
    path = write_gguf(folder, tmp_path / "model.gguf", types={"ssm_out": "Q8_0"})
    assert GGUFFile(path).quantized("language_model.layers.0.linear_attn.out_proj.weight") is None
    sequences = token_sequences(300, [12, 4])
    # Norms of small results make these weights sensitive to rounding: float32 is up to 1.4e-4 from float64.
    of_file, of_folder = (paged_run(load(one), sequences).finish([5, 4]) for one in (path, folder))
    assert_equal(of_file, of_folder)


def test_qwen35_drops_layers_that_predict_ahead(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "qwen3.5")
    metadata = {"qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1}
    path = write_gguf(folder, tmp_path / "model.gguf", metadata=metadata)
    assert read_config(read_header(path))["num_hidden_layers"] == 2
    assert not any(".layers.2." in name for name in GGUFFile(path).keys())  # noqa: SIM118


@pytest.mark.parametrize(
    ("metadata", "words"),
    [({"ssm.time_step_rank": 3}, "3 value heads do not fit 2 key heads"), ({"ssm.state_size": 9}, "metadata asks for")],
    ids=str,
)
def test_delta_heads_that_do_not_fit_are_named(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    folder = make(tmp_path / "folder", "qwen3.5")
    named = {f"qwen35.{key}": value for key, value in metadata.items()}
    path = write_gguf(folder, tmp_path / "model.gguf", metadata=named)
    with pytest.raises(ModelLoadError, match=words):
        load(path)


def test_text_part_of_qwen3_vl_may_have_experts(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "qwen3 with experts")
    metadata = {"qwen3vlmoe.rope.dimension_sections": [24, 20, 20, 0], "qwen3vlmoe.n_deepstack_layers": 3}
    path = write_gguf(folder, tmp_path / "model.gguf", metadata=metadata, architecture=gguf.MODEL_ARCH.QWEN3VLMOE)
    sequences = token_sequences(300, [40, 1, 23])
    assert_equal(paged_run(load(path), sequences).finish([9, 9, 9]), transformers_logits(folder, sequences))


@pytest.mark.parametrize(
    ("metadata", "kind", "words"),
    [
        ({"rope.scaling.type": None}, ModelLoadError, r"lacks mistral3\.rope\.scaling\.type"),
        ({"attention.temperature_length": 32}, UnsupportedModelError, "grow from another length on than 16"),
    ],
    ids=str,
)
def test_queries_that_grow_otherwise_are_refused(
    tmp_path: Path, metadata: dict[str, Any], kind: type[VLMServeError], words: str
) -> None:
    folder = make(tmp_path / "folder", "ministral3")
    named = {f"mistral3.{key}": value for key, value in metadata.items()}
    path = write_gguf(folder, tmp_path / "model.gguf", metadata=named)
    with pytest.raises(kind, match=words):
        load(path)


def test_mistral_small_3_is_like_ministral_3(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "mistral with a window", sliding_window=None, head_dim=16)
    path = write_gguf(folder, tmp_path / "model.gguf", architecture=gguf.MODEL_ARCH.MISTRAL3)
    sequences = token_sequences(300, [40, 1, 23])
    assert_equal(paged_run(load(path), sequences).finish([9, 9, 9]), transformers_logits(folder, sequences))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma2", {"query_pre_attn_scalar": 8}),
        ("gemma3", {"query_pre_attn_scalar": 8, "num_hidden_layers": 7, "layer_types": None}),
    ],
    ids=["gemma2", "gemma3"],
)
def test_missing_file_values_are_the_published_ones(tmp_path: Path, name: str, options: Any) -> None:
    folder = make(tmp_path / "folder", name, **options)
    left_out = ("attention.scale", "attention.sliding_window_pattern", "rope.freq_base_swa")
    path = write_gguf(folder, tmp_path / "model.gguf", metadata={f"{name}.{key}": None for key in left_out})
    sequences = token_sequences(300, [40, 3])
    assert_equal(paged_run(load(path), sequences).finish([9, 9]), transformers_logits(folder, sequences))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_every_type_is_dequantized_exactly_in_float32(tmp_path: Path, kind: str) -> None:
    folder = make_llama(tmp_path / "folder", **BLOCKS)
    path = write_gguf(folder, tmp_path / "model.gguf", types=kind)
    assert len({info.type for info in read_header(path).tensors.values()}) == 2
    sequences = token_sequences(300, [21, 4])
    assert_equal(paged_run(load(path), sequences).finish([9, 9]), transformers_logits(folder, sequences))


@pytest.mark.parametrize("kind", UNPACK)
def test_blocks_are_kept_as_they_are(tmp_path: Path, kind: str) -> None:
    """To the last bit, but for those of 5 bits with minimums, from which 128 steps are subtracted in float32."""
    folder = make_llama(tmp_path / "folder", **BLOCKS)
    file = GGUFFile(write_gguf(folder, tmp_path / "model.gguf", types=kind))
    for name in file.keys():  # noqa: SIM118
        packed = file.quantized(name)
        assert (packed is None) == name.endswith("norm.weight")
        if packed is not None:
            rounding = 1e-6 if kind in ("Q5_1", "Q5_K") else 0
            torch.testing.assert_close(packed.dequantize(), file.get_tensor(name), atol=rounding, rtol=0)
            assert packed.input_bits == (8 if rounds_inputs(kind, repacked=True) else 16)


def test_weights_in_blocks_equal_the_gguf_package(tmp_path: Path) -> None:
    """Not only the same one in two ways: rows of queries and keys are moved, those of others are not."""
    folder = make_llama(tmp_path / "folder", **BLOCKS)
    path = write_gguf(folder, tmp_path / "model.gguf", types="Q4_K")
    theirs = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    packed = GGUFFile(path).quantized("language_model.layers.1.mlp.down_proj.weight")
    assert torch.equal(packed.dequantize(), torch.from_numpy(theirs["blk.1.ffn_down.weight"]))
    packed = GGUFFile(path).quantized("language_model.layers.1.self_attn.k_proj.weight")
    keys = torch.from_numpy(theirs["blk.1.attn_k.weight"])
    assert not torch.equal(packed.dequantize(), keys)
    assert torch.equal(packed.dequantize()[:32], keys[:32].view(16, 2, -1).transpose(0, 1).reshape(32, -1))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@built
@pytest.mark.parametrize("input_bits", [None, 16])
@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("llama", kind) for kind in UNPACK), ("phi3", "Q4_1"), ("phi3", "Q6_K"), ("glm4", "Q4_K"), ("glm4", "Q5_K")],
)
def test_blocks_stay_packed_beside_the_native_kernels(
    tmp_path: Path, name: str, kind: str, input_bits: Literal[16] | None
) -> None:
    """GLM's rows have yet to be moved when they are packed; Phi-3 has merged weights."""
    if input_bits and not rounds_inputs(kind):
        pytest.skip("they have 16 bits by default")
    folder = make(tmp_path / "folder", name, **{**BLOCKS, "head_dim": 32, "num_key_value_heads": 8})
    path = write_gguf(folder, tmp_path / "model.gguf", types=kind)
    model = load_model(path, LoadSettings(device=CPU, input_bits=input_bits))
    kept = kept_bits(kind, input_bits)
    assert bits(model) == dict.fromkeys(
        ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"), kept
    )
    assert native_layers(model)["lm_head"].bits == kept
    sequences = token_sequences(300, [21, 4])
    actual = torch.cat(paged_run(model, sequences).finish([9, 9])).float()
    expected = torch.cat(transformers_logits(folder, sequences))
    assert relative_error(actual, expected) < (0.06 if rounds_inputs(kind, input_bits) else 0.03)


@built
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0"])
def test_experts_stay_packed(tmp_path: Path, kind: str) -> None:
    sizes = {**BLOCKS, "moe_intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 8}
    folder = make(tmp_path / "folder", "qwen3 with experts", **sizes)
    path = write_gguf(folder, tmp_path / "model.gguf", types=kind)
    model = load_model(path, LoadSettings(device=CPU, dtype=torch.bfloat16))
    layers = [f"mlp.experts.{number}.{part}" for number in range(8) for part in ("gate_up_proj", "down_proj")]
    assert {layer: bits(model).get(layer) for layer in layers} == dict.fromkeys(layers, kept_bits(kind))
    assert footprint(path, "none").weights == pytest.approx(model.weight_bytes, rel=0.1)
    checkpoint = Checkpoint(path, Description.read(path).family.rename)
    for name in checkpoint.names:
        checkpoint.hash(name)
    assert weights_digest(path, checkpoint.digests) == weights_digest(path)
    sequences = token_sequences(300, [21, 4])
    actual = torch.cat(paged_run(model, sequences).finish([9, 9])).float()
    assert relative_error(actual, torch.cat(transformers_logits(folder, sequences))) < 0.1


@built
@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_XS"])
def test_few_bits_stay_quantized_or_are_dequantized(tmp_path: Path, kind: str) -> None:
    folder = make_llama(tmp_path / "folder", **BLOCKS)
    path = write_gguf(folder, tmp_path / "model.gguf", types=kind)
    model = load_model(path, LoadSettings(device=CPU, dtype=torch.bfloat16))
    assert set(bits(model).values()) == ({kept_bits(kind)} if in_superblocks(kind) else {0})
    sequences = token_sequences(300, [21, 4])
    actual = torch.cat(paged_run(model, sequences).finish([9, 9])).float()
    assert relative_error(actual, torch.cat(transformers_logits(folder, sequences))) < 0.06


@built
@pytest.mark.parametrize(("kind", "tied"), [("Q4_0", True), ("Q4_K", False), ("Q6_K", True), ("Q8_0", False)])
def test_tables_of_embeddings_stay_packed(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = make_llama(tmp_path / "folder", **BLOCKS, tie_word_embeddings=tied)
    path = write_gguf(folder, tmp_path / "model.gguf", types=kind)
    model = load_model(path, LoadSettings(device=CPU, dtype=torch.bfloat16))
    table = model.language_model.embed_tokens
    assert isinstance(product_of(table), PackedLinear)
    assert "weight" not in dict(table.named_parameters())
    stored = Checkpoint(path, Description.read(path).family.rename).read("language_model.embed_tokens.weight")
    assert own_bytes(table) < 0.6 * 2 * stored.numel()
    torch.testing.assert_close(table(torch.arange(300)).float(), stored[:300], atol=3e-4, rtol=2**-7)
    sequences = token_sequences(300, [21, 4])
    actual = torch.cat(paged_run(model, sequences).finish([9, 9])).float()
    expected = torch.cat(transformers_logits(folder, sequences))
    assert relative_error(actual, expected) < (0.06 if rounds_inputs(kind) else 0.03)


@built
def test_mixed_types_stay_packed_where_kernels_exist(tmp_path: Path) -> None:
    """Queries and keys have 4 bits, values 6. Where these are repacked, all get 8."""
    folder = make_llama(tmp_path / "folder", **BLOCKS)
    path = write_gguf(
        folder,
        tmp_path / "model.gguf",
        types={"attn_v": "Q6_K", "blk.1.ffn_down": "BF16", "token_embd": "Q4_K", "": "Q4_K"},
    )
    model = load_model(path, LoadSettings(device=CPU, dtype=torch.bfloat16))
    assert bits(model) == {
        "self_attn.qkv_proj": 6 if in_superblocks("Q6_K") else 8,
        "self_attn.o_proj": 4,
        "mlp.gate_up_proj": 4,
        "mlp.down_proj": 4,
    }
    assert native_layers(model)["layers.1.mlp.down_proj"].bits is None
    sequences = token_sequences(300, [21, 4])
    actual = torch.cat(paged_run(model, sequences).finish([9, 9])).float()
    assert relative_error(actual, torch.cat(transformers_logits(folder, sequences))) < 0.1


@built
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q5_1", "Q6_K", "Q8_0"])
def test_inputs_have_the_bits_asked_for(tmp_path: Path, kind: str) -> None:
    folder = make_llama(tmp_path / "folder", **BLOCKS, tie_word_embeddings=False)
    path = write_gguf(folder, tmp_path / "model.gguf", types=kind)
    sequences = token_sequences(300, [21, 4])
    expected = torch.cat(transformers_logits(folder, sequences))
    found = {}
    for input_bits in (None, 16, 8):
        model = load_model(path, LoadSettings(device=CPU, input_bits=input_bits))
        kinds = {name: product_of(layer).settings["input_bits"] for name, layer in native_layers(model).items()}
        head = kinds.pop("lm_head", None)
        assert {*kinds.values()} == {8 if rounds_inputs(kind, input_bits) else 16}
        if not kind.startswith("Q4") and not in_superblocks(kind, input_bits):
            assert head == 16
        found[input_bits] = torch.cat(paged_run(model, sequences).finish([9, 9])).float()
        assert relative_error(found[input_bits], expected) < (0.06 if rounds_inputs(kind, input_bits) else 0.03)
    assert torch.equal(found[None], found[8 if rounds_inputs(kind) else 16])
    # Where an instruction adds the products of bytes up, and beside 4 bits anywhere.
    wide = selected_isa() not in DOTS and not kind.startswith("Q4") and not in_superblocks(kind)
    assert torch.equal(found[8], found[16]) == wide


@built
def test_biases_beside_packed_weights_are_loaded(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "qwen2", **BLOCKS)
    path = write_gguf(folder, tmp_path / "model.gguf", types="Q4_1")
    model = load_model(path, LoadSettings(device=CPU, dtype=torch.bfloat16))
    assert bits(model)["self_attn.qkv_proj"] == 4
    sequences = token_sequences(300, [21, 4])
    actual = torch.cat(paged_run(model, sequences).finish([9, 9])).float()
    assert relative_error(actual, torch.cat(transformers_logits(folder, sequences))) < 0.1


@built
def test_quantize_at_load_takes_dequantized_weights(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "folder", **BLOCKS)
    path = write_gguf(folder, tmp_path / "model.gguf", types="Q4_0")
    config = QuantizationConfig(scheme="int8")
    models = [
        load_model(place, LoadSettings(device=CPU, dtype=torch.float32, quantization=config))
        for place in (folder, path)
    ]
    assert set(bits(models[1]).values()) == {8}
    expected, actual = (torch.cat(paged_run(model, token_sequences(300, [21])).finish([9])) for model in models)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["llama 3", "gemma2", "phi3", "glm4"])
def test_quantized_copies_equal_those_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "folder", name, **BLOCKS)
    path = write_gguf(folder, tmp_path / "model.gguf")
    for source, out in ((folder, "of folder"), (path, "of file")):
        config = QuantizationConfig(scheme="int8", layers=("*.down_proj=none",))
        save_quantized(source, tmp_path / out, config)
    sequences = token_sequences(300, [21, 1])
    expected, actual = (paged_run(load(tmp_path / out), sequences).finish([9, 9]) for out in ("of folder", "of file"))
    assert relative_error(torch.cat(actual), torch.cat(expected)) < 1e-3
    of_file, of_copy = Tokenizer.from_folder(path), Tokenizer.from_folder(tmp_path / "of file")
    assert of_copy.encode("the cat <s> sat") == of_file.encode("the cat <s> sat")
    assert default_sampling(tmp_path / "of file") == default_sampling(path)
    assert read_prompt_files(tmp_path / "of file").end_token_ids == read_prompt_files(path).end_token_ids


def test_transformers_reads_a_quantized_copy(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "folder", **BLOCKS, tie_word_embeddings=False)
    path = write_gguf(folder, tmp_path / "model.gguf", types="Q8_0")
    save_quantized(path, tmp_path / "out", QuantizationConfig(scheme="int4", symmetric=True))
    sequences = token_sequences(50, [21])
    expected = transformers_logits(tmp_path / "out", sequences)[0]
    actual = paged_run(
        load_model(tmp_path / "out", LoadSettings(device=CPU, dtype=torch.float32, kernels="torch")), sequences
    )
    assert relative_error(actual.finish([9])[0], expected) < 5e-3


def test_the_dtype_is_that_of_the_file(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "folder", **BLOCKS)
    for kind, expected in (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")):
        path = write_gguf(folder, tmp_path / f"{kind}.gguf", types=kind)
        assert read_config(read_header(path))["dtype"] == expected


def test_pieces_are_dequantized_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_llama(tmp_path / "folder", **BLOCKS)
    path = write_gguf(folder, tmp_path / "model.gguf", types="Q8_0")
    expected = torch.cat(paged_run(load(path), token_sequences(300, [9])).finish([9]))
    sizes = []

    def count(data: Any, kind: Any) -> Any:
        sizes.append(data.nbytes)
        return dequantize(data, kind)

    monkeypatch.setattr(weights, "DEQUANTIZED_BYTES", 16 * 256 * 4)
    monkeypatch.setattr(gguf.quants, "dequantize", count)
    assert torch.equal(torch.cat(paged_run(load(path), token_sequences(300, [9])).finish([9])), expected)
    assert len(sizes) > 100
    assert max(sizes) <= 16 * 256 / 32 * 34


# What is wrong with a file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(make_llama(tmp_path / "folder", **BLOCKS), tmp_path / "model.gguf", types="Q4_0")


def test_a_file_that_is_no_gguf_is_rejected(tmp_path: Path, path: Path) -> None:
    assert resolve_model(str(path)) == path
    nameless = path.rename(tmp_path / "sha256-0123")
    assert resolve_model(str(nameless)) == nameless
    (tmp_path / "model.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        resolve_model(str(tmp_path / "model.gguf"))
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MissingWeightsError, match=r"give its own path \(model\.gguf\)"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("share", [0.0001, 0.05, 0.5, 0.9999])
def test_a_file_that_is_cut_off_says_so(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelLoadError, match=r"is cut off.*download it again"):
        load(path)


def test_no_cut_is_overlooked(path: Path) -> None:
    """Wherever within the header a file ends."""
    content = path.read_bytes()
    start = min(info.offset for info in read_header(path).tensors.values())
    for length in range(4, start, 97):
        path.write_bytes(content[:length])
        with pytest.raises(ModelLoadError, match="is cut off"):
            load(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported; supported are chatglm, gemma"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_gating_func": 2}, "expert_gating_func"),
        ({"llama.attention.value_length": 16}, "not as long as keys"),
        ({"llama.attention.head_count": [8, 4]}, "layers differ in attention.head_count"),
        ({"llama.rope.scaling.type": "unheard-of"}, "RoPE scaling 'unheard-of' is not supported"),
    ],
)
def test_what_is_not_implemented_is_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    folder = make_llama(tmp_path / "folder")
    path = write_gguf(folder, tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        load(path)


def test_a_value_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "folder")
    path = write_gguf(folder, tmp_path / "model.gguf", metadata={"llama.block_count": None})
    with pytest.raises(ModelLoadError, match=r"lacks llama\.block_count"):
        load(path)


def test_a_damaged_file_is_no_crash(path: Path) -> None:
    """Whichever bytes of the header are others, it is read or refused."""
    content = path.read_bytes()
    start = min(info.offset for info in read_header(path).tensors.values())
    chance = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(2):
            damaged[chance.randrange(4, start)] = chance.randrange(256)
        path.write_bytes(damaged)
        for read in (Description.read, Checkpoint, Tokenizer.from_folder):
            try:
                read(path)
            except ModelLoadError:
                refused += 1
    assert refused > 50


def test_windows_of_olmo_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "olmo2")
    path = write_gguf(folder, tmp_path / "model.gguf", metadata={"olmo2.attention.sliding_window": 9})
    with pytest.raises(UnsupportedModelError, match="OLMo 3"):
        load(path)


def change_byte(path: Path, name: bytes, distance: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(name) + len(name) + distance] = value
    path.write_bytes(content)


def test_an_unknown_tensor_type_is_named(path: Path) -> None:
    # After the name come the number of axes, two of them, and the type.
    change_byte(path, b"blk.0.attn_v.weight", 4 + 2 * 8, 36)
    with pytest.raises(UnsupportedModelError, match=r"type 36 \(of blk\.0\.attn_v\.weight\).*F32, F16, Q4_0.*Q6_K"):
        load(path)


def test_a_tensor_that_no_model_has_is_named(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.1.attn_v.weight", b"blk.1.attn_w.weight"))
    with pytest.raises(UnsupportedModelError, match=r"has a tensor blk\.1\.attn_w\.weight"):
        load(path)


def test_a_tensor_that_is_missing_is_named(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.1.attn_v.weight", b"blk.7.attn_v.weight"))
    with pytest.raises(MissingWeightsError, match=r"lacks 1 of .*layers\.1\.self_attn\.v_proj\.weight"):
        load(path)


@pytest.mark.parametrize(("version", "reason"), [(b"\x01\0\0\0", "of version 1"), (b"\0\0\0\x03", "big-endian")])
def test_other_versions_are_refused(path: Path, version: bytes, reason: str) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4] + version + content[8:])
    with pytest.raises(UnsupportedModelError, match=reason):
        load(path)
