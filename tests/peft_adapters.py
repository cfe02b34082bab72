"""Small random LoRA adapters, made and computed by PEFT."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, XLoraConfig, get_peft_model
from safetensors.torch import save_file
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


def make_xlora(
    base: nn.Module, folder: Path, adapters: Sequence[dict[str, Any]], *, seed: int = 0, **config: Any
) -> PeftModel:
    """An X-LoRA checkpoint in `folder` over adapters made by `make_adapter` with those configurations, in folders "0",
    "1"… of it; config: fields of `XLoraConfig`. Returns the adapted model.

    The classifier is random, and sharp enough that tokens get different adapters. PEFT leaves tensors of classifiers
    out when it saves them, so these come from memory.
    """
    for number, one in enumerate(adapters):
        make_adapter(base, folder / str(number), seed=seed + number, **one)
    torch.manual_seed(seed)
    mixed = _mix(base, [folder / str(number) for number in range(len(adapters))], config)
    tensors = _classifier(mixed)
    for name, value in tensors.items():
        value.normal_(std=1.0 if name.endswith("bias") else 3 / value.shape[1] ** 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for saved in mixed.peft_config.values():
            if isinstance(saved, XLoraConfig):
                saved.save_pretrained(folder)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "adapter_model.safetensors")
    return mixed


def with_pool(
    base: nn.Module, mixed: PeftModel, folders: Sequence[Path], outputs: Sequence[int], **config: Any
) -> PeftModel:
    """X-LoRA over the adapters in those folders, scaled by those of the outputs of another one's classifier, whose
    configuration it has as well."""
    model = _mix(base, folders, config)
    theirs, count = _classifier(mixed), mixed.base_model.internal_xlora_classifier.n_classes
    for name, value in _classifier(model).items():
        rows = theirs[name]
        value.copy_(rows if rows.shape == value.shape else rows.unflatten(0, (-1, count))[:, outputs].flatten(0, 1))
    return model


def _mix(base: nn.Module, folders: Sequence[Path], config: dict[str, Any]) -> PeftModel:
    """X-LoRA over adapters, with a random classifier."""
    model = copy.deepcopy(base)
    model.config.use_cache = False
    text = model.config.get_text_config()
    paths = {str(number): str(folder) for number, folder in enumerate(folders)}
    settings = {"task_type": "CAUSAL_LM", "hidden_size": text.hidden_size, "xlora_size": 16, **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, XLoraConfig(adapters=paths, **settings)).eval()


def _classifier(mixed: PeftModel) -> dict[str, torch.Tensor]:
    """Its tensors, by name."""
    return {name: value for name, value in mixed.state_dict().items() if "internal_xlora_classifier" in name}
