// Adapters (https://arxiv.org/abs/2106.09685) in matmuls. Each row of inputs may have its own.
//
// Rows are grouped by adapter, so that each adapter is read once for all of its rows. While inputs are prepared, rows are
// multiplied by their adapter's `down` matrix, one split of the inputs at a time (`shrink_items`). `finish_shrinking` adds the
// splits, and scales them for X-LoRA (https://arxiv.org/abs/2402.07148). `adapt_tile` multiplies by `up` and adds to a tile's
// sums. The order of summation does not depend on other rows.
#pragma once

#include "formats.h"

namespace {

// Rows that share a loaded weight of `down` and `up`, and independent sums of each, which hide the latency of additions.
constexpr int SHRUNK_ROWS = 4, SHRUNK_SUMS = 4, ADAPTED_ROWS = REGISTERS == 32 ? 8 : 4;

// Units of inputs whose weights fit in the first-level cache, if registers cannot hold all sums.
constexpr long SHRUNK_UNITS = 64 * SHRUNK_SUMS;

// Up to this many rows, reading a matrix takes longer than multiplying, so it is prefetched.
constexpr int FEW_ADAPTED = 3;

// Prefetch distance: what a core reads during one memory access.
constexpr long PREFETCH_BYTES = 3072;

// Splits of the inputs, so that threads share the work of a single row.
constexpr long SPLITS = 4;

// Rows per work item.
constexpr long SHRINKING_ROWS = 32;

// Bytes of `sort_rows`' result.
INLINE long sorted_bytes(long rows) {
    return cache_lines(rows * static_cast<long>(sizeof(SlotRows))) + cache_lines(rows * static_cast<long>(sizeof(std::int32_t)));
}

// Groups rows by adapter slot. slots: one per row, `stride` apart. memory: `sorted_bytes`.
AdaptedRows sort_rows(const std::int32_t* slots, long stride, long rows, char* memory) {
    auto* groups = reinterpret_cast<SlotRows*>(memory);
    auto* order = reinterpret_cast<std::int32_t*>(memory + cache_lines(rows * static_cast<long>(sizeof(SlotRows))));
    long count = 0, group = 0;
    auto find = [&](long slot) {
        if (group < count && groups[group].slot == slot) return true;
        for (group = 0; group < count; ++group)
            if (groups[group].slot == slot) return true;
        return false;
    };
    for (long row = 0; row < rows; ++row) {
        long slot = slots[row * stride];
        if (slot < 0) continue;
        if (!find(slot)) groups[count++] = {slot, 0, 0};
        ++groups[group].last;
    }
    for (long i = 0, first = 0; i < count; ++i) {
        long size = groups[i].last;
        groups[i].first = groups[i].last = first;
        first += size;
    }
    for (long row = 0; row < rows; ++row) {
        long slot = slots[row * stride];
        if (slot >= 0 && find(slot)) order[groups[group].last++] = static_cast<std::int32_t>(row);
    }
    return {order, groups, count};
}

INLINE const Adapter* adapter_of(const Adapters* adapters, const SlotRows& group) { return adapters->slots[group.slot]; }

// Elements between rows of `LinearArgs::shrunk`.
INLINE long shrunk_stride(const LinearArgs& args) { return SPLITS * args.adapters->most_rank; }

// Work items of a group: splits of the inputs, panels of `down`, blocks of rows.
INLINE long num_items(const Adapter* adapter, const SlotRows& group) {
    return adapter ? (group.last - group.first + SHRINKING_ROWS - 1) / SHRINKING_ROWS * (adapter->rank / PANEL) * SPLITS : 0;
}

// Total work items of `shrink_item`.
long num_items(const LinearArgs& args) {
    long items = 0;
    for (long i = 0; args.adapters && i < args.adapted->count; ++i)
        items += num_items(adapter_of(args.adapters, args.adapted->groups[i]), args.adapted->groups[i]);
    return items;
}

// Some rows, one panel of `down`, one split of the inputs.
struct Shrinking {
    const Adapter* adapter;
    long place, last, panel, split;  // rows in sorted order

    Shrinking(const LinearArgs& args, long item) {
        const SlotRows* group = args.adapted->groups;
        for (long items; item >= (items = num_items(adapter_of(args.adapters, *group), *group)); item -= items) ++group;
        adapter = adapter_of(args.adapters, *group);
        long panels = adapter->rank / PANEL;
        panel = item / SPLITS % panels;
        split = item % SPLITS;
        place = group->first + item / SPLITS / panels * SHRINKING_ROWS;
        last = smaller(place + SHRINKING_ROWS, group->last);
    }

    // First unit of the inputs, and the end.
    long unit(long units) const { return units * split / SPLITS; }
    long end(long units) const { return units * (split + 1) / SPLITS; }

    template <class Format>
    const typename Format::Element* weights(long in) const {
        return static_cast<const typename Format::Element*>(adapter->down) + panel * PANEL * in;
    }
};

template <int ROWS>
INLINE void copy_sums(const f32v (&from)[ROWS][PANEL_VECTORS], f32v (&to)[ROWS][PANEL_VECTORS]) {
    for (int row = 0; row < ROWS; ++row)
        for (int vector = 0; vector < PANEL_VECTORS; ++vector) to[row][vector] = from[row][vector];
}

// next: start of the next weights.
template <class Format, int ROWS>
INLINE void shrink_rows(const LinearArgs& args, const Shrinking& item, long place, const typename Format::Element* next) {
    typedef typename Format::Element Element;
    constexpr long UNIT = PANEL * Format::PAIR, AHEAD = PREFETCH_BYTES / 64;
    const std::int32_t* rows = args.adapted->order + place;
    const Element* x[ROWS];
    for (int row = 0; row < ROWS; ++row) x[row] = static_cast<const Element*>(args.x) + rows[row] * args.x_stride;
    const Element* weights = item.weights<Format>(args.in);
    long units = args.in / Format::PAIR, unit = item.unit(units), end = item.end(units);
    auto add = [&](long unit, auto& sums, int sum) __attribute__((always_inline)) {
        long later = unit + AHEAD;
        if (ROWS <= FEW_ADAPTED) __builtin_prefetch(later < end ? weights + later * UNIT : next + (later - end) * UNIT);
#pragma GCC unroll 4
        for (int vector = 0; vector < PANEL_VECTORS; ++vector)
#pragma GCC unroll 2
            for (int step = 0; step < Format::STEPS; ++step) {
                auto w = Format::weights(weights + unit * UNIT + vector * LANES * Format::PAIR, step);
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; ++row)
                    Format::multiply(sums[sum][row][vector], Format::input(x[row] + unit * Format::PAIR), w, step);
            }
    };
    f32v sums[SHRUNK_SUMS][ROWS][PANEL_VECTORS] = {};
    if constexpr (SHRUNK_SUMS * ROWS * PANEL_VECTORS < REGISTERS) {
        for (; unit + SHRUNK_SUMS <= end; unit += SHRUNK_SUMS)
#pragma GCC unroll 4
            for (int sum = 0; sum < SHRUNK_SUMS; ++sum) add(unit + sum, sums, sum);
    } else {
        // One sum after another, over inputs that fit in the first-level cache.
        for (long stop; unit + SHRUNK_SUMS <= end; unit = stop) {
            stop = unit + smaller(SHRUNK_UNITS, (end - unit) / SHRUNK_SUMS * SHRUNK_SUMS);
            for (int sum = 0; sum < SHRUNK_SUMS; ++sum) {
                f32v own[1][ROWS][PANEL_VECTORS];
                copy_sums(sums[sum], own[0]);
                for (long i = unit + sum; i < stop; i += SHRUNK_SUMS) add(i, own, 0);
                copy_sums(own[0], sums[sum]);
            }
        }
    }
    for (; unit < end; ++unit) add(unit, sums, 0);
    float* to = args.shrunk + place * shrunk_stride(args) + item.split * args.adapters->most_rank + item.panel * PANEL;
    for (int row = 0; row < ROWS; ++row)
        for (int vector = 0; vector < PANEL_VECTORS; ++vector) {
            auto own = [&](int sum) __attribute__((always_inline)) { return sums[sum][row][vector]; };
            store(to + row * shrunk_stride(args) + vector * LANES, (own(0) + own(1)) + (own(2) + own(3)));
        }
}

template <class Format>
void shrink_items_of(const LinearArgs& args, long item, long last) {
    for (; item < last; ++item) {
        Shrinking own(args, item), then(args, item + 1 < last ? item + 1 : item);
        const auto* next = then.weights<Format>(args.in) + then.unit(args.in / Format::PAIR) * PANEL * Format::PAIR;
        for (long place = own.place; place < own.last; place += SHRUNK_ROWS)
            with_rows<SHRUNK_ROWS>(smaller(SHRUNK_ROWS, own.last - place), [&](auto rows) {
                shrink_rows<Format, decltype(rows)::value>(args, own, place, next);
            });
    }
}

// Multiplies rows by their adapters' `down` matrices.
void shrink_items(const LinearArgs& args, long first, long last) {
    if (args.dtype == FLOAT32)
        shrink_items_of<Float32>(args, first, last);
    else
        shrink_items_of<BFloat16>(args, first, last);
}

// Adds a row's splits, scales them, and stores them as inputs of `Format`.
template <class Format>
INLINE void finish_row(const LinearArgs& args, const Adapter& adapter, long place) {
    const float* parts = args.shrunk + place * shrunk_stride(args);
    auto* to = reinterpret_cast<typename Format::Inner*>(args.shrunk + place * shrunk_stride(args));
    const float* scalings = adapter.columns ? args.scalings + args.adapted->order[place] * args.scaling_stride : nullptr;
    for (long k = 0; k < adapter.rank; k += LANES) {
        f32v part[SPLITS];
        for (long split = 0; split < SPLITS; ++split) part[split] = load(parts + split * args.adapters->most_rank + k);
        f32v sum = (part[0] + part[1]) + (part[2] + part[3]);
        if (scalings) {
            float factors[LANES];
            for (long lane = 0; lane < LANES; ++lane) factors[lane] = scalings[adapter.columns[k + lane]];
            sum *= load(factors);
        }
        store(to + k, sum);
    }
}

void finish_shrinking(const LinearArgs& args) {
    for (long i = 0; i < args.adapted->count; ++i) {
        const SlotRows& group = args.adapted->groups[i];
        const Adapter* adapter = adapter_of(args.adapters, group);
        if (!adapter || !adapter->rank) continue;
        const long work = args.adapters->most_rank * 2 * SPLITS;
        each_range(args.threads, group.last - group.first, work, [&](long from, long to, int) {
            for (long place = group.first + from; place < group.first + to; ++place)
                args.dtype == FLOAT32 ? finish_row<Float32>(args, *adapter, place) : finish_row<BFloat16>(args, *adapter, place);
        });
    }
}

// Index within a part of one of the linear's panels, below 0 if the part does not cover it.
INLINE long place_in(const AdapterPart& part, long panel) {
    long place = panel - part.panel;
    if (place < 0 || (place & (part.step - 1))) return -1;
    place >>= part.step - 1;
    return place < part.panels ? place : -1;
}

// Prefetches a tile's weights of `up` for a share of the adapters; each is too short for hardware prefetching. Called before
// each block of rows, when memory is idle.
void prefetch_factors_of(const LinearArgs& args, long tile, long share, long shares) {
    const long count = args.adapted->count, row_bytes = PANEL * (args.dtype == FLOAT32 ? 4 : 2);
    for (long i = count * share / shares; i < count * (share + 1) / shares; ++i) {
        const Adapter* adapter = adapter_of(args.adapters, args.adapted->groups[i]);
        for (long j = 0; adapter && j < adapter->num_parts; ++j)
            for (long panel = tile * (TILE / PANEL); panel < (tile + 1) * (TILE / PANEL); ++panel) {
                const AdapterPart& part = adapter->parts[j];
                long number = place_in(part, panel), bytes = part.count * row_bytes;
                const char* weights = static_cast<const char*>(part.weights) + number * bytes;
                for (long line = 0; number >= 0 && line < bytes; line += 64) __builtin_prefetch(weights + line, 0, 2);
            }
    }
}

INLINE void prefetch_factors(const LinearArgs& args, long tile, long share, long shares) {
    if (args.adapters) prefetch_factors_of(args, tile, share, shares);
}

// Adds the `up` matmul of ROWS rows, from `place` on in sorted order, to their sums. `sums` starts with row `first`.
template <class Format, int ROWS>
INLINE void adapt_rows(const LinearArgs& args, const Adapter& adapter, long place, long tile, long first, float (*sums)[TILE]) {
    typedef typename Format::Input Input;
    constexpr long UNIT = PANEL * Format::PAIR;
    long stride = shrunk_stride(args) * static_cast<long>(sizeof(float)) / static_cast<long>(sizeof(Input));
    const Input* shrunk = reinterpret_cast<const Input*>(args.shrunk) + place * stride;
    const std::int32_t* rows = args.adapted->order + place;
    for (int half = 0; half < TILE / PANEL; ++half)
        for (int vector = 0; vector < PANEL_VECTORS; ++vector) {
            long panel = tile * (TILE / PANEL) + half, column = half * PANEL + vector * LANES;
            f32v added[ROWS][2] = {};
            for (long i = 0; i < adapter.num_parts; ++i) {
                const AdapterPart& part = adapter.parts[i];
                long number = place_in(part, panel), units = part.count / Format::PAIR;
                if (number < 0) continue;
                const auto* weights = static_cast<const typename Format::Element*>(part.weights) + number * units * UNIT;
                const Input* inputs = shrunk + part.first / Format::PAIR;
                auto add = [&](long unit, int sum) __attribute__((always_inline)) {
                    const auto* from = weights + unit * UNIT + vector * LANES * Format::PAIR;
#pragma GCC unroll 2
                    for (int step = 0; step < Format::STEPS; ++step) {
                        auto w = Format::weights(from, step);
#pragma GCC unroll 8
                        for (int row = 0; row < ROWS; ++row)
                            Format::multiply(added[row][Format::STEPS == 2 ? step : sum], inputs[row * stride + unit], w, step);
                    }
                };
                long unit = 0;
                for (; unit + 2 <= units; unit += 2) {
                    add(unit, 0);
                    add(unit + 1, 1);
                }
                if (unit < units) add(unit, 0);
            }
            for (int row = 0; row < ROWS; ++row) {
                float* to = sums[rows[row] - first] + column;
                f32v sum = load(to) + (added[row][0] + added[row][1]);
                long output = panel * PANEL + vector * LANES;
                if (adapter.factor) sum = sum * load(adapter.factor + output) + load(adapter.shift + output);
                store(to, sum);
            }
        }
}

// First place of a group with a row of at least `row`.
INLINE long place_of(const LinearArgs& args, const SlotRows& group, long row) {
    long first = group.first, last = group.last;
    while (first < last) {
        long middle = (first + last) / 2;
        if (args.adapted->order[middle] < row)
            first = middle + 1;
        else
            last = middle;
    }
    return first;
}

// Applies adapters to a tile's sums of rows `first` to `last`.
template <class Format>
void adapt_tile(const LinearArgs& args, long first, long last, long tile, float (*sums)[TILE]) {
    for (long i = 0; i < args.adapted->count; ++i) {
        const SlotRows& group = args.adapted->groups[i];
        const Adapter* adapter = adapter_of(args.adapters, group);
        if (!adapter) continue;
        long end = place_of(args, group, last);
        for (long place = place_of(args, group, first); place < end; place += ADAPTED_ROWS)
            with_rows<ADAPTED_ROWS>(smaller(ADAPTED_ROWS, end - place), [&](auto rows) {
                adapt_rows<Format, decltype(rows)::value>(args, *adapter, place, tile, first, sums);
            });
    }
}

}  // namespace
