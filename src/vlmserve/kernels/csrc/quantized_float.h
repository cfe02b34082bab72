// Matmuls with low-bit weights as floats, if no instruction multiplies small integers.
#pragma once

#include "quantized_layout.h"

namespace {

constexpr int WIDE_BLOCK = REGISTERS == 32 ? 4 : 2, NARROW_BLOCK = WIDE_BLOCK;

struct Quad {
    float values[4];
};
typedef Quad Four;

INLINE long num_sums(long) { return 0; }

struct GroupScale {
    float sum;
};

template <class T>
void split_row(const T* x, long in, long padded, Quad* quads, float*, std::int32_t*, long place, long count) {
    for (long i = 0; i < padded; ++i) quads[i / 4 * count + place].values[i % 4] = i < in ? to_float(x[i]) : 0.0f;
}

template <class T>
void round_row(const T* x, long in, long padded, long group, Four* fours, GroupScale* sums, long place, long count) {
    split_row(x, in, padded, fours, nullptr, nullptr, place, count);
    for (long start = 0; start < padded; start += group) {
        float total = 0;
        for (long i = start; i < smaller(start + group, in); ++i) total += to_float(x[i]);
        sums[start / group * count + place].sum = total;
    }
}

// Byte `number` of each lane, or half of one, as a float.
INLINE f32v byte_of(u32v bytes, int number) {
    return __builtin_convertvector(bit_cast<i32v>((bytes >> (8 * number)) & 255u) - 128, f32v);
}
template <bool IS_CODED>
INLINE f32v nibble_of(u32v bytes, int number) {
    i32v values = bit_cast<i32v>((bytes >> (8 * (number % 4) + 4 * (number / 4))) & 15u);
    for (int i = 0; IS_CODED && i < LANES; ++i) values[i] = CODES[values[i]];
    return __builtin_convertvector(values, f32v);
}

template <int ROWS>
INLINE void multiply_int8(const Quad* x, const float*, const std::int32_t*, const u8* tile, long in,
                          f32v (&sums)[ROWS][VECTORS]) {
    const u8* weights = tile + TILE * sizeof(float);
    for (int vector = 0; vector < VECTORS; ++vector) {
        f32v totals[ROWS] = {};
        for (long quad = 0; quad < in / 4; ++quad) {
            u32v bytes = bit_cast<u32v>(load_bytes(weights + (quad * TILE + vector * LANES) * 4));
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                f32v weight = byte_of(bytes, i);
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; ++row) totals[row] += x[quad * ROWS + row].values[i] * weight;
            }
        }
        f32v scale = load(reinterpret_cast<const float*>(tile) + vector * LANES);
        for (int row = 0; row < ROWS; ++row) sums[row][vector] = totals[row] * scale;
    }
}

// Weights in groups.
template <int BITS, bool IS_CODED, int ROWS>
INLINE void multiply_groups(const Four* x, const GroupScale* rows, const u8* tile, long in, WeightForm form,
                            f32v (&sums)[ROWS][VECTORS]) {
    constexpr long UNIT = 32 / BITS;
    for (auto& row : sums)
        for (f32v& sum : row) sum = f32v{};
    for (long number = 0; number < in / form.group; ++number, tile += form.group_bytes()) {
        const u8* weights = tile + form.parameter_bytes();
        const Four* inputs = x + number * form.group / 4 * ROWS;
        for (int vector = 0; vector < VECTORS; ++vector) {
            f32v dots[ROWS] = {};
            for (long unit = 0; unit < form.group / UNIT; ++unit) {
                u32v bytes = bit_cast<u32v>(load_bytes(weights + (unit * TILE + vector * LANES) * 4));
#pragma GCC unroll 8
                for (int i = 0; i < UNIT; ++i) {
                    f32v weight = BITS == 8 ? byte_of(bytes, i) : nibble_of<IS_CODED>(bytes, i);
#pragma GCC unroll 4
                    for (int row = 0; row < ROWS; ++row)
                        dots[row] += inputs[(unit * UNIT + i) / 4 * ROWS + row].values[i % 4] * weight;
                }
            }
            f32v scale = group_scales(tile, vector);
            f32v minimum{};
            if (form.minimums)
                minimum = group_minimums(tile, vector);
            else if (BITS == 4 && !IS_CODED)
                minimum = scale * static_cast<float>(-MIDDLE_OF_4_BITS);
            for (int row = 0; row < ROWS; ++row)
                sums[row][vector] += dots[row] * scale + rows[number * ROWS + row].sum * minimum;
        }
    }
}

}  // namespace
