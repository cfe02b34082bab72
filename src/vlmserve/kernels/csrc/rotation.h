// RoPE for the patches of a vision tower, computed in float32.
#pragma once

#include "table.h"
#include "threads.h"
#include "vector.h"

namespace {

template <class T>
void rotate_row(const RotationArgs& args, long row) {
    T* head = static_cast<T*>(args.qkv) + row * args.stride;
    long half = args.head_size / 2;
    const float *cosines = args.cos + row * half, *sines = args.sin + row * half;
    for (long i = 0; i < args.heads; ++i, head += args.head_size)
        for (long column = 0; column < half; column += LANES) {
            long count = smaller(LANES, half - column);
            f32v first = load_some(head + column, count), second = load_some(head + half + column, count);
            f32v cosine = load_some(cosines + column, count), sine = load_some(sines + column, count);
            store_some(head + column, first * cosine - second * sine, count);
            store_some(head + half + column, second * cosine + first * sine, count);
        }
}

void rotation(const RotationArgs& args) {
    each_range(args.threads, args.rows, 2 * args.heads * args.head_size, [&](long first, long last, int) {
        for (long row = first; row < last; ++row)
            if (args.dtype == FLOAT32)
                rotate_row<float>(args, row);
            else
                rotate_row<bf16>(args, row);
    });
}

}  // namespace
