// The choice among matmuls with plain weights.
#pragma once

#include "amx_linear.h"
#include "linear.h"

namespace {

// Bytes after prepared rows that may be read.
#if defined(AMX)
constexpr long OVERREAD = TILE_OVERREAD;
#else
constexpr long OVERREAD = 0;
#endif

// Calls `work` with the kind of a plain matmul.
template <class OutType, class Work>
INLINE auto with_bfloat16(const LinearArgs& args, Work work) {
#if defined(AMX)
    return work(TileProduct<OutType>());
#endif
    if constexpr (EXPANDS_MANY_ROWS)
        if (args.rows >= EXPANDED_ROWS) return work(PlainProduct<ExpandedBFloat16, OutType>());
    return work(PlainProduct<BFloat16, OutType>());
}

template <class Work>
INLINE auto with_plain(const LinearArgs& args, Work work) {
    if (args.dtype == FLOAT32) return work(PlainProduct<Float32, float>());
    return args.float_output ? with_bfloat16<float>(args, work) : with_bfloat16<bf16>(args, work);
}

long plain_scratch(const LinearArgs& args) {
    if (args.dtype == FLOAT32) return args.rows * args.in * static_cast<long>(sizeof(Float32::Input));
#if defined(AMX)
    return args.rows * tile_padded(args.in) * 2;
#else
    return args.rows * (args.in / 2) * static_cast<long>(sizeof(BFloat16::Input));
#endif
}

}  // namespace
