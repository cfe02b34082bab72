"""Launches of kernels that begin while the one before them runs: NVIDIA's programmatic dependent launch, from compute
capability 9.0 on.

A GPU idles between two kernels, which adds up over the hundreds of small ones of a decode step. A kernel that is
launched so begins early and may fetch weights. Then it waits for all kernels before it, before it reads or writes
anything of theirs. Each of its programs has to wait, even one that has nothing to do: the kernel behind it takes its
end for that of all kernels before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CACHE_LINE = tl.constexpr(128)
"""Bytes."""
PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """All that was launched before has ended when this ends. DEPENDENT: whether the kernel was launched early."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(addresses):
    """Have the cache lines at int64 addresses fetched into the L2 cache."""
    tl.inline_asm_elementwise(PREFETCH, "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1)
