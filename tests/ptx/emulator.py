"""Builds the emulator, and runs programs in it."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.built import FOLDER
from tests.ptx.program import Program, UnknownInstruction

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++20", "-O1", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-Wall")
MOST_INSTRUCTIONS = 50_000_000
"""Of a program, in all its warps."""


class Fault(Exception):
    """What a GPU would not have done, or what happens to work and must not be relied on."""


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("run", ctypes.c_void_p),
        ("operands", ctypes.c_void_p),
        ("guard", ctypes.c_int32),
        ("inverted", ctypes.c_int32),
    )


class _Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_uint64), ("end", ctypes.c_uint64))


class Count(ctypes.Structure):
    """Of an instruction, in all warps that it was executed in.

    waves: of 128 bytes each, that its accesses to shared memory take, and the least that as many bytes could take.
    Where threads access different words of one bank, it takes more. sectors: of 32 bytes each, of global memory.
    """

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("executed", "waves", "least_waves", "sectors", "least_sectors")
    )
    executed: int
    waves: int
    least_waves: int
    sectors: int
    least_sectors: int


@functools.cache
def library() -> ctypes.CDLL:
    """The emulator. The first process that needs it compiles it, once for each version of its source."""
    kind = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    FOLDER.mkdir(parents=True, exist_ok=True)
    built = FOLDER / f"ptx-emulator-{kind}.so"
    with built.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(built)
    found = ctypes.CDLL(str(built))
    found.ptx_operation.restype = ctypes.c_void_p
    found.ptx_run.restype = ctypes.c_char_p
    return found


def _compile(library: Path) -> None:
    unfinished = library.with_suffix(".unfinished")
    command = [os.environ.get("CXX", "g++"), *FLAGS, "-shared", "-fPIC", "-o", str(unfinished), str(SOURCE)]
    # A sanitizer that is loaded into the tests has no place in the compiler.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(command, check=True, env=environment)
    unfinished.rename(library)


class Executable:
    """A program whose instructions the emulator knows. Raises UnknownInstruction."""

    def __init__(self, program: Program) -> None:
        self.program = program
        known = {one.operation for one in program.instructions}
        operations = {name: library().ptx_operation(name.encode()) for name in known}
        if unknown := sorted(name for name, operation in operations.items() if not operation):
            raise UnknownInstruction(f"{program.name}: {', '.join(unknown)}")
        self._operands = [(ctypes.c_int32 * len(one.operands))(*one.operands) for one in program.instructions]
        count = len(program.instructions)
        self._code = (_Instruction * count)(
            *(
                _Instruction(operations[one.operation], ctypes.addressof(operands), one.guard, one.inverted)
                for one, operands in zip(program.instructions, self._operands, strict=True)
            )
        )
        self._lines = (ctypes.c_int32 * count)(*(one.line for one in program.instructions))
        self.counts = (Count * count)()
        """Of each instruction, of the runs that were counted."""
        self._special = (ctypes.c_int32 * len(program.special))(*program.special)

    def forget_counts(self) -> None:
        """Count from 0 again."""
        ctypes.memset(self.counts, 0, ctypes.sizeof(self.counts))

    def total(self) -> Count:
        """Of all instructions."""
        return Count(*(sum(getattr(one, name) for one in self.counts) for name, _ in Count._fields_))

    def packed(self, arguments: Sequence[int | float]) -> bytes:
        """The arguments as a launch hands them over; those that are missing at the end are 0."""
        found = bytearray(self.program.parameter_bytes)
        for (place, size), value in zip(self.program.parameters, arguments, strict=False):
            if isinstance(value, float):
                struct.pack_into("<f" if size == 4 else "<d", found, place, value)
            else:
                found[place : place + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        return bytes(found)

    def run(
        self,
        parameters: bytes,
        grid: Sequence[int],
        shared: int,
        ranges: Sequence[tuple[int, int]] = (),
        *,
        backwards: bool = False,
        counted: bool = False,
    ) -> None:
        """Execute all programs of a launch. shared: bytes of shared memory. ranges: of addresses that may be accessed;
        without any, all may be. backwards: the last program and the last warp first. counted: into `counts`.
        Raises Fault."""
        allowed = (_Range * max(1, len(ranges)))(*(_Range(*one) for one in ranges))
        threads, programs = (ctypes.c_uint32 * 3)(*self.program.threads), (ctypes.c_uint32 * 3)(*(*grid, 1, 1)[:3])
        registers = self.program.registers
        why = library().ptx_run(
            self._code,
            self._lines,
            registers,
            ctypes.c_int64(len(registers)),
            self._special,
            parameters,
            threads,
            programs,
            ctypes.c_int64(shared),
            allowed,
            len(ranges),
            int(backwards),
            ctypes.c_int64(MOST_INSTRUCTIONS),
            self.counts if counted else None,
        )
        if why:
            raise Fault(f"{self.program.name}, {why.decode()}")
