"""Pairs of GGUF files of small vision-language checkpoints, written with the gguf package the way that the conversion
scripts of llama.cpp write them."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import published_name
from tests.gguf_files import add, write_gguf
from tests.ocr_checkpoints import published_paddle_name

LEVELS = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}
Tensors = Iterator[tuple[str, Tensor]]


class Files(NamedTuple):
    """The language model's file and the vision tower's."""

    model: Path
    mmproj: Path


@dataclass(frozen=True)
class Conversion:
    """How one kind of checkpoint is converted.

    projector: its name in the file. tensors: those of the tower and projector, by their names in the file. metadata: of
    the tower, beside what all files say. text: the language model's model type and architecture. text_metadata: of the
    language model's file, beside what others of its architecture say.
    """

    projector: str
    tensors: Callable[[Mapping[str, Tensor], dict[str, Any]], Tensors]
    metadata: Callable[[GGUFWriter, dict[str, Any]], None]
    text: tuple[str, gguf.MODEL_ARCH] = ("llama", gguf.MODEL_ARCH.LLAMA)
    text_metadata: Callable[[dict[str, Any]], dict[str, Any]] = field(default=lambda config: {})


def write_pair(
    folder: Path,
    out: Path,
    kind: str,
    *,
    types: str = "F32",
    text_types: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    text_metadata: Mapping[str, Any] | None = None,
    **language_model: Any,
) -> Files:
    """The checkpoint in `folder` as two files in `out`.

    types: of the tower's matrices; where these lose something, the checkpoint gets what is left, so that both are the
    same model. text_types: of the language model's matrices. metadata, text_metadata: of the tower and of the language
    model, set, or left out if None, in the end. language_model: other options of `write_gguf`.
    """
    out.mkdir(parents=True, exist_ok=True)
    conversion = CONVERSIONS[kind]
    config = json.loads((folder / "config.json").read_text())
    if types != "F32":
        _round(folder, types)
    tensors = load_file(folder / "model.safetensors")
    writer = GGUFWriter(out / "mmproj.gguf", "clip")
    _vision_metadata(writer, folder, config)
    writer.add_clip_projector_type(conversion.projector)
    conversion.metadata(writer, config)
    [values] = writer.kv_data
    for key, value in (metadata or {}).items():
        values.pop(key, None)
        if value is not None:
            add(writer, key, value)
    for name, tensor in conversion.tensors(tensors, config):
        chosen = GGMLQuantizationType[types if _is_rounded(name, tensor) else "F32"]
        array = np.ascontiguousarray(tensor.float().numpy())
        if chosen.name == "F16":
            writer.add_tensor(name, array.astype(np.float16))
        else:
            plain = chosen.name == "F32"
            writer.add_tensor(name, array if plain else quantize(array, chosen), raw_dtype=None if plain else chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    own = {**conversion.text_metadata(config), **(text_metadata or {})}
    language_model |= {"types": text_types, "metadata": own}
    return Files(_write_language_model(folder, out, config, conversion, language_model), out / "mmproj.gguf")


def _is_rounded(name: str, tensor: Tensor) -> bool:
    """Whether to quantize a tensor."""
    # llama.cpp resizes position embeddings, and only those in float32.
    return (
        tensor.ndim == 2
        and re.search("pos(ition)?_emb", name) is None
        and min(tensor.shape) > 1
        and tensor.shape[-1] % 32 == 0
    )


def _round(folder: Path, types: str) -> None:
    """Give the checkpoint's tower and projector the values that their types leave."""
    tensors = load_file(folder / "model.safetensors")
    kind = GGMLQuantizationType[types]
    for name, tensor in tensors.items():
        if (
            "language_model" not in name
            and "text_model" not in name
            and "lm_head" not in name
            and _is_rounded(name, tensor)
        ):
            rounded = dequantize(quantize(tensor.float().numpy(), kind), kind)
            tensors[name] = tensor.new_tensor(rounded).view(tensor.shape).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _vision_metadata(writer: GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """What files of all kinds say of their towers."""
    vision = config["vision_config"]

    def first(*names: str) -> Any:
        return next(vision[name] for name in names if name in vision)

    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_image_size(_side(vision.get("image_size", 560)))
    writer.add_vision_patch_size(_side(vision["patch_size"]))
    writer.add_vision_embedding_length(first("embed_dim", "hidden_size"))
    writer.add_vision_feed_forward_length(vision.get("intermediate_size", vision["hidden_size"]))
    writer.add_vision_block_count(first("num_hidden_layers", "depth"))
    writer.add_vision_head_count(first("num_attention_heads", "num_heads"))
    # Published checkpoints always say so.
    settings = {**LEVELS, **json.loads((folder / "preprocessor_config.json").read_text())}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    writer.add_vision_image_mean(settings["image_mean"])
    writer.add_vision_image_std(settings["image_std"])


def _side(size: Any) -> int:
    return int(size[0] if isinstance(size, list) else size)


def _write_language_model(
    folder: Path,
    out: Path,
    config: dict[str, Any],
    conversion: Conversion,
    options: Mapping[str, Any],
) -> Path:
    """The file of a folder that has nothing but the language model."""
    text = out / "text"
    text.mkdir()
    model_type, architecture = conversion.text
    ties = config.get("tie_word_embeddings", config["text_config"].get("tie_word_embeddings", False))
    own = {**config["text_config"], "model_type": model_type, "tie_word_embeddings": ties}
    (text / "config.json").write_text(json.dumps(own))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(folder / name, text)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "lm_head.weight" and not ties:
            tensors[name] = tensor
        elif match := re.fullmatch(r"model\.(language|text)_model\.(.*)", name):
            tensors[f"model.{match[2]}"] = tensor
    save_file(tensors, text / "model.safetensors", metadata={"format": "pt"})
    return write_gguf(text, out / "model.gguf", architecture=architecture, **options)


@functools.cache
def _names() -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)


def _mapped(name: str) -> str:
    """A tensor's name in the file, by the package's own table."""
    mapped = _names().get_name(name, try_suffixes=(".weight", ".bias"))
    assert mapped is not None, name
    return mapped


def _llava(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Tensors:
    """The matrices of MLPs are under each other's names, and layers that do not count are left out."""
    layers = _llava_layers(config)
    for name, tensor in tensors.items():
        if "language_model" in name or "lm_head" in name or "post_layernorm" in name:
            continue
        if name.endswith("image_newline"):
            yield "model.image_newline", tensor
        elif match := re.search(r"linear_([12])\.(\w+)", name):
            yield f"mm.{2 * (int(match[1]) - 1)}.{match[2]}", tensor
        elif (layer := re.search(r"layers\.(\d+)", name)) is None or int(layer[1]) < layers:
            mapped = _mapped(published_name(name))
            yield re.sub("ffn_up|ffn_down", lambda found: SWAPPED[found[0]], mapped), tensor


SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


def _llava_layers(config: dict[str, Any]) -> int:
    layers, chosen = config["vision_config"]["num_hidden_layers"], config["vision_feature_layer"]
    return max(layer % (layers + 1) for layer in ([chosen] if isinstance(chosen, int) else chosen))


def _llava_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    vision, chosen = config["vision_config"], config["vision_feature_layer"]
    [values] = writer.kv_data
    values.pop("clip.vision.block_count")
    writer.add_vision_block_count(_llava_layers(config))
    writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
    writer.add_vision_use_gelu(vision["hidden_act"] == "gelu")
    if isinstance(chosen, list):
        writer.add_array("clip.vision.feature_layer", [layer % (vision["num_hidden_layers"] + 1) for layer in chosen])


def _llava_next_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Widths before heights, unlike config.json."""
    _llava_metadata(writer, config)
    edges = [edge for height, width in config["image_grid_pinpoints"] for edge in (width, height)]
    writer.add_array("clip.vision.image_grid_pinpoints", edges)
    writer.add_string("clip.vision.mm_patch_merge_type", "spatial_unpad")


def _qwen(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Tensors:
    """Of Qwen2-VL and Qwen2.5-VL."""
    for full, tensor in tensors.items():
        name = full.removeprefix("model.")
        if not name.startswith("visual."):
            continue
        if name == "visual.patch_embed.proj.weight":
            yield from _frames(tensor)
        elif ".qkv." in name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                yield _mapped(name.replace("qkv", part)), rows
        else:
            yield _mapped(name), tensor


def _frames(tensor: Tensor) -> Tensors:
    """The projection of patches that are two frames deep, frame by frame."""
    yield "v.patch_embd.weight", tensor[:, :, 0]
    yield "v.patch_embd.weight.1", tensor[:, :, 1]


def _qwen25_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    vision = config["vision_config"]
    writer.add_vision_use_silu(True)
    writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
    _qwen2_metadata(writer, config)


def _qwen2_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_vision_attention_layernorm_eps(config["text_config"].get("rms_norm_eps", 1e-6))


def _qwen3(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Tensors:
    chosen = config["vision_config"].get("deepstack_visual_indexes", [])
    for full, tensor in tensors.items():
        name = full.removeprefix("model.")
        if not name.startswith("visual."):
            continue
        if match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)\.(\w+)", name):
            yield f"v.deepstack.{chosen[int(match[1])]}.{match[2]}.{match[3]}", tensor
        elif match := re.fullmatch(r"visual\.merger\.linear_fc([12])\.(\w+)", name):
            yield f"mm.{2 * (int(match[1]) - 1)}.{match[2]}", tensor
        elif name.startswith("visual.merger.norm."):
            yield name.replace("visual.merger.norm", "v.post_ln"), tensor
        elif name == "visual.patch_embed.proj.weight":
            yield from _frames(tensor)
        elif name == "visual.patch_embed.proj.bias":
            yield "v.patch_embd.bias", tensor
        else:
            yield _mapped(name), tensor


def _qwen3_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    vision = config["vision_config"]
    [values] = writer.kv_data
    values.pop("clip.vision.image_size")
    writer.add_vision_image_size(int(vision["num_position_embeddings"] ** 0.5 * vision["patch_size"]))
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
    writer.add_vision_attention_layernorm_eps(config["text_config"].get("rms_norm_eps", 1e-6))
    writer.add_vision_is_deepstack_layers(
        [layer in vision.get("deepstack_visual_indexes", []) for layer in range(vision["depth"])]
    )


def _sectioned_text(architecture: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def metadata(config: dict[str, Any]) -> dict[str, Any]:
        sections = config["text_config"]["rope_parameters"]["mrope_section"]
        deepstack = len(config["vision_config"].get("deepstack_visual_indexes", []))
        return {
            f"{architecture}.rope.dimension_sections": [*sections, 0],
            **({f"{architecture}.n_deepstack_layers": deepstack} if deepstack else {}),
            "tokenizer.ggml.add_bos_token": False,
        }

    return metadata


def _idefics3(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Tensors:
    for name, tensor in tensors.items():
        if name.startswith(("model.vision_model.", "model.connector.")):
            yield _mapped(name), tensor


def _idefics3_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_vision_attention_layernorm_eps(config["vision_config"]["layer_norm_eps"])
    writer.add_vision_projector_scale_factor(config["scale_factor"])
    writer.add_vision_use_gelu(True)


def _internvl(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Tensors:
    """The projector's layers have the numbers that they have in the original checkpoints."""
    numbers = {"layer_norm": 0, "linear_1": 1, "linear_2": 3}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"model\.multi_modal_projector\.(\w+)\.(\w+)", name):
            yield _mapped(f"mlp1.{numbers[match[1]]}.{match[2]}"), tensor
        elif name.startswith("model.vision_tower."):
            bare = not name.endswith((".weight", ".bias")) and "cls_token" not in name
            mapped = _mapped(name + ".weight" * bare)
            yield mapped, tensor.squeeze() if "embd" in mapped and tensor.ndim < 4 else tensor


def _internvl_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_vision_attention_layernorm_eps(config["vision_config"]["layer_norm_eps"])
    writer.add_vision_use_gelu(True)
    writer.add_vision_projector_scale_factor(int(1 / config["downsample_ratio"]))


def _gemma3(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Tensors:
    for name, tensor in tensors.items():
        if "vision_tower" in name or "multi_modal_projector" in name:
            mapped = _mapped(published_name(name).replace("_weight", ".weight"))
            yield mapped, tensor + 1 if "soft_emb_norm" in mapped else tensor


def _gemma3_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    vision = config["vision_config"]
    writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
    writer.add_vision_use_gelu(True)
    side = int(config["mm_tokens_per_image"] ** 0.5)
    writer.add_vision_projector_scale_factor(vision["image_size"] // vision["patch_size"] // side)


def _pixtral(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Tensors:
    """With the embedding of the token that ends rows."""
    yield "v.token_embd.img_break", tensors["model.language_model.embed_tokens.weight"][12]
    heads = config["vision_config"]["num_attention_heads"]
    for full, tensor in tensors.items():
        name = full.removeprefix("model.")
        if not name.startswith(("vision_tower.", "multi_modal_projector.")):
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, -1)
            yield _mapped(name), halves.transpose(1, 2).reshape(tensor.shape)
        else:
            yield _mapped(name), tensor


def _pixtral_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_use_silu(config["vision_config"]["hidden_act"] == "silu")
    if "spatial_merge_size" in config:
        writer.add_vision_spatial_merge_size(config["spatial_merge_size"])


def _glm_ocr(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Tensors:
    for full, tensor in tensors.items():
        name = full.removeprefix("model.")
        if name == "visual.patch_embed.proj.weight":
            yield from _frames(tensor)
        elif name == "visual.patch_embed.proj.bias":
            yield "v.patch_embd.bias", tensor
        elif name.startswith("visual."):
            yield _mapped(name), tensor


def _glm_ocr_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    vision = config["vision_config"]
    writer.add_vision_use_silu(vision["hidden_act"] == "silu")
    writer.add_vision_attention_layernorm_eps(vision["rms_norm_eps"])


def _lfm2(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Tensors:
    """The projection of patches as a convolution."""
    size = config["vision_config"]["patch_size"]
    for name, tensor in tensors.items():
        if name.startswith(("model.vision_tower.", "model.multi_modal_projector.")):
            is_projection = name.endswith("patch_embedding.weight")
            stored = tensor.view(len(tensor), size, size, 3).permute(0, 3, 1, 2) if is_projection else tensor
            yield _mapped(published_name(name)), stored


def _lfm2_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_vision_attention_layernorm_eps(config["vision_config"]["layer_norm_eps"])
    writer.add_vision_projector_scale_factor(config["downsample_factor"])
    writer.add_vision_use_gelu(True)


MINICPMV = {
    "layer_norm1": "ln1", "layer_norm2": "ln2", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "embeddings.patch_embedding": "patch_embd", "embeddings.position_embedding": "position_embd",
    "post_layernorm": "post_ln",
}  # fmt: skip
MINICPMV_MERGER = {**MINICPMV, "pre_norm": "ds_ln", "linear_1": "ds_ffn_up", "linear_2": "ds_ffn_down"}
MINICPMV_LAST = {"pre_norm": "input_norm", "linear_1": "up", "linear_2": "down"}


def _minicpmv(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Tensors:
    for full, tensor in tensors.items():
        name, _, kind = full.removeprefix("model.").rpartition(".")
        if name.startswith("merger.mlp.0."):
            yield f"mm.{MINICPMV_LAST[name.removeprefix('merger.mlp.0.')]}.{kind}", tensor
        elif name.startswith("vision_tower.vit_merger."):
            yield f"v.vit_merger.{MINICPMV_MERGER[name.removeprefix('vision_tower.vit_merger.')]}.{kind}", tensor
        elif layer := re.fullmatch(r"vision_tower\.encoder\.layers\.(\d+)\.(.*)", name):
            yield f"v.blk.{layer[1]}.{MINICPMV[layer[2]]}.{kind}", tensor
        elif name.startswith("vision_tower."):
            yield f"v.{MINICPMV[name.removeprefix('vision_tower.')]}.{kind}", tensor


def _minicpmv_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """With the size of slices in place of the tower's image size."""
    [values] = writer.kv_data
    values.pop("clip.vision.image_size")
    writer.add_vision_image_size(32)
    writer.add_vision_attention_layernorm_eps(config["vision_config"]["layer_norm_eps"])
    writer.add_vision_projector_scale_factor(2 if config["downsample_mode"] == "4x" else 4)
    writer.add_vision_use_gelu(True)
    writer.add_array("clip.vision.wa_layer_indexes", [config["insert_layer_id"]])


def _paddleocr(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Tensors:
    """By the names of the published checkpoint. A table of positions and a head that nothing uses are left out."""
    for full, tensor in tensors.items():
        name = published_paddle_name(full)
        if (
            name.startswith(("visual.", "mlp_AR."))
            and "packing_position_embedding" not in name
            and ".head." not in name
        ):
            yield _mapped(name.replace("visual.", "model.")), tensor


def _paddleocr_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Its size of images is that of the largest, which the published checkpoint's is not."""
    [values] = writer.kv_data
    values.pop("clip.vision.image_size")
    writer.add_vision_image_size(1680)
    writer.add_vision_use_gelu(True)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_min_pixels(16 * 16)
    writer.add_vision_max_pixels(48 * 48)


CONVERSIONS = {
    "glm_ocr": Conversion(
        "glm4v", _glm_ocr, _glm_ocr_metadata, ("glm4", gguf.MODEL_ARCH.GLM4), _sectioned_text("glm4")
    ),
    "paddleocr_vl": Conversion(
        "paddleocr",
        _paddleocr,
        _paddleocr_metadata,
        ("ernie4_5", gguf.MODEL_ARCH.PADDLEOCR),
        _sectioned_text("paddleocr"),
    ),
    "pixtral": Conversion("pixtral", _pixtral, _pixtral_metadata, ("mistral", gguf.MODEL_ARCH.LLAMA)),
    "pixtral on ministral3": Conversion(
        "pixtral", _pixtral, _pixtral_metadata, ("ministral3", gguf.MODEL_ARCH.MISTRAL3)
    ),
    "idefics3": Conversion("idefics3", _idefics3, _idefics3_metadata),
    "internvl": Conversion("internvl", _internvl, _internvl_metadata, ("qwen2", gguf.MODEL_ARCH.QWEN2)),
    "internvl on qwen3": Conversion("internvl", _internvl, _internvl_metadata, ("qwen3", gguf.MODEL_ARCH.QWEN3)),
    "gemma3": Conversion("gemma3", _gemma3, _gemma3_metadata, ("gemma3_text", gguf.MODEL_ARCH.GEMMA3)),
    "qwen2_vl": Conversion(
        "qwen2vl_merger", _qwen, _qwen2_metadata, ("qwen2", gguf.MODEL_ARCH.QWEN2VL), _sectioned_text("qwen2vl")
    ),
    "qwen2_5_vl": Conversion(
        "qwen2.5vl_merger", _qwen, _qwen25_metadata, ("qwen2", gguf.MODEL_ARCH.QWEN2VL), _sectioned_text("qwen2vl")
    ),
    "qwen3_vl": Conversion(
        "qwen3vl_merger", _qwen3, _qwen3_metadata, ("qwen3", gguf.MODEL_ARCH.QWEN3VL), _sectioned_text("qwen3vl")
    ),
    "lfm2_vl": Conversion("lfm2", _lfm2, _lfm2_metadata, ("lfm2", gguf.MODEL_ARCH.LFM2)),
    "qwen3_5": Conversion(
        "qwen3vl_merger", _qwen3, _qwen3_metadata, ("qwen3_5_text", gguf.MODEL_ARCH.QWEN35), _sectioned_text("qwen35")
    ),
    "minicpmv": Conversion("minicpmv4_6", _minicpmv, _minicpmv_metadata, ("qwen3_5_text", gguf.MODEL_ARCH.QWEN35)),
    "llava": Conversion("mlp", _llava, _llava_metadata),
    "llava_next": Conversion("mlp", _llava, _llava_next_metadata),
}
