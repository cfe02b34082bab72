// Rows of queries and results in memory.
#pragma once

#include "attention_plan.h"

namespace {

// One head of a token after RoPE: `row` itself without RoPE, else `buffer`.
template <class Element>
INLINE const Element* rotated(const AttentionArgs& args, const Element* row, long token, Element* buffer) {
    if (!args.cos) return row;
    long half = args.rope_size / 2, place = (args.positions ? args.positions[token] : token) * half;
    for (long i = 0; i < half; i += LANES) {
        long count = smaller(LANES, half - i);
        f32v cos = load_some(args.cos + place + i, count), sin = load_some(args.sin + place + i, count);
        f32v first = load_some(row + i, count), second = load_some(row + half + i, count);
        store_some(buffer + i, first * cos - second * sin, count);
        store_some(buffer + half + i, second * cos + first * sin, count);
    }
    for (long i = args.rope_size; i < args.head_size; ++i) buffer[i] = row[i];
    return buffer;
}

// The maximum of a row that saw nothing.
constexpr float LOWEST = -3.0e38f;

// Adds a chunk's result to a row's: totals, their sum of weights, and the maximum that both are relative to. Not inlined, so
// that the same operations give the same bits everywhere.
__attribute__((noinline)) inline void add_chunk(const Geometry& at, float* totals, float& highest, float& weight,
                                                const float* added, float added_highest, float added_weight) {
    float most = added_highest > highest ? added_highest : highest;
    float share = power_of_two(highest - most), added_share = power_of_two(added_highest - most);
    weight = weight * share + added_weight * added_share;
    for (long i = 0; i < at.columns; i += LANES) store(totals + i, load(totals + i) * share + load(added + i) * added_share);
    highest = most;
}

// Writes one row's result, `scale` times the totals.
template <class Element>
INLINE void write_row(const AttentionArgs& args, const Geometry& at, const Item& item, long row, const float* totals,
                      float scale) {
    long kv_head = item.kv_head + row / item.rows;
    row = item.first_row + row % item.rows;
    long token = args.query_starts[item.sequence] + row / at.group, head = kv_head * at.group + row % at.group;
    Element* output = static_cast<Element*>(args.output) + (token * args.heads + head) * args.head_size;
    for (long i = 0; i < args.head_size; i += LANES)
        store_some(output + i, load(totals + i) * scale, smaller(LANES, args.head_size - i));
}

// Results of an item's rows.
struct Results {
    // Of a chunk: [rows][columns], [rows][LANES], [rows]. Weights are relative to `highest`.
    float *totals, *sums, *highest;
    // Of all chunks before: [rows][columns], [rows], [rows].
    float *all_totals, *all_weights, *all_highest;

    static long floats(const Geometry& at, long rows) { return rows * (2 * at.columns + LANES + 3); }

    Results(const Geometry& at, long rows, float* memory) {
        totals = memory;
        sums = totals + rows * at.columns;
        highest = sums + rows * LANES;
        all_totals = highest + rows;
        all_weights = all_totals + rows * at.columns;
        all_highest = all_weights + rows;
    }
};

// Takes the results of an item's chunks, in order. partial: where they go; null: their sum is the output.
template <class Element>
struct Chunks {
    const AttentionArgs& args;
    const Geometry& at;
    const Item& item;
    const Results& results;
    float* partial;
    const long rows = item.all_rows();
    const bool adds = !partial && item.chunks() > 1;

    void begin() const {
        if (adds) clear(results.all_totals, results.all_weights, 1, results.all_highest);
    }

    void begin_chunk() const { clear(results.totals, results.sums, LANES, results.highest); }

    void end_chunk() {
        if (partial) __builtin_memcpy(partial, results.totals, static_cast<std::size_t>(rows * at.columns) * sizeof(float));
        for (long row = 0; row < rows; ++row) {
            float weight = sum(load(results.sums + row * LANES));
            float* totals = results.totals + row * at.columns;
            if (partial) {
                partial[rows * at.columns + row] = results.highest[row];
                partial[rows * (at.columns + 1) + row] = weight;
            } else if (adds) {
                add_chunk(at, results.all_totals + row * at.columns, results.all_highest[row], results.all_weights[row], totals,
                          results.highest[row], weight);
            } else {
                write_row<Element>(args, at, item, row, totals, 1.0f / weight);
            }
        }
        if (partial) partial += partial_floats(at, rows);
    }

    void end() const {
        for (long row = 0; adds && row < rows; ++row)
            write_row<Element>(args, at, item, row, results.all_totals + row * at.columns, 1.0f / results.all_weights[row]);
    }

private:
    void clear(float* totals, float* weights, long weights_of_row, float* highest) const {
        __builtin_memset(totals, 0, static_cast<std::size_t>(rows * at.columns) * sizeof(float));
        __builtin_memset(weights, 0, static_cast<std::size_t>(rows * weights_of_row) * sizeof(float));
        for (long row = 0; row < rows; ++row) highest[row] = LOWEST;
    }
};

}  // namespace
