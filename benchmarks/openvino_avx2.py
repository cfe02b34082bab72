"""A copy of OpenVINO that takes the processor for one without AVX-512.

    .venv/bin/python -m benchmarks.openvino_avx2 build/openvino-avx2
    PYTHONPATH=build/openvino-avx2 VLMSERVE_KERNELS=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
        .venv/bin/python -m benchmarks.peers

OpenVINO's products in float32 come from a library that ignores ONEDNN_MAX_CPU_ISA, and its 8-bit ones do not start
under it. All of them ask for the registers that the system saves, by the instruction XGETBV, before they use AVX-512.
In the copy that instruction is replaced by two that answer with those of AVX alone. Only x86-64 on Linux.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from pathlib import Path

PACKAGES = ("openvino", "openvino_genai", "openvino_tokenizers")
LIBRARIES = ("libopenvino.so*", "libopenvino_intel_cpu_plugin.so*")
XGETBV = b"\x0f\x01\xd0"
ANSWER_AVX = b"\x6a\x07\x58"
"""push 7; pop rax: as long as XGETBV, and the bits of x87, SSE and AVX."""


def hold_to_avx2(library: Path) -> int:
    """Replace the instruction in a library; returns how often."""
    code = library.read_bytes()
    library.write_bytes(code.replace(XGETBV, ANSWER_AVX))
    return code.count(XGETBV)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.openvino_avx2", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the copy goes")
    folder = parser.parse_args().folder
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise SystemExit(f"{package} is not installed: make bench installs it")
        shutil.copytree(Path(spec.origin).parent, folder / package, symlinks=True, dirs_exist_ok=True)
    libraries = [path for name in LIBRARIES for path in folder.rglob(name) if not path.is_symlink()]
    for library in libraries:
        print(f"{library}: {hold_to_avx2(library)} times")


if __name__ == "__main__":
    main()
