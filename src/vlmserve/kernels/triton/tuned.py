"""Tilings of products that were measured to be the fastest, by GPU.

`benchmarks.gpu --stages tiles` measures them and writes them as they stand here.
"""

from __future__ import annotations

from typing import NamedTuple

SMALL_TILE = 32 * 64
"""Outputs by tokens."""

LARGE_BLOCK = 128
"""Inputs of 4 bits whose bytes lie together, where they are one group or two: fewer of them make tensor cores wait."""


class Tiling(NamedTuple):
    """How a product is divided. outputs, inputs: of a tile; tokens: its rows of x. splits: parts of the inputs, each of
    which is a program's. warps: of a program; see `parts`."""

    outputs: int
    tokens: int
    inputs: int
    splits: int
    warps: int
    stages: int
    restarts: bool = False
    """Sums of each tile of 8-bit weights start at zero, which ptxas pipelines and which takes more registers."""

    def divides_inputs(self, bits: int) -> bool:
        """Whether a program's warps divide its inputs, weights having so many bits: a small tile gives them nothing
        else to divide."""
        return self.outputs * self.tokens <= SMALL_TILE and bits <= 16

    def parts(self, bits: int) -> int:
        """Tiles of inputs that a program multiplies side by side: one by each of its warps, or one by all.

        Of small blocks of 4 bits a warp has as many as are one large block, if registers hold their sums.
        """
        if not self.divides_inputs(bits):
            return 1
        return self.warps * (max(1, LARGE_BLOCK // self.inputs) if bits == 4 and self.tokens <= 16 else 1)

    def shared_bytes(self, bits: int, item_bytes: int) -> int:
        """Of a program, with numbers of x of `item_bytes`: tiles on their way, and what is unpacked."""
        inputs = self.inputs * self.parts(bits)
        # Tensor cores take what was unpacked from registers; sums of float32 do not.
        unpacked = inputs * self.outputs * item_bytes if item_bytes == 4 and bits <= 8 else 0
        if bits == 4 and item_bytes == 2 and not self.divides_inputs(bits):
            # On their way from one order of registers to another one.
            unpacked = inputs * self.outputs
        tile = inputs * (self.outputs * bits // 8 + self.tokens * item_bytes)
        return (self.stages - 1) * tile + unpacked


class Shape(NamedTuple):
    """Of a product. group: of inputs that share a scale, of 4 bits, else 0. tokens: rows of a tile at most."""

    bits: int
    group: int
    out_features: int
    in_features: int
    tokens: int


TUNED: dict[str, dict[Shape, Tiling | None]] = {
    "NVIDIA H200": {
        Shape(bits=4, group=128, out_features=6144, in_features=4096, tokens=8): Tiling(
            outputs=16, tokens=8, inputs=128, splits=1, warps=4, stages=3
        ),
        Shape(bits=4, group=128, out_features=4096, in_features=14336, tokens=8): Tiling(
            outputs=32, tokens=8, inputs=128, splits=2, warps=8, stages=3
        ),
        Shape(bits=4, group=32, out_features=6144, in_features=4096, tokens=8): Tiling(
            outputs=32, tokens=8, inputs=64, splits=2, warps=4, stages=3
        ),
        Shape(bits=4, group=32, out_features=28672, in_features=4096, tokens=8): Tiling(
            outputs=64, tokens=8, inputs=64, splits=1, warps=2, stages=2
        ),
        Shape(bits=4, group=32, out_features=4096, in_features=14336, tokens=8): Tiling(
            outputs=32, tokens=8, inputs=64, splits=2, warps=4, stages=3
        ),
        Shape(bits=16, group=0, out_features=6144, in_features=4096, tokens=8): Tiling(
            outputs=16, tokens=8, inputs=64, splits=1, warps=4, stages=4
        ),
        Shape(bits=16, group=0, out_features=4096, in_features=4096, tokens=8): Tiling(
            outputs=16, tokens=8, inputs=64, splits=1, warps=4, stages=5
        ),
    },
}
"""By the names that torch gives GPUs. None: the device's library is faster, for as many rows as a tile has at most."""
