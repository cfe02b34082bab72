"""Builds the native kernels, where there is a compiler; everything else is in pyproject.toml."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("src/vlmserve/kernels/csrc")
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
    """Instruction sets that this processor runs; every one on Arm, and where the compiler cannot tell."""

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

    return [isa for isa, flags in ISAS.items() if runs(flags)]


class BuildKernels(build_ext):
    """Compiles the kernels once for each instruction set, the module that chooses among them once.

    VLMSERVE_ALL_ISAS=1 compiles all instruction sets, 0 those of this machine, which takes a fraction of the time
    without AVX-512. The default is 1 for a wheel, 0 for what runs from this folder.
    """

    def run(self) -> None:
        # While it runs, setuptools builds elsewhere and copies afterwards.
        self._stays_here = bool(self.inplace or self.editable_mode)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        folder = Path(self.build_temp)
        wants_all = os.environ.get("VLMSERVE_ALL_ISAS") or ("0" if self._stays_here else "1")
        wanted = here(self.compiler.compiler) if wants_all == "0" else [*ISAS]

        def kernels(isa: str) -> list[str]:
            try:
                return self.compiler.compile(
                    [str(SOURCES / "kernels.cpp")],
                    output_dir=str(folder / isa),
                    macros=[("VLMSERVE_ISA", isa)],
                    extra_postargs=[*FLAGS, *ISAS[isa]],
                )
            except CompileError:
                if isa == [*ISAS][-1]:
                    raise
                return []  # too new for this compiler

        with ThreadPoolExecutor(len(wanted)) as pool:
            built = {isa: objects for isa, objects in zip(wanted, pool.map(kernels, wanted), strict=True) if objects}
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
