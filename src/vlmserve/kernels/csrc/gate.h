// The output gate of attention, computed in float32.
#pragma once

#include "table.h"
#include "threads.h"
#include "vector.h"

namespace {

template <class T>
void gate_row(const GateArgs& args, long row) {
    const T* gates = static_cast<const T*>(args.gates) + row * args.gate_stride;
    T* x = static_cast<T*>(args.x) + row * args.gates_of_row * args.each;
    if (args.each == 1) {
        for (long column = 0; column < args.gates_of_row; column += LANES) {
            long count = smaller(LANES, args.gates_of_row - column);
            store_some(x + column, load_some(x + column, count) * sigmoid(load_some(gates + column, count)), count);
        }
        return;
    }
    for (long i = 0; i < args.gates_of_row; ++i, x += args.each) {
        f32v factor = sigmoid(broadcast(to_float(gates[i])));
        for (long column = 0; column < args.each; column += LANES) {
            long count = smaller(LANES, args.each - column);
            store_some(x + column, load_some(x + column, count) * factor, count);
        }
    }
}

void gate(const GateArgs& args) {
    each_range(args.threads, args.rows, 3 * args.gates_of_row * args.each, [&](long first, long last, int) {
        for (long row = first; row < last; ++row)
            if (args.dtype == FLOAT32)
                gate_row<float>(args, row);
            else
                gate_row<bf16>(args, row);
    });
}

}  // namespace
