"""Integer arithmetic for grids and tiles. Triton's functions take microseconds per call, as long as a launch."""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
