"""Small random LoRA adapters, made and computed by PEFT."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn


def make_adapter(base: nn.Module, folder: Path, *, seed: int = 0, **config: Any) -> PeftModel:
    """An adapter of a model of transformers in `folder`; config: fields of `LoraConfig`. Returns the adapted model.

    All that can be trained is random. PEFT changes the model that it adapts, so this one is a copy.
    """
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**{"r": 4, "init_lora_weights": False, **config}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and "lora_A" not in name and "lora_B" not in name:
                    parameter.mul_(1 + 0.3 * torch.randn_like(parameter)).add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(folder)
    return model.eval()
