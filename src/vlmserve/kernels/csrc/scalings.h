// What X-LoRA (https://arxiv.org/abs/2402.07148) changes in adapters: between the factors of an adapter, each row's values
// are multiplied with scalings of its own.
#pragma once

#include "adapters.h"

namespace {

// Scales what `shrink` has computed, for rows whose adapter asks for it.
void scale_shrunk(const LinearArgs& args) {
    each_range(args.threads, args.rows, args.adapters->most_rank * 8, [&](long from, long to, int) {
        for (long row = from; row < to; ++row) {
            const Adapter* adapter = adapter_of(args, row);
            if (!adapter || !adapter->columns) continue;
            float* values = args.shrunk + row * args.adapters->most_rank;
            const float* scalings = args.scalings + row * args.scaling_stride;
            for (long k = 0; k < adapter->rank; ++k) values[k] *= scalings[adapter->columns[k]];
        }
    });
}

}  // namespace
