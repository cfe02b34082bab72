"""NVIDIA's programmatic dependent launch (compute capability 9.0 or newer).

A GPU idles between two kernels, which adds up over the hundreds of small kernels of a decode step. A kernel launched
this way is resident when the previous kernel ends. Each program must wait before it reads or writes, even if it has
nothing to do, because the next kernel relies on it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Wait for the end of all earlier kernels. DEPENDENT: the kernel was launched early.

    Programs do not trigger the next launch early, because waiting programs would occupy slots. On an H200, a 4-bit
    Mistral-7B decode step takes 2.35 ms, 2.60 ms with early triggers, and 2.50 ms with ordinary launches.
    """
    if DEPENDENT:
        gdc_wait()
