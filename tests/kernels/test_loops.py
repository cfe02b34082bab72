"""The inner loops of large products, as they were compiled: sums stay in registers.

GCC may keep half of a block's sums in memory, for reasons as remote as whether signed numbers wrap around. Results are
the same, and products of many rows take twice as long.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.native import built
from vlmserve.kernels.extension import extension, supported_isas

FEWEST_PRODUCTS = 8
"""Of a loop that multiplies a block of rows with vectors of weights; what follows a product has fewer."""

JUMP = re.compile(r"\tj\w+\s+([0-9a-f]+)")
PRODUCT = re.compile(r"\t(vfmadd\d+ps|vdpbf16ps)\s")
INTEGER_PRODUCT = re.compile(r"\tvp(maddubsw|maddwd|dpbusd)\s")
STACK_STORE = re.compile(r"\tvmov\w+\s+%[xyz]mm\d+,-?(0x[0-9a-f]+)?\(%r[sb]p\)")


def functions(name: str) -> Iterator[list[tuple[int, str]]]:
    """Addresses and instructions of each function of the built library whose name contains this."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(extension().__file__)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for function in listing.split("\n\n"):
        title, _, body = function.strip().partition("\n")
        if name in title:
            lines = (line.partition(":") for line in body.splitlines())
            yield [(int(address, 16), instruction) for address, _, instruction in lines]


def inner_loops(function: list[tuple[int, str]]) -> Iterator[list[str]]:
    """The instructions of each loop without a loop in it."""
    places = {address: place for place, (address, _) in enumerate(function)}
    loops = []
    for place, (_, instruction) in enumerate(function):
        if (jump := JUMP.search(instruction)) and places.get(int(jump[1], 16), place) < place:
            loops.append((places[int(jump[1], 16)], place))
    for first, last in loops:
        if not any(first <= a and b <= last for a, b in loops if (a, b) != (first, last)):
            yield [instruction for _, instruction in function[first:last]]


readable = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("objdump") is None, reason="reads x86 by objdump"
)
optimized = pytest.mark.skipif(
    len(supported_isas()) < 2 or "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="only the portable kernels were built, or kernels with sanitizers",
)


@built
@readable
@optimized
def test_sums_of_large_products_stay_in_registers() -> None:
    loops = [loop for function in functions("run_blocks") for loop in inner_loops(function)]
    products = [sum(map(bool, map(PRODUCT.search, loop))) for loop in loops]
    large = [loop for loop, count in zip(loops, products, strict=True) if count >= FEWEST_PRODUCTS]
    # At least those in float32 and bfloat16, of one instruction set.
    assert len(large) >= 2
    stored = [sum(map(bool, map(STACK_STORE.search, loop))) for loop in large]
    assert max(stored) <= 1, "\n".join(large[stored.index(max(stored))])


@built
@readable
@optimized
@pytest.mark.parametrize("name", ["add_unpacked", "add_chunk"])
def test_integer_sums_of_blocks_stay_in_registers(name: str) -> None:
    """Sums of groups are added to memory once per group, those of its products never."""
    loops = [loop for function in functions(name) for loop in inner_loops(function)]
    products = [sum(map(bool, map(INTEGER_PRODUCT.search, loop))) for loop in loops]
    stored = [sum(map(bool, map(STACK_STORE.search, loop))) for loop in loops]
    large = [
        (2 * stores, count) for stores, count in zip(stored, products, strict=True) if count >= 2 * FEWEST_PRODUCTS
    ]
    if name == "add_chunk" and not {"avx2", "avx512"}.intersection(supported_isas()):
        pytest.skip("only instruction sets without VNNI unpack groups")
    assert large
    assert all(stores <= count for stores, count in large), large
