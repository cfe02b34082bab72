// Matmuls of many rows with weights in groups: a part of a tile is unpacked, then multiplied with all rows.
#pragma once

#include "quantized_madd.h"

#define UNPACKS_GROUPS

namespace {

// Inputs of groups that are unpacked together for many rows: their weights and inputs stay in the first-level cache.
constexpr long CHUNK_INPUTS = 128;

INLINE bool has_chunks(long group) { return group > 0 && CHUNK_INPUTS % group == 0; }

// Scales and minimums of a chunk's groups.
struct ChunkParameters {
    f32v scales[CHUNK_INPUTS / 16][MANY_WIDTH], minimums[CHUNK_INPUTS / 16][MANY_WIDTH];

    INLINE void unpack(ChunkParameters& to, const u8* from, long group, bool has_minimums, int vector) {
        for (int i = 0; i < MANY_WIDTH; ++i) {
            to.scales[group][i] = group_scales(from, vector + i);
            if (has_minimums) to.minimums[group][i] = group_minimums(from, vector + i);
        }
    }
};

// Some groups of a tile for 16-bit inputs: the pairs (0, 2), then (1, 3) of each four inputs, relative to zero.
template <int BITS, bool IS_CODED>
struct WideChunk {
    typedef Quad Input;
    typedef GroupSum InputGroup;
    struct Part : ChunkParameters {
        i16v weights[CHUNK_INPUTS / 4][2][MANY_WIDTH];
    } parts[VECTORS / MANY_WIDTH];

    WideChunk(const u8* from, WeightForm form, long groups) {
        const std::int16_t zero = BITS == 8 ? 128 : IS_CODED || form.minimums ? 0 : MIDDLE_OF_4_BITS;
        for (long group = 0, quad = 0; group < groups; ++group, from += form.group_bytes()) {
            for (int part = 0; part < VECTORS / MANY_WIDTH; ++part)
                ChunkParameters::unpack(parts[part], from, group, form.minimums, part * MANY_WIDTH);
            for (const u8* place = from + form.parameter_bytes(); place < from + form.group_bytes(); place += 4 * TILE)
                for (int half = 0; half < 8 / BITS; ++half, ++quad)
                    for (int vector = 0; vector < VECTORS; ++vector) {
                        u8v bytes = load_bytes(place + vector * LANES * 4);
                        if (BITS == 4) bytes = nibbles(bytes, half);
                        if (IS_CODED) bytes = decode<0>(bytes);
                        i16v even, odd;
                        if (IS_CODED) {
                            odd = bit_cast<i16v>(bytes) >> 8;
                            even = (bit_cast<i16v>(bytes) << 8) >> 8;
                        } else {
                            odd = bit_cast<i16v>(bit_cast<pairs16>(bytes) >> 8) - zero;
                            even = (bit_cast<i16v>(bytes) & static_cast<std::int16_t>(255)) - zero;
                        }
                        parts[vector / MANY_WIDTH].weights[quad][0][vector % MANY_WIDTH] = even;
                        parts[vector / MANY_WIDTH].weights[quad][1][vector % MANY_WIDTH] = odd;
                    }
        }
    }

    // The sums of a group of a part.
    template <int ROWS>
    INLINE void multiply(const Part& part, const Quad* x, const GroupSum*, long first, long quads,
                         i32v (&dots)[ROWS][MANY_WIDTH]) {
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < MANY_WIDTH; ++i) dots[row][i] = i32v{};
#pragma GCC unroll 1
        for (long quad = first; quad < first + quads; ++quad, x += ROWS)
#pragma GCC unroll 2
            for (int step = 0; step < 2; ++step) {
                read_in_turn();
                i16v w[MANY_WIDTH];
                for (int i = 0; i < MANY_WIDTH; ++i) {
                    w[i] = part.weights[quad][step][i];
                    add_at_once(w[i]);  // otherwise every instruction loads them
                }
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                    for (int i = 0; i < MANY_WIDTH; ++i) {
                        dots[row][i] += multiply_pairs(w[i], in_all_lanes(step ? x[row].odd : x[row].even));
                        add_at_once(dots[row][i]);
                    }
            }
    }
    INLINE f32v scale(f32v scale, const GroupSum&) { return scale; }
};

// The same for 8-bit inputs: four inputs at a time, as they are packed.
struct NarrowChunk {
    typedef Four Input;
    typedef GroupScale InputGroup;
    struct Part : ChunkParameters {
        u8v weights[CHUNK_INPUTS / 4][MANY_WIDTH];
        std::int32_t zero;
    } parts[VECTORS / MANY_WIDTH];

    NarrowChunk(const u8* from, WeightForm form, long groups) {
        for (auto& part : parts) part.zero = form.minimums ? 0 : MIDDLE_OF_4_BITS;
        for (long group = 0, quad = 0; group < groups; ++group, from += form.group_bytes()) {
            for (int part = 0; part < VECTORS / MANY_WIDTH; ++part)
                ChunkParameters::unpack(parts[part], from, group, form.minimums, part * MANY_WIDTH);
            for (const u8* place = from + form.parameter_bytes(); place < from + form.group_bytes(); place += 4 * TILE)
                for (int half = 0; half < 2; ++half, ++quad)
                    for (int vector = 0; vector < VECTORS; ++vector)
                        parts[vector / MANY_WIDTH].weights[quad][vector % MANY_WIDTH] =
                            nibbles(load_bytes(place + vector * LANES * 4), half);
        }
    }

    template <int ROWS>
    INLINE void multiply(const Part& part, const Four* x, const GroupScale* groups, long first, long quads,
                         i32v (&dots)[ROWS][MANY_WIDTH]) {
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < MANY_WIDTH; ++i) dots[row][i] = -part.zero * groups[row].integer - i32v{};
        for (long start = first; start < first + quads; start += 2 * OCTETS_PER_SUM) {
            i16v small[ROWS][MANY_WIDTH] = {};
            const long end = smaller(start + 2 * OCTETS_PER_SUM, first + quads);
#pragma GCC unroll 1
            for (long quad = start; quad < end; quad += 2)
#pragma GCC unroll 2
                for (int step = 0; step < 2; ++step, x += ROWS) {
                    read_in_turn();
                    u8v w[MANY_WIDTH];
                    for (int i = 0; i < MANY_WIDTH; ++i) w[i] = part.weights[quad + step][i];
#pragma GCC unroll 8
                    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                        for (int i = 0; i < MANY_WIDTH; ++i) {
                            small[row][i] += multiply_bytes(w[i], in_all_lanes(x[row]));
                            add_at_once(small[row][i]);
                        }
                }
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                for (int i = 0; i < MANY_WIDTH; ++i) dots[row][i] += multiply_pairs(small[row][i], in_all_lanes(0x10001));
        }
    }
    INLINE f32v scale(f32v scale, const GroupScale& inputs) { return scale * inputs.scale; }
};

// Adds the matmul of some rows and a chunk to sums in memory.
template <class Chunk, int ROWS>
__attribute__((noinline)) void add_chunk(const typename Chunk::Input* inputs, const typename Chunk::InputGroup* input_groups,
                                         const Chunk& chunk, WeightForm form, long groups, float (*sums)[TILE]) {
    const long quads = form.group / 4;
    for (int number = 0; number < VECTORS / MANY_WIDTH; ++number) {
        const auto& part = chunk.parts[number];
        for (long group = 0; group < groups; ++group) {
            i32v dots[ROWS][MANY_WIDTH];
            const auto* of_rows = input_groups + group * ROWS;
            Chunk::template multiply<ROWS>(part, inputs + group * quads * ROWS, of_rows, group * quads, quads, dots);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                for (int i = 0; i < MANY_WIDTH; ++i) {
                    float* place = sums[row] + (number * MANY_WIDTH + i) * LANES;
                    f32v scale = Chunk::scale(part.scales[group][i], of_rows[row]);
                    f32v total = load(place) + __builtin_convertvector(dots[row][i], f32v) * scale;
                    if (form.minimums) total += part.minimums[group][i] * of_rows[row].sum;
                    store(place, total);
                }
        }
    }
}

// A tile with blocks `first` to `last` of `count` rows, with sums in memory. tile: its groups.
template <class Chunk>
INLINE void multiply_chunks(const typename Chunk::Input* inputs, const typename Chunk::InputGroup* input_groups, const u8* tile,
                            long padded, WeightForm form, long count, long first, long last, float (*sums)[TILE]) {
    const long all = padded / form.group, first_row = block_start(count, first, MANY_BLOCK), bytes = form.group_bytes();
    __builtin_memset(sums, 0, static_cast<std::size_t>(block_start(count, last, MANY_BLOCK) - first_row) * sizeof *sums);
    for (long group = 0; group < all; group += CHUNK_INPUTS / form.group, tile += CHUNK_INPUTS / form.group * bytes) {
        const long groups = smaller(CHUNK_INPUTS / form.group, all - group);
        for (long line = 0; line < groups * bytes; line += 64) __builtin_prefetch(tile + groups * bytes + line);
        const Chunk chunk(tile, form, groups);
        each_block(count, first, last, [&](auto of_block, long row) {
            constexpr int ROWS = decltype(of_block)::value;
            add_chunk<Chunk, ROWS>(inputs + row * (padded / 4) + group * (form.group / 4) * ROWS,
                                   input_groups + row * all + group * ROWS, chunk, form, groups, sums + (row - first_row));
        });
    }
}

}  // namespace
