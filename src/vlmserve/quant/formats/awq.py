"""4-bit weights of AWQ checkpoints, version GEMM (https://arxiv.org/abs/2306.00978).

- ``X.qweight``, int32 ``[in_features, out_features / 8]``
- ``X.qzeros``, int32 ``[groups, out_features / 8]``
- ``X.scales``, ``[groups, out_features]``

A weight is ``scale * (value - zero)``. From the lowest bits, a word holds outputs 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlmserve.errors import ModelLoadError
from vlmserve.quant.formats.layout import Layout, StoredWeight, check_setting, grouped, unpack

METHOD = "awq"
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of the eight outputs in a word."""


def layouts(config: Mapping[str, Any]) -> list[Layout]:
    version = config.get("version") or config.get("format") or "gemm"
    # llm-awq packs in its own order, whatever version it states.
    version = "llm-awq" if config.get("backend") == "llm-awq" else str(version).lower()
    check_setting(METHOD, "version", version, ["gemm"])
    check_setting(METHOD, "bits", config.get("bits", config.get("w_bit", 4)), [4])
    size = int(config.get("group_size") or config.get("q_group_size") or 128)

    def read(tensors: Mapping[str, Tensor]) -> StoredWeight:
        words, zeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
        if {words.shape[1] * 8, zeros.shape[1] * 8} != {scales.shape[1]} or len(zeros) != len(scales):
            raise ModelLoadError(
                f"qweight {tuple(words.shape)}, qzeros {tuple(zeros.shape)} and scales {tuple(scales.shape)} do not "
                "make a weight"
            )
        values, points = (_in_order(unpack(packed, 4, scales.shape[1])).T for packed in (words, zeros))
        return grouped(4, values.contiguous(), scales.T.float(), points.float(), [size], None)

    return [Layout("qweight", ("qzeros", "scales"), (), read)]


def _in_order(values: Tensor) -> Tensor:
    places = torch.tensor(PLACES, device=values.device)
    return values.view(len(values), -1, 8)[:, :, places].flatten(1)
