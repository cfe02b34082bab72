"""Compiles each kernel for GPUs that need not be there, and prints what came out as JSON.

Runs as a process of its own, because kernels that are interpreted cannot be compiled:
``python -m tests.kernels.triton.compiling 80 90``.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key

from tests.built import FOLDER
from tests.kernels.triton.cases import Case, all_cases

EVERYWHERE = re.compile(
    r"1 x 4096 x 28672 of [48] bits$|attention of chunks, heads of 128, .*reach$|attention of images, .* 32 keys"
    r"|rotary .* fp8|delta chunks: states"
)
"""Kernels that are compiled for all architectures: those with instructions that not all have, and the one that takes
most registers. The others are for sm_90 alone, since each takes two seconds."""
OF_MEMORY = re.compile(r"(LD|ST|ATOM|RED|UTMA|UBLKCP|EXIT)(?!S)(?!C)")
"""Instructions that read or write memory which others write, or end a program."""
INSTRUCTION_BYTES = 16
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Binary(NamedTuple):
    """What the compiler makes of a case. code: of its instructions. log: ptxas's."""

    code: bytes
    shared: int
    log: str


def source_of(case: Case, arch: int) -> tuple[ASTSource, dict[str, Any]]:
    """What is compiled, and the compiler's options."""
    function = case.kernel.function
    names = function.arg_names
    of_kernel = {**case.constants, **({"DEPENDENT": is_dependent(case, arch)} if "DEPENDENT" in names else {})}
    signature = {name: "constexpr" if name in of_kernel else case.types[name] for name in names}
    sizes = ("in_features", "out_features", "stride_x", "stride", "vocabulary", "width", "stride_token", "stride_head")
    sizes += ("rank", "query_stride")
    # As at run time: addresses and sizes of large models are multiples of 16.
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name.endswith("_ptr") or name in sizes
    }
    constants = {(names.index(name),): value for name, value in of_kernel.items()}
    options = {"num_warps": case.warps, "num_stages": case.stages}
    source = ASTSource(function, signature, constants, attributes)
    return source, {**options, "launch_pdl": True} if is_dependent(case, arch) else options


def is_dependent(case: Case, arch: int) -> bool:
    """Whether it is launched while the kernel before runs, as it is where a GPU has such launches."""
    return arch >= 90 and "DEPENDENT" in case.kernel.function.arg_names


def compiled(source: ASTSource, options: dict[str, Any], target: GPUTarget) -> Binary:
    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # a cached result has no log
        result = triton.compile(source, target=target, options=options)
    return Binary(code_of(result.asm["cubin"]), int(result.metadata.shared), log.getvalue())


def code_of(cubin: bytes) -> bytes:
    """The only section of an ELF file that has instructions."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + size * number) for number in range(count)]
    names = sections[of_names][4]
    [(start, length)] = [
        (start, length) for name, _, _, _, start, length in sections if cubin.startswith(b".text.", names + name)
    ]
    return cubin[start : start + length]


def disassembled(codes: Sequence[bytes], arch: int) -> list[list[str]]:
    """The instructions of each code; the addresses that they jump to count from its start.

    All are disassembled at once, because nvdisasm takes half a second to start."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        kind = f"SM{arch}a" if arch >= 90 else f"SM{arch}"
        command = [TOOLS / "nvdisasm", "-b", kind, file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    every = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", text, re.MULTILINE)
    assert len(every) * INSTRUCTION_BYTES == sum(map(len, codes))
    results, first = [], 0
    for code in codes:
        start, count = first * INSTRUCTION_BYTES, len(code) // INSTRUCTION_BYTES
        found = [
            re.sub(r"(?<= )0x([0-9a-f]+)$", lambda target, start=start: hex(int(target[1], 16) - start), one)
            if one.startswith("BRA")
            else one
            for one in every[first : first + count]
        ]
        # Programs are filled up behind their end.
        while found[-1] == "NOP":
            found.pop()
        results.append(found)
        first += count
    return results


def measured(case: Case, binary: Binary, found: list[str]) -> dict[str, Any]:
    """What tests look at of a binary and its instructions."""
    waits = next((place for place, text in enumerate(found) if text.startswith("ACQBULK")), None)
    round_of_weights = innermost_loop(found) or found
    first = min(loops(found), default=(0, -1))
    first_loop = found[first[0] : first[1] + 1]
    return {
        # ptxas warns of tensor cores that wait for each other by C7510 and the numbers after it.
        "serialized": re.findall(r"\(C75\d+\)", binary.log),
        # What is spilled once, before a loop or behind it, takes no time to speak of.
        "spilled": sum(text.startswith(("LDL", "STL")) for text in round_of_weights),
        "shared": binary.shared,
        "before_waiting": None if waits is None else [text for text in found[:waits] if OF_MEMORY.match(text)],
        # Copies to shared memory that need not have ended when the program waits for others.
        "on_their_way": max(
            (int(count[1], 16) for text in found if (count := re.match(r"DEPBAR\.LE SB0, 0x(\w+)", text))), default=0
        ),
        "widest_load": max(_bytes(text, "LDG") for text in found),
        "widest_store": max(_bytes(text, "STG") for text in found),
        "tensor_cores": any(
            text.startswith(("HMMA", "HGMMA", "UTCHMMA", "IMMA", "IGMMA", "UTCIMMA")) for text in found
        ),
        # Of loops that read float32s.
        "least_distance": min(load_distances(round_of_weights), default=1.0),
        "first_loop_per_float": len(first_loop) * 4 / max(1, sum(_bytes(text, "LDG") for text in first_loop)),
        "first_loop_exchanges": sum(text.startswith(("BAR", "SHFL", "REDUX", "LDS", "STS")) for text in first_loop),
        "per_weight": len(round_of_weights) * 32 * case.warps / case.weights if case.weights else None,
    }


def loops(found: list[str]) -> list[tuple[int, int]]:
    """The first and the last of each run of instructions that ends with a jump back to its start."""
    runs = []
    for end, text in enumerate(found):
        target = re.search(r"^BRA.* 0x([0-9a-f]+)$", text)
        if target and (start := int(target[1], 16) // INSTRUCTION_BYTES) < end:
            runs.append((start, end))
    return runs


def innermost_loop(found: list[str]) -> list[str]:
    """The longest loop that has no other one inside."""
    runs = loops(found)
    inner = [run for run in runs if not any(run[0] <= other[0] and other[1] < run[1] for other in runs)]
    first, last = max(inner, key=lambda run: run[1] - run[0], default=(0, -1))
    return found[first : last + 1]


def load_distances(loop: list[str]) -> list[float]:
    """How far what each load from global memory into registers gives is used behind it, by the length of the loop."""
    found = []
    for place, text in enumerate(loop):
        if (load := re.match(r"LDG\S* (R\d+), ", text)) is not None:
            first = int(load[1][1:])
            given = {f"R{first + number}" for number in range(max(1, _bytes(text.split()[0], "LDG") // 4))}
            behind = (loop + loop)[place + 1 : place + len(loop)]
            used = (number for number, text in enumerate(behind, 1) if given & set(re.findall(r"\bR\d+\b", text)))
            found.append(next(used, len(loop)) / len(loop))
    return found


def _bytes(instruction: str, kind: str) -> int:
    """How many bytes a thread takes from global memory ("LDG") or puts there ("STG") at a time."""
    if not instruction.startswith(kind):
        return 0
    width = re.search(r"\.(128|64|U16|U8|S8)\b", instruction)
    return {"128": 16, "64": 8, "U16": 2, "U8": 1, "S8": 1}[width[1]] if width else 4


class Results:
    """What was measured for an architecture. Files keep it from one run to the next, each under a hash of all that it
    was made from: the kernel, its constants, the compiler and this file."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self._target = GPUTarget("cuda", arch, 32)
        self._backend = make_backend(self._target)
        self._folder = FOLDER / "compiled"
        self._folder.mkdir(parents=True, exist_ok=True)

    def of(self, cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
        """By the names of cases."""
        results: dict[str, dict[str, Any]] = {}
        fresh: list[tuple[Case, Path, Binary]] = []
        for case in cases:
            source, options = source_of(case, self._arch)
            file = self._folder / f"{self._key(case, source, options)}.json"
            if file.exists():
                results[case.name] = json.loads(file.read_text())
                continue
            try:
                fresh.append((case, file, compiled(source, options, self._target)))
            except triton.errors.TritonError as error:
                results[case.name] = {"error": str(error)}
        codes = [binary.code for _, _, binary in fresh]
        for (case, file, binary), found in zip(fresh, disassembled(codes, self._arch) if codes else [], strict=True):
            results[case.name] = measured(case, binary, found)
            unfinished = file.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps(results[case.name]))
            unfinished.rename(file)
        return {case.name: {**results[case.name], **self._known(case)} for case in cases}

    def _key(self, case: Case, source: ASTSource, options: dict[str, Any]) -> str:
        of_kernel = get_cache_key(source, self._backend, self._backend.parse_options(options), {})
        return hashlib.sha256(f"{of_kernel} {case.weights} {Path(__file__).read_text()}".encode()).hexdigest()

    def _known(self, case: Case) -> dict[str, Any]:
        """What takes no compiler."""
        parameters = case.kernel.function.params
        return {
            "specialized": [one.name for one in parameters if not (one.do_not_specialize or one.is_constexpr)],
            "dependent": is_dependent(case, self._arch),
            "tiles_bytes": case.tiles_bytes,
        }


def main() -> None:
    cases = all_cases()
    results = {
        arch: Results(arch).of([case for case in cases if arch == 90 or EVERYWHERE.match(case.name)])
        for arch in map(int, sys.argv[1:])
    }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
