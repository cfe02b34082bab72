// RMSNorm and LayerNorm, computed in float32.
#pragma once

#include "table.h"
#include "threads.h"

namespace {

template <class T>
void norm_row(const NormArgs& args, long row) {
    const T* x = static_cast<const T*>(args.x) + row * args.size;
    T* y = static_cast<T*>(args.y) + row * args.size;
    const T* weight = static_cast<const T*>(args.weight);
    const T* bias = static_cast<const T*>(args.bias);
    f32v squares{}, sums{};
    for (long i = 0; i < args.size; i += LANES) {
        f32v value = load_some(x + i, smaller(LANES, args.size - i));
        sums += value;
        squares += value * value;
    }
    float mean = 0, variance = sum(squares) / static_cast<float>(args.size);
    if (bias) {
        mean = sum(sums) / static_cast<float>(args.size);
        // A second pass: the difference of two large numbers would be no variance.
        f32v deviations{};
        for (long i = 0; i < args.size; i += LANES) {
            long count = smaller(LANES, args.size - i);
            f32v value = load_some(x + i, count) - mean;
            if (count < LANES)
                for (long j = count; j < LANES; ++j) value[j] = 0;
            deviations += value * value;
        }
        variance = sum(deviations) / static_cast<float>(args.size);
    }
    float scale = 1.0f / __builtin_sqrtf(variance + args.eps);
    for (long i = 0; i < args.size; i += LANES) {
        long count = smaller(LANES, args.size - i);
        f32v value = (load_some(x + i, count) - mean) * scale * load_some(weight + i, count);
        if (bias) value += load_some(bias + i, count);
        store_some(y + i, value, count);
    }
}

void norm(const NormArgs& args) {
    each_range(args.threads, args.rows, 2 * args.size, [&](long first, long last, int) {
        for (long row = first; row < last; ++row)
            if (args.dtype == FLOAT32)
                norm_row<float>(args, row);
            else
                norm_row<bf16>(args, row);
    });
}

}  // namespace
