// What adapters (https://arxiv.org/abs/2106.09685) change in products: every row of inputs may have one of its own.
//
// First all rows are multiplied with the few outputs of their adapters' first factors, `shrink`. The second factors are
// added in the loop over tiles, where a tile's sums are in registers, `adapt_block`. Each row is summed in the same order
// whatever rows are beside it.
#pragma once

#include "formats.h"

namespace {

// Rows that share a loaded weight of a first factor, and sums of each, so that no addition waits for the one before.
constexpr int SHRUNK_ROWS = 4, SHRUNK_SUMS = 4;

INLINE const Adapter* adapter_of(const LinearArgs& args, long row) {
    long slot = args.row_slots[row * args.slot_stride];
    return slot < 0 ? nullptr : args.adapters->slots[slot];
}

// How many of the rows from `row` on, below `end`, have the same adapter.
INLINE long rows_alike(const LinearArgs& args, const Adapter* adapter, long row, long end) {
    long count = 1;
    while (row + count < end && adapter_of(args, row + count) == adapter) ++count;
    return count;
}

template <class Format, int ROWS>
INLINE void shrink_rows(const LinearArgs& args, const Adapter& adapter, long first, long panel) {
    typedef typename Format::Element Element;
    const auto* x = static_cast<const Element*>(args.x) + first * args.x_stride;
    const auto* weights = static_cast<const Element*>(adapter.down) + panel * PANEL * args.in;
    long units = args.in / Format::PAIR;
    f32v sums[ROWS][PANEL_VECTORS][SHRUNK_SUMS] = {};
    auto add = [&](long unit, int sum) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int vector = 0; vector < PANEL_VECTORS; ++vector)
#pragma GCC unroll 2
            for (int step = 0; step < Format::STEPS; ++step) {
                auto w = Format::weights(weights + (unit * PANEL + vector * LANES) * Format::PAIR, step);
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; ++row)
                    Format::multiply(sums[row][vector][sum], Format::input(x + row * args.x_stride + unit * Format::PAIR), w, step);
            }
    };
    long unit = 0;
    for (; unit + SHRUNK_SUMS <= units; unit += SHRUNK_SUMS)
#pragma GCC unroll 4
        for (int sum = 0; sum < SHRUNK_SUMS; ++sum) add(unit + sum, sum);
    for (; unit < units; ++unit) add(unit, 0);
    float* to = args.shrunk + first * args.adapters->most_rank + panel * PANEL;
    for (int row = 0; row < ROWS; ++row)
        for (int vector = 0; vector < PANEL_VECTORS; ++vector) {
            const f32v* own = sums[row][vector];
            store(to + row * args.adapters->most_rank + vector * LANES, (own[0] + own[1]) + (own[2] + own[3]));
        }
}

template <class Format>
void shrink_all(const LinearArgs& args) {
    long blocks = (args.rows + SHRUNK_ROWS - 1) / SHRUNK_ROWS, panels = args.adapters->most_rank / PANEL;
    each_range(args.threads, panels * blocks, 2 * args.in * PANEL, [&](long from, long to, int) {
        for (long i = from; i < to; ++i) {
            long panel = i / blocks, row = i % blocks * SHRUNK_ROWS, end = smaller(args.rows, row + SHRUNK_ROWS);
            while (row < end) {
                const Adapter* adapter = adapter_of(args, row);
                long count = rows_alike(args, adapter, row, end);
                if (adapter && panel * PANEL < adapter->rank)
                    with_rows<SHRUNK_ROWS>(count, [&](auto rows) { shrink_rows<Format, decltype(rows)::value>(args, *adapter, row, panel); });
                row += count;
            }
        }
    });
}

// The products of all rows with the first factors of their adapters.
void shrink(const LinearArgs& args) { args.dtype == FLOAT32 ? shrink_all<Float32>(args) : shrink_all<BFloat16>(args); }

// Adds the products of rows with the second factor of their adapter to their sums with a tile.
template <class Element, int ROWS>
INLINE void adapt_rows(const LinearArgs& args, const Adapter& adapter, long row, long tile, f32v (*sums)[VECTORS]) {
    const float* shrunk = args.shrunk + row * args.adapters->most_rank;
    for (int half = 0; half < TILE / PANEL; ++half) {
        long panel = tile * (TILE / PANEL) + half;
        // Copies, so that they are in registers whatever the pointers here point to.
        f32v own[ROWS][PANEL_VECTORS];
        for (int i = 0; i < ROWS; ++i)
            for (int vector = 0; vector < PANEL_VECTORS; ++vector) own[i][vector] = sums[i][half * PANEL_VECTORS + vector];
        for (long part = adapter.starts[panel]; part < adapter.starts[panel + 1]; ++part) {
            const AdapterPanel& factor = adapter.panels[part];
            const auto* weights = static_cast<const Element*>(factor.weights);
            const float* inputs = shrunk + factor.first;
            for (long k = 0; k < factor.count; ++k)
#pragma GCC unroll 4
                for (int vector = 0; vector < PANEL_VECTORS; ++vector) {
                    f32v w = load(weights + k * PANEL + vector * LANES);
#pragma GCC unroll 12
                    for (int i = 0; i < ROWS; ++i) own[i][vector] += inputs[i * args.adapters->most_rank + k] * w;
                }
        }
        for (int vector = 0; vector < PANEL_VECTORS; ++vector) {
            long place = panel * PANEL + vector * LANES;
            for (int i = 0; i < ROWS; ++i) {
                f32v sum = own[i][vector];
                // Together, so that every compiler rounds them alike in all that this is inlined into.
                if (adapter.factor) sum = sum * load(adapter.factor + place) + load(adapter.shift + place);
                sums[i][half * PANEL_VECTORS + vector] = sum;
            }
        }
    }
}

// What adapters change in the sums of a block of rows with a tile.
template <class Element, int ROWS>
void adapt_block(const LinearArgs& args, long row, long tile, f32v (&sums)[ROWS][VECTORS]) {
    for (int first = 0; first < ROWS;) {
        const Adapter* adapter = adapter_of(args, row + first);
        int count = static_cast<int>(rows_alike(args, adapter, row + first, row + ROWS));
        if (adapter && count == ROWS) {
            adapt_rows<Element, ROWS>(args, *adapter, row, tile, sums);
        } else if (adapter) {
            count = static_cast<int>(smaller(count, SHRUNK_ROWS));
            with_rows<SHRUNK_ROWS>(count, [&](auto rows) {
                adapt_rows<Element, decltype(rows)::value>(args, *adapter, row + first, tile, sums + first);
            });
        }
        first += count;
    }
}

// Asks memory for what `adapt_block` will read for a tile, and for where the next tile's is. Few rows wait for it: second
// factors lie in many short pieces.
INLINE void prefetch_adapters(const LinearArgs& args, long tile) {
    constexpr long LINE = 64, PANELS = TILE / PANEL;
    const Adapter* before = nullptr;
    for (long row = 0; row < args.rows; ++row) {
        const Adapter* adapter = adapter_of(args, row);
        if (!adapter || adapter == before) continue;
        before = adapter;
        long first = adapter->starts[tile * PANELS], last = adapter->starts[(tile + 1) * PANELS];
        for (long part = first; part < last; ++part) {
            const AdapterPanel& factor = adapter->panels[part];
            const auto* weights = static_cast<const char*>(factor.weights);
            long bytes = factor.count * PANEL * (args.dtype == FLOAT32 ? 4 : 2);
            for (long byte = 0; byte < bytes; byte += LINE) __builtin_prefetch(weights + byte);
        }
        __builtin_prefetch(adapter->starts + (tile + 2) * PANELS);
        __builtin_prefetch(adapter->panels + last + PANELS);
    }
}

}  // namespace
