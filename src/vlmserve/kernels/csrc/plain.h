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

// The kind of a plain matmul.
Product choose_plain(const LinearArgs& args) {
    if (args.dtype == FLOAT32) return product_of(args, PlainProduct<Float32>());
#if defined(AMX)
    return product_of(args, TileProduct());
#else
    if constexpr (EXPANDS_MANY_ROWS)
        if (args.rows >= EXPANDED_ROWS) return product_of(args, PlainProduct<ExpandedBFloat16>());
    return product_of(args, PlainProduct<BFloat16>());
#endif
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
