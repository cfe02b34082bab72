// Multiplies columns of rows by a number or by other columns, in float32.
#pragma once

#include "table.h"
#include "threads.h"
#include "vector.h"

namespace {

template <class T>
void multiply_row(const MultiplyArgs& args, long row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    const T* by = args.by ? static_cast<const T*>(args.by) + row * args.by_stride : nullptr;
    T* y = static_cast<T*>(args.y) + row * args.width;
    for (long column = 0; column < args.width; column += LANES) {
        long count = smaller(LANES, args.width - column);
        f32v value = load_some(x + column, count);
        if (by) value *= load_some(by + column, count);
        store_some(y + column, value * args.factor, count);
    }
}

void multiply(const MultiplyArgs& args) {
    each_range(args.threads, args.rows, args.width, [&](long first, long last, int) {
        for (long row = first; row < last; ++row)
            if (args.dtype == FLOAT32)
                multiply_row<float>(args, row);
            else
                multiply_row<bf16>(args, row);
    });
}

}  // namespace
