"""Names of the reading tower's weights in transformers' Qwen3-VL, and its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
