"""Arithmetic of grids and tiles on the host. Triton's functions of these names are meant for kernels' constants: a call
takes microseconds, as long as a launch."""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    """The quotient of two positive numbers, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
