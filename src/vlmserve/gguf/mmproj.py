"""Converts the GGUF file of a vision tower and projector to Hugging Face layout."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from vlmserve.errors import ConfigurationError, ModelLoadError, UnsupportedModelError
from vlmserve.families.family import VisionFamily
from vlmserve.families.gguf import Clip, GGUFTower
from vlmserve.families.registry import VISION_FAMILIES
from vlmserve.families.spec import Config
from vlmserve.gguf_header import Header, TensorInfo

ARCHITECTURE = "clip"
"""``general.architecture`` of vision tower files."""
DEFAULT_TYPE = "mlp"
"""Projector type of files that name none, such as LLaVA's."""
UNKNOWN_TOKEN = "tokenizer.ggml.unknown_token_id"


class Stored(NamedTuple):
    infos: tuple[TensorInfo, ...]
    joined: Literal["rows", "frames"] = "rows"
    """How several tensors become one; frames are the third axis."""
    added: float = 0.0
    """Added to all values."""
    shape: tuple[int, ...] | None = None
    """In the checkpoint; None: as in the file."""
    heads: int = 0
    """Heads whose rows RoPE pairs with neighbours; 0: RoPE pairs halves of a head."""
    channels_last: bool = False
    """The second axis is stored last."""


def tower_family(header: Header, architecture: str = "") -> tuple[VisionFamily, GGUFTower]:
    """architecture: the language model's; empty: any.

    Raises ConfigurationError for another file, UnsupportedModelError for an unknown projector.
    """
    if header.architecture != ARCHITECTURE:
        raise ConfigurationError(
            f"--mmproj {header.path} holds a language model ({header.architecture or 'of no architecture'}), not a "
            "vision tower; published ones are called mmproj-*.gguf"
        )
    values = header.values
    if not values.get("clip.has_vision_encoder", True) or (
        values.get("clip.has_audio_encoder") and "clip.vision.embedding_length" not in values
    ):
        raise UnsupportedModelError(f"--mmproj {header.path} hears and does not see: audio is not supported")
    name = values.get("clip.vision.projector_type") or values.get("clip.projector_type") or DEFAULT_TYPE
    known = [(kind, family, tower) for family in VISION_FAMILIES.values() for kind, tower in family.gguf.items()]
    found = [(family, tower) for kind, family, tower in known if kind == name]
    if not found:
        supported = ", ".join(sorted({kind for kind, _, _ in known}))
        raise UnsupportedModelError(
            f"--mmproj {header.path}: projector type {name!r} is not supported; supported are {supported}"
        )
    return next((both for both in found if architecture in both[1].text_types), found[0])


def full_config(header: Header, model: Header, text: Config) -> Config:
    """Make the config.json of both files. model, text: the language model's file and config.

    Raises ModelLoadError for missing or invalid values and mismatched files.
    """
    (family, tower), clip = tower_family(header, model.architecture), Clip(header)
    _check_sizes(clip)
    _check_pair(family, tower, clip, model, text)
    try:
        return {
            "model_type": family.model_type,
            "dtype": text["dtype"],
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": {**text, "model_type": tower.text_types.get(model.architecture, text["model_type"])},
            "vision_config": tower.vision(clip),
            **_token_ids(family, tower, model),
            **tower.more(clip),
        }
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ModelLoadError(f"{header.path} does not describe a vision tower: {error!r}") from error


def media_settings(header: Header) -> dict[str, Config]:
    """Make the preprocessor files, by name. Raises ModelLoadError for missing values."""
    clip, (_, tower) = Clip(header), tower_family(header)
    levels = {f"image_{name}": clip.array(f"image_{name}") for name in ("mean", "std")}
    kinds = {"preprocessor_config.json": tower.settings, "video_preprocessor_config.json": tower.videos}
    given = {name: values for name, values in levels.items() if values}
    return {name: {**settings(clip), **given} for name, settings in kinds.items() if settings is not None}


def _check_sizes(clip: Clip) -> None:
    for key in ("embedding_length", "block_count", "attention.head_count", "patch_size", "image_size"):
        if not isinstance(size := clip[key], int) or size < 1:
            raise ModelLoadError(f"{clip.header.path}: clip.vision.{key} is {size!r}")


def _check_pair(family: VisionFamily, tower: GGUFTower, clip: Clip, model: Header, text: Config) -> None:
    if tower.text_types and model.architecture not in tower.text_types:
        raise ModelLoadError(
            f"--mmproj {clip.header.path} is for {family.model_type}, but {model.path} is "
            f"{model.architecture}: use the mmproj file of this model"
        )
    width = clip.tensor(tower.output).shape[tower.axis]
    if width != text["hidden_size"]:
        raise ModelLoadError(
            f"--mmproj {clip.header.path} makes embeddings of {width} values, but {model.path} needs "
            f"{text['hidden_size']}: use the mmproj file of this model"
        )
    wanted, merged = model.values.get(f"{model.architecture}.n_deepstack_layers"), len(clip.deepstack_layers)
    if wanted not in (None, merged):
        raise ModelLoadError(
            f"--mmproj {clip.header.path} has features for {merged} layers, but {model.path} needs {wanted}: "
            "use the mmproj file of this model"
        )


def _token_ids(family: VisionFamily, tower: GGUFTower, model: Header) -> Config:
    tokens = model.array("tokenizer.ggml.tokens")
    ids = {name: tokens.index(token) for name, token in tower.tokens.items() if token in tokens}
    if "image_token_id" not in ids and tower.else_unknown:
        unknown = model.values.get(UNKNOWN_TOKEN, 0 if model.values.get("tokenizer.ggml.model") == "llama" else None)
        ids["image_token_id"] = unknown
    for name, token in tower.tokens.items():
        if ids.get(name) is None:
            raise ModelLoadError(
                f"{model.path} has no token {token}, which {family.model_type} models need for images: give the "
                "language model that the mmproj file belongs to"
            )
    return ids


def checkpoint_tensors(header: Header) -> Iterator[tuple[str, Stored]]:
    """Yield tensors by Hugging Face name. Raises UnsupportedModelError for an unknown tensor."""
    family, tower = tower_family(header)
    swapped = tower.swaps and _is_swapped(Clip(header))
    found: dict[str, list[TensorInfo]] = {}
    for name, info in header.tensors.items():
        plain = _swap(name) if swapped else name
        new = next((re.sub(old, new, plain) for old, new in tower.names if re.fullmatch(old, plain)), None)
        if new is None:
            raise UnsupportedModelError(
                f"{header.path}: no {family.model_type} model that is supported has a tensor {name}"
            )
        if new:
            found.setdefault(new, []).append(info)
    layers = {layer: place for place, layer in enumerate(Clip(header).deepstack_layers)}
    for name, infos in found.items():
        place = re.sub(r"(deepstack_merger_list)\.(\d+)", lambda match: f"{match[1]}.{layers[int(match[2])]}", name)
        stored = _stored(place, infos, tower)
        pairs = tower.interleaved and place.endswith((".q_proj.weight", ".k_proj.weight"))
        yield place, stored._replace(heads=Clip(header)["attention.head_count"]) if pairs else stored


def _stored(name: str, infos: list[TensorInfo], tower: GGUFTower) -> Stored:
    if name.endswith("patch_embed.proj.weight"):
        return Stored(tuple(sorted(infos, key=lambda info: info.name)), "frames")
    if len(infos) > 1:
        return Stored(tuple(sorted(infos, key=lambda info: "qkv".index(info.name.split("attn_")[1][0]))))
    added = -tower.norm_offset if name.endswith("soft_emb_norm.weight") else 0.0
    shape: tuple[int, ...] | None = None
    if name.endswith(("cls_token", "embeddings.position_embeddings")):
        width = infos[0].shape[-1]
        shape = (1, math.prod(infos[0].shape) // width, width)
    elif tower.channels_last and name.endswith("patch_embedding.weight"):
        shape = (infos[0].shape[0], math.prod(infos[0].shape[1:]))
        return Stored(tuple(infos), shape=shape, channels_last=True)
    elif name.endswith("embeddings.class_embedding"):
        shape = (infos[0].shape[-1],)
    return Stored(tuple(infos), added=added, shape=shape)


def _is_swapped(clip: Clip) -> bool:
    down = clip.header.tensors.get("v.blk.0.ffn_down.weight")
    width = clip.get("embedding_length")
    return down is not None and down.shape[-1] == width != clip.tensor("v.blk.0.ffn_up.weight").shape[-1]


def _swap(name: str) -> str:
    return re.sub(r"\.ffn_(up|down)\.", lambda match: ".ffn_down." if match[1] == "up" else ".ffn_up.", name)
