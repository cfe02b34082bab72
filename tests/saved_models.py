"""Random weights of transformers' classes, as small checkpoints have them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

OTHER_CONSTANTS = (
    "input_projection_weight", "class_embedding", "cls_token", ".position_embeddings", ".lambda_1", ".lambda_2",
    ".dt_bias", "position_embedding_table",
    ".A_log",
)  # fmt: skip
"""Ends of the names of further parameters that transformers initializes with zeros or ones."""


def save_model(
    folder: Path,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
) -> None:
    """Random weights, none of which is as transformers initializes norms and biases.

    A checkpoint that this process has made before is written again from memory, and torch's generator is left as it was
    then.
    """
    same = (model_class, config.to_json_string(), seed, dtype, shard_size)
    if same not in _SAVED:
        if len(_SAVED) == MOST_SAVED:
            del _SAVED[next(iter(_SAVED))]
        with tempfile.TemporaryDirectory() as made:
            _make_model(Path(made), model_class, config, seed, dtype, shard_size)
            _SAVED[same] = {path.name: path.read_bytes() for path in Path(made).iterdir()}, torch.get_rng_state()
    files, state = _SAVED[same]
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    torch.set_rng_state(state)


MOST_SAVED = 200
_SAVED: dict[tuple[Any, ...], tuple[dict[str, bytes], torch.Tensor]] = {}
"""The files of checkpoints and the state of torch's generator, the oldest first."""


def _make_model(
    folder: Path,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    seed: int,
    dtype: torch.dtype,
    shard_size: str,
) -> None:
    torch.manual_seed(seed)
    model = model_class(config)
    # Ones and zeros, as transformers initializes them, would hide a norm or bias that is left out or swapped.
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith((".bias", *OTHER_CONSTANTS)):
            nn.init.normal_(parameter, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.2)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("layer_scalar", "std_scale", "std_bias", "router.scale", "per_expert_scale")):
            nn.init.normal_(tensor, mean=1.0, std=0.2)
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(tensor, std=0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size, save_original_format=False)
