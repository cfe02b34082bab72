"""The copy of OpenVINO that is compared with vlmserve on AVX2."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from pathlib import Path

import pytest

from benchmarks.openvino_avx2 import ANSWER_AVX, XGETBV, hold_to_avx2

RET = b"\xc3"


def test_a_library_keeps_its_length(tmp_path: Path):
    library = tmp_path / "library.so"
    library.write_bytes(b"before" + XGETBV + b"between" + XGETBV)
    assert hold_to_avx2(library) == 2
    assert library.read_bytes() == b"before" + ANSWER_AVX + b"between" + ANSWER_AVX


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the instructions are those of x86-64 on Linux"
)
def test_the_answer_is_x87_sse_and_avx():
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as code:
        code.write(ANSWER_AVX + RET)
        begin = (ctypes.c_char * mmap.PAGESIZE).from_buffer(code)
        assert ctypes.CFUNCTYPE(ctypes.c_uint32)(ctypes.addressof(begin))() == 0b111
        del begin
