"""Weights with one byte each: int8 or float8 numbers and scales.

There is one ``X.weight_scale`` per layer, output, group of inputs, or block of outputs and inputs. DeepSeek and Qwen
call block scales ``X.weight_scale_inv`` (https://arxiv.org/abs/2412.19437), transformers a layer's scale, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlmserve.errors import ModelLoadError
from vlmserve.kernels.quantized import FLOAT8, QuantizedWeight
from vlmserve.quant.formats.layout import Layout, StoredWeight, check_setting, find_group_size

METHOD = "fp8"
WEIGHT, SCALE, BLOCK_SCALE, ZERO_POINT = "weight", "weight_scale", "weight_scale_inv", "weight_zero_point"
FLOATS = (FLOAT8, torch.float8_e5m2)


def layouts(config: Mapping[str, Any]) -> list[Layout]:
    check_setting(METHOD, "fmt", config.get("fmt") or "e4m3", ["e4m3", "e5m2"])
    check_setting(METHOD, "expert_dtype", config.get("expert_dtype") or "fp8", ["fp8"])
    block = tuple(config.get("weight_block_size") or ()) or None
    names = (BLOCK_SCALE,) if block else (SCALE, BLOCK_SCALE)
    return [Layout(WEIGHT, (name,), (), partial(from_tensors, scale=name, block=block, stated=())) for name in names]


def from_tensors(
    tensors: Mapping[str, Tensor],
    *,
    scale: str = SCALE,
    block: tuple[int, ...] | None = None,
    stated: tuple[int, ...] = (),
) -> StoredWeight:
    """scale: name. block: outputs and inputs that share a scale. Raises ModelLoadError for mismatched tensors."""
    weight, scales = tensors[WEIGHT], tensors[scale].float()
    if weight.dtype not in (torch.int8, *FLOATS):
        raise ModelLoadError(f"a weight of {weight.dtype} has scales, which only weights of one byte need")
    out_features, in_features = weight.shape
    if scales.numel() == 1 and block is None:
        scales = scales.reshape(1, 1).expand(out_features, 1)
    elif scales.ndim == 1:
        scales = scales[:, None]
    tall, wide = block or (1, find_group_size(in_features, scales.shape[1], stated) or 0)
    if not wide or scales.shape != (-(-out_features // tall), -(-in_features // wide)):
        raise ModelLoadError(f"scales {tuple(scales.shape)} do not fit a weight {tuple(weight.shape)}")
    if weight.dtype == torch.int8 and tall == 1:
        zero = tensors[ZERO_POINT].float().reshape(-1, scales.shape[1]) if ZERO_POINT in tensors else 0.0
        values = (weight.to(torch.int16) + 128).to(torch.uint8)
        return QuantizedWeight(8, wide, values, scales.contiguous(), -(128 + zero) * scales)
    if ZERO_POINT in tensors and bool(tensors[ZERO_POINT].float().any()):
        raise ModelLoadError("a weight with a zero point in blocks or of floating point numbers")
    if weight.dtype == FLOAT8 and tall == 1 and scales.shape[1] == 1:
        values, minimums = weight.view(torch.uint8), torch.zeros_like(scales)
        return QuantizedWeight(8, in_features, values, scales.contiguous(), minimums, is_float8=True)
    spread = scales.repeat_interleave(tall, 0)[:out_features].repeat_interleave(wide, 1)[:, :in_features]
    return weight.float() * spread
