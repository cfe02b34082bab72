"""Products with inputs in 8 bits, by a scale for each token, as transformers' layers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from vlmserve.kernels.extension import supported_isas

DOTS = [isa for isa in supported_isas() if isa not in ("avx512", "avx2", "portable")]
"""The instruction sets of this machine that add the products of bytes up, the best one first."""


def with_rounded_inputs(model: PreTrainedModel) -> PreTrainedModel:
    """The same with rounded inputs of all linear layers but the head."""

    def round_inputs(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scale = inputs[0].abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return ((inputs[0] / scale).round() * scale,)

    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(round_inputs)
    return model


def logits_of_rounded_inputs(folder: Path, tokens: Tensor) -> Tensor:
    """``[tokens, vocabulary]`` of a checkpoint, float32."""
    model = with_rounded_inputs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with torch.inference_mode():
        logits: Tensor = model(input_ids=tokens[None]).logits[0]
    return logits
