// What adapters (https://arxiv.org/abs/2106.09685) change in products: every row of inputs may have one of its own.
//
// Rows are taken by adapter, so that what is read of one serves all of its rows. While inputs are prepared, rows are
// multiplied with the few outputs of their adapter's first factor, a part of the inputs at a time, `shrink_item`; the parts
// are added up, and scaled for X-LoRA (https://arxiv.org/abs/2402.07148), `finish_shrinking`. The second factor is added to
// the sums of a tile, `adapt_tile`. Each row is summed in the same order whatever rows are beside it.
#pragma once

#include "formats.h"

namespace {

// Rows that share a loaded weight, and sums of each, so that no addition waits for the one before.
constexpr int ADAPTED_ROWS = 4, SHRUNK_SUMS = 4;

// Parts that inputs are shrunk in: threads share the work of a single row as well.
constexpr long SPLITS = 4;

// Rows of an item of that work.
constexpr long SHRUNK_ROWS = 32;

// Bytes of what `sort_rows` finds.
INLINE long sorted_bytes(long rows) {
    return cache_lines(rows * static_cast<long>(sizeof(SlotRows))) + cache_lines(rows * static_cast<long>(sizeof(std::int32_t)));
}

// Rows by the slots of their adapters: `slots` has one for each, `stride` from row to row. memory: `sorted_bytes`.
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

// Elements of `LinearArgs::shrunk` from one row to the next.
INLINE long shrunk_stride(const LinearArgs& args) { return SPLITS * args.adapters->most_rank; }

// Items of a group of rows: parts of the inputs, of panels of the first factor, of some rows.
INLINE long num_items(const Adapter* adapter, const SlotRows& group) {
    return adapter ? (group.last - group.first + SHRUNK_ROWS - 1) / SHRUNK_ROWS * (adapter->rank / PANEL) * SPLITS : 0;
}

// All that `shrink_item` is to be called with.
long num_items(const LinearArgs& args) {
    long items = 0;
    for (long i = 0; args.adapters && i < args.adapted->count; ++i)
        items += num_items(adapter_of(args.adapters, args.adapted->groups[i]), args.adapted->groups[i]);
    return items;
}

template <class Format, int ROWS>
INLINE void shrink_rows(const LinearArgs& args, const Adapter& adapter, long place, long panel, long split) {
    typedef typename Format::Element Element;
    const std::int32_t* rows = args.adapted->order + place;
    const Element* x[ROWS];
    for (int row = 0; row < ROWS; ++row) x[row] = static_cast<const Element*>(args.x) + rows[row] * args.x_stride;
    const auto* weights = static_cast<const Element*>(adapter.down) + panel * PANEL * args.in;
    long units = args.in / Format::PAIR, unit = units * split / SPLITS, end = units * (split + 1) / SPLITS;
    f32v sums[ROWS][PANEL_VECTORS][SHRUNK_SUMS] = {};
    auto add = [&](long unit, int sum) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int vector = 0; vector < PANEL_VECTORS; ++vector)
#pragma GCC unroll 2
            for (int step = 0; step < Format::STEPS; ++step) {
                auto w = Format::weights(weights + (unit * PANEL + vector * LANES) * Format::PAIR, step);
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; ++row)
                    Format::multiply(sums[row][vector][sum], Format::input(x[row] + unit * Format::PAIR), w, step);
            }
    };
    for (; unit + SHRUNK_SUMS <= end; unit += SHRUNK_SUMS)
#pragma GCC unroll 4
        for (int sum = 0; sum < SHRUNK_SUMS; ++sum) add(unit + sum, sum);
    for (; unit < end; ++unit) add(unit, 0);
    float* to = args.shrunk + place * shrunk_stride(args) + split * args.adapters->most_rank + panel * PANEL;
    for (int row = 0; row < ROWS; ++row)
        for (int vector = 0; vector < PANEL_VECTORS; ++vector) {
            const f32v* own = sums[row][vector];
            store(to + row * shrunk_stride(args) + vector * LANES, (own[0] + own[1]) + (own[2] + own[3]));
        }
}

template <class Format>
void shrink_item_of(const LinearArgs& args, const Adapter& adapter, const SlotRows& group, long item) {
    long panels = adapter.rank / PANEL, panel = item / SPLITS % panels;
    long place = group.first + item / SPLITS / panels * SHRUNK_ROWS, last = smaller(place + SHRUNK_ROWS, group.last);
    for (; place < last; place += ADAPTED_ROWS)
        with_rows<ADAPTED_ROWS>(smaller(ADAPTED_ROWS, last - place), [&](auto rows) {
            shrink_rows<Format, decltype(rows)::value>(args, adapter, place, panel, item % SPLITS);
        });
}

// An item of the products of rows with the first factors of their adapters.
void shrink_item(const LinearArgs& args, long item) {
    const SlotRows* group = args.adapted->groups;
    for (long items; item >= (items = num_items(adapter_of(args.adapters, *group), *group)); item -= items) ++group;
    const Adapter& adapter = *adapter_of(args.adapters, *group);
    if (args.dtype == FLOAT32)
        shrink_item_of<Float32>(args, adapter, *group, item);
    else
        shrink_item_of<BFloat16>(args, adapter, *group, item);
}

// Adds the parts up, and scales what is to be scaled.
void finish_shrinking(const LinearArgs& args) {
    long most_rank = args.adapters->most_rank;
    for (long i = 0; i < args.adapted->count; ++i) {
        const SlotRows& group = args.adapted->groups[i];
        const Adapter* adapter = adapter_of(args.adapters, group);
        if (!adapter || !adapter->rank) continue;
        each_range(args.threads, group.last - group.first, most_rank * 2 * SPLITS, [&](long from, long to, int) {
            for (long place = group.first + from; place < group.first + to; ++place) {
                float* values = args.shrunk + place * shrunk_stride(args);
                for (long k = 0; k < adapter->rank; k += LANES) {
                    f32v parts[SPLITS];
                    for (long split = 0; split < SPLITS; ++split) parts[split] = load(values + split * most_rank + k);
                    store(values + k, (parts[0] + parts[1]) + (parts[2] + parts[3]));
                }
                if (!adapter->columns) continue;
                const float* scalings = args.scalings + args.adapted->order[place] * args.scaling_stride;
                for (long k = 0; k < adapter->rank; ++k) values[k] *= scalings[adapter->columns[k]];
            }
        });
    }
}

// Which of a part's panels one of the product's is; below 0: it does not reach there.
INLINE long place_in(const AdapterPart& part, long panel) {
    long place = panel - part.panel;
    if (place < 0 || (place & (part.step - 1))) return -1;
    place >>= part.step - 1;
    return place < part.panels ? place : -1;
}

// What two outputs of a first factor are multiplied with, for a vector of a panel.
INLINE void load_two(const float* weights, int vector, f32v& one, f32v& other) {
    one = load(weights + vector * LANES);
    other = load(weights + PANEL + vector * LANES);
}
INLINE void load_two(const bf16* weights, int vector, f32v& one, f32v& other) {
    u32v pairs;
    __builtin_memcpy(&pairs, weights + 2 * vector * LANES, sizeof pairs);
    one = bit_cast<f32v>(pairs << 16);
    other = bit_cast<f32v>(pairs & 0xffff0000u);
}

// Adds the products of rows, `place` and those behind it in order, with the second factor of their adapter to their sums,
// of which the first are those of row `first`.
template <class Element, int ROWS>
INLINE void adapt_rows(const LinearArgs& args, const Adapter& adapter, long place, long tile, long first, float (*sums)[TILE]) {
    long stride = shrunk_stride(args);
    const float* shrunk = args.shrunk + place * stride;
    const std::int32_t* rows = args.adapted->order + place;
    for (int half = 0; half < TILE / PANEL; ++half)
        for (int vector = 0; vector < PANEL_VECTORS; ++vector) {
            long panel = tile * (TILE / PANEL) + half, column = half * PANEL + vector * LANES;
            f32v even[ROWS] = {}, odd[ROWS] = {};
            for (long i = 0; i < adapter.num_parts; ++i) {
                const AdapterPart& part = adapter.parts[i];
                long number = place_in(part, panel);
                if (number < 0) continue;
                const auto* weights = static_cast<const Element*>(part.weights) + number * part.count * PANEL;
                const float* inputs = shrunk + part.first;
                for (long k = 0; k < part.count; k += 2) {
                    f32v one, other;
                    load_two(weights + k * PANEL, vector, one, other);
#pragma GCC unroll 4
                    for (int row = 0; row < ROWS; ++row) {
                        even[row] += inputs[row * stride + k] * one;
                        odd[row] += inputs[row * stride + k + 1] * other;
                    }
                }
            }
            for (int row = 0; row < ROWS; ++row) {
                float* to = sums[rows[row] - first] + column;
                f32v sum = load(to) + (even[row] + odd[row]);
                long output = panel * PANEL + vector * LANES;
                if (adapter.factor) sum = sum * load(adapter.factor + output) + load(adapter.shift + output);
                store(to, sum);
            }
        }
}

// The first of a group's places whose row is not before `row`.
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

// What adapters change in the sums of rows, `first` to `last`, with a tile.
template <class Element>
void adapt_tile(const LinearArgs& args, long first, long last, long tile, float (*sums)[TILE]) {
    for (long i = 0; i < args.adapted->count; ++i) {
        const SlotRows& group = args.adapted->groups[i];
        const Adapter* adapter = adapter_of(args.adapters, group);
        if (!adapter) continue;
        long end = place_of(args, group, last);
        for (long place = place_of(args, group, first); place < end; place += ADAPTED_ROWS)
            with_rows<ADAPTED_ROWS>(smaller(ADAPTED_ROWS, end - place), [&](auto rows) {
                adapt_rows<Element, decltype(rows)::value>(args, *adapter, place, tile, first, sums);
            });
    }
}

}  // namespace
