"""Builds the native kernels, where there is a compiler; everything else is in pyproject.toml."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("src/vlmserve/kernels/csrc")
OF_MODULE = ("isas.h", "module.cpp", "threads.cpp")
"""Sources that are compiled once for all instruction sets."""
KEPT = Path("build/kernels")
"""Objects of earlier builds, by instruction set and version."""
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
VNNI = [*AVX512, "-mavx512vnni"]
BF16 = [*VNNI, "-mavx512bf16"]
# GCC would load all inputs of a block before the products, and have no registers left for the sums.
ARM = [] if sys.platform == "darwin" else ["-fno-schedule-insns"]
# The last of each machine's runs everywhere; one that is too new for the compiler is left out.
MACHINES: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "amx": [*BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
        "avx512_bf16": BF16,
        "avx512_vnni": VNNI,
        "avx512": AVX512,
        "avx2_vnni": [*AVX2, "-mavxvnni"],
        "avx2": AVX2,
        # Hardly a processor needs these, and they take longest to optimize.
        "portable": ["-O1"],
    },
    "aarch64": {
        "neon_bf16": [*ARM, "-march=armv8.6-a"],
        "neon_dot": [*ARM, "-march=armv8.2-a+dotprod"],
        "neon": ARM,
    },
}
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
ISAS = MACHINES.get(MACHINE, {"portable": []})
FLAGS = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
# Python's own flags have signed numbers wrap around. GCC 12 then keeps half of a block's sums in memory with AVX2, and
# products of many rows take twice as long.
FLAGS += ["-fstrict-overflow", "-fno-wrapv"]
if os.environ.get("VLMSERVE_SANITIZE"):
    FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-O1"]
if os.environ.get("VLMSERVE_COVERAGE"):
    FLAGS += ["--coverage", "-fprofile-abs-path", "-fprofile-update=prefer-atomic", "-O1"]
THREADS = ["-pthread"]


def here(compiler: list[str]) -> list[str]:
    """Instruction sets that this machine runs, best first; every one on Arm, and where the compiler cannot tell."""

    def macros(flags: list[str]) -> set[str]:
        command = [*compiler, "-O1", *flags, "-dM", "-E", "-x", "c++", os.devnull]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return set(re.findall(r"#define (\w+)", listing))

    if MACHINE != "x86_64":
        return [*ISAS]
    try:
        plain, native = macros([]), macros(["-march=native"])
    except (OSError, subprocess.CalledProcessError):
        return [*ISAS]

    def runs(flags: list[str]) -> bool:
        try:
            return macros(flags) - plain <= native
        except subprocess.CalledProcessError:
            return False  # too new for this compiler

    return [isa for isa, flags in ISAS.items() if runs(flags) and (isa != "amx" or may_use_tiles())]


def may_use_tiles() -> bool:
    """Ask Linux for the permission to use AMX, as csrc/isas.h does."""
    request_permission, tile_data, arch_prctl = 0x1023, 18, 158
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def wanted_isas(choice: str, compiler: list[str]) -> list[str]:
    """Instruction sets to compile, those that every build has first. choice: see `BuildKernels`."""
    if choice not in ("best", "here", "all"):
        names = choice.split(",")
        if unknown := set(names) - set(ISAS):
            raise SystemExit(
                f"VLMSERVE_ISAS={choice}: use best, here, all or some of {','.join(ISAS)}, not {unknown.pop()}"
            )
        return names
    isas = [*ISAS] if choice == "all" else here(compiler)
    if choice == "best" and MACHINE == "x86_64":
        isas = [isas[0], isas[-1]]
    return list(dict.fromkeys((isas[0], isas[-1], *isas)))


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other process builds in this folder: one deletes what another links."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class BuildKernels(build_ext):
    """Compiles the kernels once for each instruction set, the module that chooses among them once.

    VLMSERVE_ISAS chooses instruction sets:

    - best: this machine's best one, and the one that runs everywhere (the default);
    - here: all that this machine runs, as tests need;
    - all: for any machine, as a published wheel needs;
    - names, separated by commas.
    """

    def build_extension(self, ext: Extension) -> None:
        with alone():
            self._build(ext)

    def _build(self, ext: Extension) -> None:
        folder = Path(self.build_temp)
        wanted = wanted_isas(os.environ.get("VLMSERVE_ISAS") or "best", self.compiler.compiler_cxx)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            kernels = zip(wanted, pool.map(self._kernels, wanted), strict=True)
            built = {isa: objects for isa, objects in kernels if objects}
        if not built:
            raise CompileError("no kernels can be compiled")
        module = self.compiler.compile(
            [str(SOURCES / "module.cpp"), str(SOURCES / "threads.cpp")],
            output_dir=str(folder),
            macros=[(f"VLMSERVE_WITH_{isa}", "1") for isa in built],
            include_dirs=self.include_dirs,
            extra_postargs=[*FLAGS, *THREADS],
        )
        self.compiler.link_shared_object(
            [*module, *(name for objects in built.values() for name in objects)],
            self.get_ext_fullpath(ext.name),
            extra_postargs=[*THREADS, *(flag for flag in FLAGS if "sanitize=" in flag or flag == "--coverage")],
            target_lang="c++",
        )

    def _kernels(self, isa: str) -> list[str]:
        """Objects of an instruction set, compiled once; [] if it is too new for the compiler."""
        flags = [*FLAGS, *ISAS[isa]]
        try:
            version = subprocess.run([*self.compiler.compiler_cxx, "--version"], capture_output=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(str(error)) from error  # setuptools goes on without kernels
        digest = hashlib.sha256(repr((version, self.compiler.compiler_so_cxx, flags)).encode())
        for source in sorted(SOURCES.iterdir()):
            if source.name not in OF_MODULE:
                digest.update(source.read_bytes())
        folder = KEPT / f"{isa}-{digest.hexdigest()[:16]}"
        complete = folder / "complete"
        if complete.exists() and not self.force:
            return complete.read_text("utf-8").split("\n")
        for earlier in KEPT.glob(f"{isa}-*"):
            shutil.rmtree(earlier)
        try:
            objects = self.compiler.compile(
                [str(SOURCES / "kernels.cpp")],
                output_dir=str(folder),
                macros=[("VLMSERVE_ISA", isa)],
                extra_postargs=flags,
            )
        except CompileError:
            if isa == [*ISAS][-1]:
                raise
            return []
        complete.write_text("\n".join(objects), "utf-8")
        return list(objects)


setup(
    ext_modules=[
        Extension(
            "vlmserve.kernels._native",
            [str(SOURCES / "kernels.cpp"), str(SOURCES / "module.cpp")],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
            optional=True,
            py_limited_api=True,
        )
    ],
    # The kernels use the stable ABI: one wheel for all versions from 3.11.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    cmdclass={"build_ext": BuildKernels},
)
