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

}  // namespace
