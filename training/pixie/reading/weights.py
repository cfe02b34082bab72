"""Weights of the stages in one file, and the tower's names and config in transformers' Qwen3-VL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.pixie.reading.tower import HEADS, INNER, LAYERS, SIDE, WIDTH
from vlmserve.pixie.documents import PATCH


def vision_config(output: int = WIDTH) -> dict[str, Any]:
    """Return the vision section of config.json. output: the width of the decoder."""
    return {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "depth": LAYERS,
        "num_heads": HEADS,
        "num_position_embeddings": SIDE * SIDE,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "spatial_merge_size": 1,
        "hidden_act": "silu",
        "deepstack_visual_indexes": [],
        "out_hidden_size": output,
    }


def tower_names(tower: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of `ReadingTower` under the names of transformers' vision model."""
    patch = tower["patch.weight"].view(WIDTH, 3, 1, PATCH, PATCH)
    named = {
        # An image fills both frames of a patch.
        "patch_embed.proj.weight": (patch / 2).expand(-1, -1, 2, -1, -1),
        "patch_embed.proj.bias": tower["patch.bias"],
        "pos_embed.weight": tower["positions"],
    }
    names = {"norm1": "norm1", "norm2": "norm2", "qkv": "attn.qkv", "out": "attn.proj"}
    names |= {"fc1": "mlp.linear_fc1", "fc2": "mlp.linear_fc2"}
    for layer in range(LAYERS):
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                named[f"blocks.{layer}.{theirs}.{kind}"] = tower[f"blocks.{layer}.{ours}.{kind}"]
    return {name: tensor.float().contiguous() for name, tensor in named.items()}


def save_parts(path: Path, **parts: Mapping[str, Tensor]) -> None:
    """Write the averaged weights of modules (``tower``, ``heads``, ``decoder``), in bfloat16."""
    named = {f"{part}.{name}": tensor for part, weights in parts.items() for name, tensor in weights.items()}
    save_file({name: tensor.to(torch.bfloat16).contiguous() for name, tensor in named.items()}, path)


def load_part(path: Path, part: str) -> dict[str, Any]:
    """What an `Optimizer` of a module starts from. Raises ValueError if the file lacks the module."""
    weights = {
        name.removeprefix(f"{part}."): tensor.float()
        for name, tensor in load_file(path).items()
        if name.startswith(f"{part}.")
    }
    if not weights:
        raise ValueError(f"{path} has no weights of the {part}")
    return {"originals": weights, "averages": weights}
