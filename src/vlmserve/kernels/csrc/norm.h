// RMSNorm and LayerNorm, computed in float32.
#pragma once

#include "table.h"
#include "threads.h"

namespace {

// Norms the vector `group` of a row.
template <class T>
void norm_vector(const NormArgs& args, long row, long group) {
    const long place = row * args.stride + group * args.size;
    const T* x = static_cast<const T*>(args.x) + place;
    const T* residual = args.residual ? static_cast<const T*>(args.residual) + place : nullptr;
    T* y = static_cast<T*>(args.y) + place;
    const float* weight = args.weight + group * args.weight_stride;
    const float* bias = args.bias ? args.bias + group * args.weight_stride : nullptr;
    f32v squares{}, sums{};
    for (long i = 0; i < args.size; i += LANES) {
        f32v value = load_some(x + i, smaller(LANES, args.size - i));
        sums += value;
        squares += value * value;
    }
    float mean = 0, variance = sum(squares) / static_cast<float>(args.size);
    if (args.centered) {
        mean = sum(sums) / static_cast<float>(args.size);
        // A second pass, because the difference of two large numbers would lose the variance.
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
        if (residual) value += load_some(residual + i, count);
        store_some(y + i, value, count);
    }
}

void norm(const NormArgs& args) {
    each_range(args.threads, args.rows * args.groups, 2 * args.size, [&](long first, long last, int) {
        for (long i = first; i < last; ++i)
            if (args.dtype == FLOAT32)
                norm_vector<float>(args, i / args.groups, i % args.groups);
            else
                norm_vector<bf16>(args, i / args.groups, i % args.groups);
    });
}

}  // namespace
