"""Integer arithmetic for grids and tiles. Triton's functions take microseconds per call, as long as a launch."""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    """Divide two positive numbers, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two not below a positive number."""
    return 1 << (number - 1).bit_length()
