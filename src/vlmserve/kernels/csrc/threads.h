// Threads, and memory that they do not share.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "vector.h"

namespace {

INLINE long thread_index() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

INLINE long cache_lines(long bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace
