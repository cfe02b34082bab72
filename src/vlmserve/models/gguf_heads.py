"""The order of a gated delta rule's heads in GGUF files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmserve.errors import ModelLoadError
from vlmserve.families.gguf import Metadata
from vlmserve.gguf_header import TensorInfo


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Checkpoints store the value heads of each key head together. GGUF files store the first value head of all key
    heads, then the second of all, and so on.
    """

    num_keys: int
    num_values: int
    key_channels: int
    """Channels of all queries and keys."""
    value_size: int

    @classmethod
    def read(cls, metadata: Metadata) -> DeltaHeads:
        """Raises ModelLoadError for missing values and mismatched head counts."""
        keys, values = metadata["ssm.group_count"], metadata["ssm.time_step_rank"]
        inner = metadata["ssm.inner_size"]
        if keys < 1 or values < 1 or values % keys or inner % values:
            raise ModelLoadError(
                f"{metadata.header.path}: {values} value heads do not fit {keys} key heads and {inner} values"
            )
        return cls(keys, values, 2 * keys * metadata["ssm.state_size"], inner // values)

    def places(self, part: str, info: TensorInfo) -> NDArray[np.int64] | None:
        """Return the file's rows (``out_proj``: columns) in checkpoint order, None if unchanged. Raises ModelLoadError
        for a tensor of another size.
        """
        size = 1 if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else self.value_size
        before = self.key_channels if part in ("in_proj_qkv", "conv1d") else 0
        count, wanted = info.shape[1 if part == "out_proj" else 0], before + self.num_values * size
        if count != wanted:
            raise ModelLoadError(f"{info.path}: {info.name} has {count} channels, its metadata asks for {wanted}")
        if self.num_values == self.num_keys:
            return None
        heads = np.arange(self.num_values).reshape(-1, self.num_keys).T.flatten()
        values = heads[:, None] * size + np.arange(size)
        return np.concatenate((np.arange(before), before + values.flatten()))
