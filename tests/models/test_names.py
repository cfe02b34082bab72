"""Short names stand for repositories, and their memory is that of the published weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from tests import gemma4
from tests.models.test_hub import answer_with, checkpoint
from tests.published import tensor_shapes
from vlmserve.errors import CheckpointNotFoundError
from vlmserve.families.family import NamedModel
from vlmserve.families.registry import decoder_spec
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.layers.linear import Linear, MergedLinear, TiedEmbedding, Weight
from vlmserve.models.catalogue import family_rows, markdown, name_rows
from vlmserve.models.decoder import Decoder
from vlmserve.models.hub import resolve_model
from vlmserve.models.names import MODELS, repository_of
from vlmserve.models.registry import Description
from vlmserve.models.weights import weight_slots
from vlmserve.quant.model import quantize
from vlmserve.settings.quantization import QuantizationConfig

LLAMA = {"model_type": "llama", "num_attention_heads": 32, "tie_word_embeddings": False}
PUBLISHED = {
    "qwen3:0.6b": transformers.Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    ),
    "llama3.1:8b": transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=False,
    ),
    "llava-1.5:7b": transformers.LlavaConfig(
        text_config={**LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                     "num_key_value_heads": 32, "vocab_size": 32064},
        vision_config={"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096,
                       "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336, "patch_size": 14},
        tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Configurations as they are published."""


def named(name: str) -> NamedModel:
    [found] = [model for model in MODELS if model.name == name]
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_configuration(name: str) -> None:
    config = PUBLISHED[name]
    with torch.device("meta"):
        model = getattr(transformers, NAMES[type(config).__name__])(config)
    model.tie_weights()
    text = getattr(model.model, "language_model", model.model)
    head = text.embed_tokens.weight.numel()
    layers = sum(parameter.numel() for parameter in text.parameters()) - head
    total = sum(parameter.numel() for parameter in model.parameters())
    assert named(name)[2:] == (total, head, total - layers - head)


NAMES = {
    "Qwen3Config": "Qwen3ForCausalLM",
    "LlamaConfig": "LlamaForCausalLM",
    "LlavaConfig": "LlavaForConditionalGeneration",
}


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_memory_is_what_quantization_leaves(scheme: str) -> None:
    made = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    modules = torch.nn.Module()
    modules.language_model = torch.nn.Module()
    modules.language_model.layer = Linear(1024, 2048, bias=False, **made)
    modules.language_model.embed_tokens = TiedEmbedding(4096, 1024, **made)
    modules.vision = Linear(1024, 512, bias=False, **made)
    for weight in modules.parameters():
        torch.nn.init.normal_(weight)
    layer, head, vision = 1024 * 2048, 4096 * 1024, 1024 * 512
    model = NamedModel("small", "", layer + head + vision, head, vision)
    quantize(modules, QuantizationConfig(scheme=scheme))
    stored = sum(module.num_bytes for module in modules.modules() if isinstance(module, Weight))
    assert stored == pytest.approx(model.memory(scheme), rel=0.01)


@pytest.mark.parametrize(
    ("name", "published", "unused"),
    [
        ("glm-ocr:0.9b", "GLM-OCR", "model.language_model.layers.16."),
        ("paddleocr-vl:0.9b", "PaddleOCR-VL", "visual.vision_model.head."),
        ("lfm2.5-vl:1.6b", "LFM2.5-VL-1.6B", "model.vision_tower.vision_model.head."),
    ],
)
def test_parameters_are_those_of_the_published_tensors(name: str, published: str, unused: str) -> None:
    sizes = {
        tensor: math.prod(shape) for tensor, shape in tensor_shapes(published).items() if not tensor.startswith(unused)
    }
    head = "lm_head.weight" if "lm_head.weight" in sizes else "model.language_model.embed_tokens.weight"
    kept = ("visual.", "mlp_AR.", "vision_tower.", "projector.", "embed_tokens.")
    outside = sum(size for tensor, size in sizes.items() if tensor != head and any(part in tensor for part in kept))
    assert named(name)[2:] == (sum(sizes.values()), sizes[head], outside)


KV_BYTES = {
    "gemma4:e2b": 18_432,
    "gemma4:e4b": 57_344,
    "gemma4:12b": 344_064,
    "gemma4:26b": 225_280,
    "gemma4:31b": 901_120,
}
"""Bytes of a token in a bfloat16 cache over the layers that have keys and values of their own."""


@pytest.mark.parametrize("name", gemma4.PUBLISHED)
def test_gemma4_parameters_equal_those_of_its_models(name: str) -> None:
    description = Description.of(Path(), gemma4.PUBLISHED[name])
    spec = replace(decoder_spec(description.text_config), tied_embeddings=True)
    parts = description.build(spec, TorchReference(), dtype=torch.bfloat16, device=torch.device("meta"))
    repeated = {
        f"{path.rpartition('.')[0]}.{part}.weight"
        for path, module in parts.modules.named_modules()
        for part in (module.repeated.values() if isinstance(module, MergedLinear) else ())
    }
    sizes = {name: slot.numel() for name, slot in weight_slots(parts.modules) if name not in repeated}
    head = sizes["language_model.embed_tokens.weight"]
    kept = ("vision_tower.", "multi_modal_projector.", "per_layer.")
    outside = sum(size for name, size in sizes.items() if any(part in name for part in kept))
    assert named(name)[2:] == (sum(sizes.values()), head, outside)
    decoder = parts.modules.language_model
    assert isinstance(decoder, Decoder)
    assert decoder.cache_bytes(16).block == 16 * KV_BYTES[name]


EFFECTIVE = ("gemma4:e2b", "gemma4:e4b")
"""Names with the size of a model without the embeddings of its layers."""


def test_names_are_unique_and_have_their_size() -> None:
    assert len({model.name for model in MODELS}) == len({model.repository for model in MODELS}) == len(MODELS)
    for model in MODELS:
        if model.name in EFFECTIVE:
            continue
        number, unit = float(model.name.partition(":")[2][:-1]), model.name[-1]
        stated = number * {"m": 1e6, "b": 1e9}[unit]
        assert stated * 0.9 < model.parameters < stated * 1.3, model.name
        assert model.memory("int4") < model.memory("int8") < model.memory("bfloat16") == 2 * model.parameters


FAMILIES = {
    "smolvlm2": "SmolVLM", "qwen3-vl": "Qwen3VL", "qwen2.5-vl": "Qwen2_5_VL", "qwen2-vl": "Qwen2VL", "gemma3": "Gemma3",
    "qwen3-vl-embedding": "Qwen3VL", "qwen3-vl-reranker": "Qwen3VL",
    "lfm2-vl": "Lfm2Vl", "lfm2.5-vl": "Lfm2Vl", "qwen3.5": "Qwen3_5", "qwen3.6": "Qwen3_5", "qwen3.8": "Qwen3_5",
    "glm-ocr": "GlmOcr", "glm4.1v": "Glm4v", "glm4.6v-flash": "Glm46V", "glm4.5v": "Glm4vMoe",
    "gemma4": "Gemma4", "paddleocr-vl": "PaddleOCRVL", "llava-1.5": "Llava", "e5-v": "LlavaNext",
    "colpali": "PaliGemma", "colqwen2": "Qwen2VL", "muse-glimmer": "MuseGlimmer",
    "granite-docling": "GraniteDocling",
}  # fmt: skip
"""Architectures of short names that take images, without `ForConditionalGeneration`."""


def test_short_names_take_what_families_take() -> None:
    takes = {architecture: taken for _, architecture, taken, _ in family_rows()}
    for name, _, taken, *_ in name_rows():
        family = None if name == "gemma3:1b" else FAMILIES.get(name.partition(":")[0])
        assert taken == (takes[f"{family}ForConditionalGeneration"] if family else "text"), name


def test_a_short_name_is_downloaded_from_its_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "config.json", "model.safetensors")
    calls = answer_with(monkeypatch, folder)
    assert resolve_model("Qwen3-VL:2B", "v1") == folder
    assert (calls[0]["name"], calls[0]["revision"]) == ("Qwen/Qwen3-VL-2B-Instruct", "v1")


def test_a_folder_of_that_name_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "qwen3:4b", "config.json", "model.safetensors")
    assert resolve_model("qwen3:4b") == Path("qwen3:4b")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3-vl", "there is no model qwen3-vl; did you mean qwen3-vl:2b or qwen3-vl:4b"),
        ("qwen3-vl:3b", "did you mean qwen3-vl:2b"),
        ("quen3-vl:2b", "did you mean qwen3-vl:2b"),
        ("pixie:1b", r"there is no model pixie:1b; did you mean pixie\?"),
        ("something:9b", r"there is no model something:9b \(vlmserve models lists all names\)"),
    ],
)
def test_an_unknown_short_name_suggests_others(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answer_with(monkeypatch, OSError("not asked"))
    with pytest.raises(CheckpointNotFoundError, match=message):
        resolve_model(name)
    assert calls == []


def test_a_repository_is_no_short_name() -> None:
    assert repository_of("Qwen/Qwen3-VL-2B-Instruct") is None
    assert "| llava-1.5:7b | llava-hf/llava-1.5-7b-hf | text, images | 7.06 |" in markdown()
