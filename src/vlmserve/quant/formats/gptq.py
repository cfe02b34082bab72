"""4-bit and 8-bit weights of GPTQ checkpoints (https://arxiv.org/abs/2210.17323).

- ``X.qweight``, int32 ``[in_features * bits / 32, out_features]``
- ``X.qzeros``, int32 ``[groups, out_features * bits / 32]``
- ``X.scales``, ``[groups, out_features]``
- ``X.g_idx``: the group of each input, not contiguous with ``desc_act``; optional

A weight is ``scale * (value - zero)``. Format "gptq_v2" stores zero points. "gptq" subtracts 1 from packed words, where
0 borrows from its neighbour; adding 1 undoes that (https://github.com/ModelCloud/GPTQModel).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from vlmserve.errors import ModelLoadError
from vlmserve.quant.formats.layout import Layout, StoredWeight, check_setting, grouped, unpack

METHOD = "gptq"
ONES = {4: 0x11111111, 8: 0x01010101}
"""Words with a 1 in each value, by width."""


def layouts(config: Mapping[str, Any]) -> list[Layout]:
    kind = "marlin" if config.get("is_marlin_format") else config.get("checkpoint_format") or config.get("format")
    check_setting(METHOD, "checkpoint_format", kind or "gptq", ["gptq", "gptq_v2"])
    check_setting(METHOD, "bits", config.get("bits", 4), list(ONES))
    # The tensors tell each layer's width.
    read = partial(_read, stated=int(config.get("group_size") or 128), less_one=kind != "gptq_v2")
    return [Layout("qweight", ("qzeros", "scales"), ("g_idx",), read)]


def _read(tensors: Mapping[str, Tensor], stated: int, less_one: bool) -> StoredWeight:
    words, zeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    groups, out_features = scales.shape
    if words.shape[1] != out_features or len(zeros) != groups:
        raise ModelLoadError(
            f"qweight {tuple(words.shape)}, qzeros {tuple(zeros.shape)} and scales {tuple(scales.shape)} do not make a "
            "weight"
        )
    bits = zeros.shape[1] * 32 // out_features
    check_setting(METHOD, "bits", bits, list(ONES))
    if less_one:
        zeros = zeros + ONES[bits]
    values = unpack(words.T, bits, len(words) * 32 // bits)
    points = unpack(zeros, bits, out_features).T.float()
    return grouped(bits, values, scales.T.float(), points, [stated], tensors.get("g_idx"))
