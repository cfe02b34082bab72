"""Launches of kernels that begin when the programs of the one before them end: NVIDIA's programmatic dependent launch,
from compute capability 9.0 on.

A GPU idles between two kernels, which adds up over the hundreds of small ones of a decode step. A kernel that is
launched so is there already when the last program before it ends. Then it waits for all kernels before it, before it
reads or writes anything. Each of its programs has to wait, even one that has nothing to do: the kernel behind it takes
its end for that of all kernels before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """All that was launched before has ended when this ends. DEPENDENT: whether the kernel was launched early.

    No program says beforehand that the next kernel may begin: programs that only wait take the places of those that
    compute. On an H200 a decode step of Mistral-7B in 4 bits took 2.35 ms so, 2.60 ms where they said so at once, and
    2.50 ms where each kernel was launched behind the one before it.
    """
    if DEPENDENT:
        gdc_wait()
