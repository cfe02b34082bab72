"""NVIDIA's programmatic dependent launch (compute capability 9.0 or newer): less idle time between kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Wait for all earlier kernels, even with nothing to do, because the next kernel relies on it.

    Programs do not trigger the next launch early, because waiting programs would occupy slots. On an H200, a 4-bit
    Mistral-7B decode step takes 2.35 ms, 2.60 ms with early triggers, and 2.50 ms with ordinary launches.
    """
    if DEPENDENT:
        gdc_wait()
