"""Products with inputs in 8 bits, by a scale for some inputs of each token, as transformers' layers."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from vlmserve.kernels.extension import supported_isas

DOTS = [isa for isa in supported_isas() if isa not in ("avx512", "avx2", "portable")]
"""The instruction sets of this machine that add the products of bytes up, the best one first."""


INPUT_GROUP = 128
"""Inputs that share a scale beside weights that are not in groups."""


def with_rounded_inputs(model: PreTrainedModel, group_size: int) -> PreTrainedModel:
    """The same with rounded inputs of all linear layers but the head. group_size: inputs that share a scale."""

    def round_inputs(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        width = inputs[0].shape[-1]
        groups = F.pad(inputs[0], (0, -width % group_size)).unflatten(-1, (-1, group_size))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return (((groups / scale).round() * scale).flatten(-2)[..., :width],)

    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(round_inputs)
    return model


def logits_of_rounded_inputs(folder: Path, tokens: Tensor, group_size: int = INPUT_GROUP) -> Tensor:
    """``[tokens, vocabulary]`` of a checkpoint, float32."""
    model = with_rounded_inputs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), group_size)
    with torch.inference_mode():
        logits: Tensor = model(input_ids=tokens[None]).logits[0]
    return logits
