// Matmuls of bytes with an instruction that adds the products of four bytes: VNNI on x86, dot products on Arm.
#pragma once

#define DOTS_OF_BYTES
#include "quantized_rounding.h"

namespace {

// Two integer sums for each vector of a row (16-bit inputs), or an integer sum and a float sum.
constexpr int WIDE_SUMS = REGISTERS == 32 ? 12 : 6, NARROW_SUMS = REGISTERS == 32 ? 12 : 6;
constexpr int WIDE_BLOCK = REGISTERS == 32 ? 4 : 3, NARROW_BLOCK = REGISTERS == 32 ? 6 : 3;

// `PREFETCH_BYTES` of 8-bit weights without groups, which need the least work per byte.
constexpr long BYTES_AHEAD = 2 * PREFETCH_BYTES;

// Up to this many rows, reading 4-bit weights takes longer than multiplying.
constexpr int MEMORY_BOUND_ROWS = 2;

// Whether prefetching helps kernels that wait for memory. Processors with bfloat16 dot products follow the stream of weights
// well, and each prefetch takes one of their few outstanding misses.
#if defined(__AVX512BF16__)
constexpr bool PREFETCHES_STREAMS = false;
#else
constexpr bool PREFETCHES_STREAMS = true;
#endif

// Prefetches `bytes` of a stream of weights, `ahead` of `place`. COMPUTES: the kernel waits less for memory than it computes.
template <bool COMPUTES>
INLINE void prefetch_stream(const u8* place, long bytes, long ahead = PREFETCH_BYTES) {
    if constexpr (PREFETCHES_STREAMS || COMPUTES)
        for (long line = 0; line < bytes; line += 64) __builtin_prefetch(place + ahead + line);
}

// Four inputs of a row, high and low bytes.
struct Quad {
    std::int32_t high, low;
};

// For each row: the sums of its high and of its low bytes.
INLINE long num_sums(long) { return 2; }

#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
// The instruction only takes signed bytes.
constexpr std::int32_t OFFSET = 0;
INLINE u8v as_multiplied(u8v weights) { return weights ^ static_cast<u8>(128); }
#else
// Offset of 8-bit weights during multiplication.
constexpr std::int32_t OFFSET = 128;
INLINE u8v as_multiplied(u8v weights) { return weights; }
#endif

// weights: up to 127 if `as_multiplied` changes them.
INLINE i32v dot_bytes(i32v sum, u8v weights, std::int32_t inputs) {
#if !defined(__aarch64__)
    i32v four = inputs - i32v{};
#else
    int8x8_t four = vcreate_s8(static_cast<std::uint32_t>(inputs));
#endif
#if defined(__AVX512VNNI__)
    return bit_cast<i32v>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(weights), bit_cast<__m512i>(four)));
#elif defined(__AVXVNNI__)
    return bit_cast<i32v>(
        _mm256_dpbusd_avx_epi32(bit_cast<__m256i>(sum), bit_cast<__m256i>(weights), bit_cast<__m256i>(four)));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return bit_cast<i32v>(vusdotq_lane_s32(bit_cast<int32x4_t>(sum), bit_cast<uint8x16_t>(weights), four, 0));
#else
    return bit_cast<i32v>(vdotq_lane_s32(bit_cast<int32x4_t>(sum), bit_cast<int8x16_t>(weights), four, 0));
#endif
}

// Sums of products of low-bit weights with 8-bit inputs, and their factors.
typedef i32v Partial, Factor;

// Quads of a group to add up before they are scaled. Any sum fits into 32 bits.
template <class Kind>
constexpr int quads_at_once() {
    return Kind::QUADS_OF_GROUP;
}

// The sum of a group's products that makes unsigned weights relative to `offset`. total: adds up to the group's inputs.
template <int offset>
INLINE std::int32_t centered(i32v total) {
    return -offset * sum(total);
}

INLINE Partial start_from(std::int32_t start) { return start - i32v{}; }

INLINE void read_in_turn() {}
INLINE void add_at_once(Partial&) {}

// weights: up to 127, or with SIGNED, offset by OFFSET.
template <bool SIGNED>
INLINE Partial add_quad(Partial sum, u8v weights, std::int32_t inputs) {
    return dot_bytes(sum, weights, inputs);
}

INLINE i32v add_scaled(i32v sum, Partial partial, Factor factor) { return sum + partial * factor; }

// A byte of each lane, signed or unsigned.
template <bool SIGNED>
INLINE Factor factor_of(u32v word, int byte) {
    return SIGNED ? bit_cast<i32v>(word << (24 - 8 * byte)) >> 24 : bit_cast<i32v>(word >> (8 * byte) & 255u);
}

// Sums of the inputs of COUNT groups.
template <long COUNT>
struct InputSums {
    std::int32_t sums[COUNT];

    void set(const std::int32_t* from) { __builtin_memcpy(sums, from, sizeof sums); }
};

// Each lane's bytes, one per group.
template <bool SIGNED, int WORDS>
struct Spread {
    i32v values[4 * WORDS];

    Spread() = default;
    explicit Spread(const u32v (&words)[WORDS]) {
#pragma GCC unroll 16
        for (int i = 0; i < 4 * WORDS; ++i) values[i] = factor_of<SIGNED>(words[i / 4], i % 4);
    }
};

// Multiplies bytes by the groups' sums.
template <bool SIGNED, int WORDS>
INLINE i32v multiply_sums(const Spread<SIGNED, WORDS>& bytes, const InputSums<4 * WORDS>& sums) {
    i32v total{};
    for (int i = 0; i < 4 * WORDS; ++i) total += bytes.values[i] * sums.sums[i];
    return total;
}

// Splits a row into high and low bytes. Calls `put` with a place, `LANES` high and as many low bytes. Returns the factor of its
// inputs. scale, high_sum, low_sum: where to store the row's scale and the sums of its bytes.
template <class T, class Put>
INLINE float split_inputs(const T* x, long in, long padded, float* scale, std::int32_t* high_sum, std::int32_t* low_sum, Put put) {
    float most = largest_size(x, in);
    float factor = most > 0 ? MOST_OF_16_BITS / most : 0.0f;
    i32v high_sums{}, low_sums{};
    for (long i = 0; i < padded; i += LANES) {
        f32v scaled = i < in ? load_some(x + i, smaller(LANES, in - i)) * factor : f32v{};
        i32v value = round_to_integers(scaled);
        i32v high = (value + 128) >> 8, low = value - (high << 8);
        high_sums += high;
        low_sums += low;
        put(i, high, low);
    }
    *scale = most == most ? most / MOST_OF_16_BITS : most;
    *high_sum = sum(high_sums);
    *low_sum = sum(low_sums);
    return factor;
}

// Splits row `place` of a block of `count` rows with interleaved quads. Returns the factor of its inputs.
template <class T>
float split_row(const T* x, long in, long padded, Quad* quads, float* scales, std::int32_t* sums, long place, long count) {
    auto put = [&](long i, i32v high, i32v low) __attribute__((always_inline)) {
        Quad* to = quads + i / 4 * count + place;
        long num_quads = smaller(LANES, padded - i) / 4, stride = count * static_cast<long>(sizeof(Quad) / sizeof(Four));
        store_fours(&to->high, high, num_quads, stride);
        store_fours(&to->low, low, num_quads, stride);
    };
    return split_inputs(x, in, padded, scales + place, sums + place, sums + count + place, put);
}

template <int ROWS>
INLINE void multiply_int8(const Quad* x, const float* scales, const std::int32_t* input_sums, const u8* tile, long in,
                          f32v (&sums)[ROWS][VECTORS]) {
    constexpr int WIDTH = vectors_with(ROWS, WIDE_SUMS, 2, 1);
    for (int first = 0; first < VECTORS; first += WIDTH) {
        i32v high[ROWS][WIDTH] = {}, low[ROWS][WIDTH] = {};
        const u8* weights = tile + TILE * sizeof(float) + first * LANES * 4;
        for (long quad = 0; quad < in / 4; ++quad, weights += 4 * TILE) {
            prefetch_stream<false>(weights, WIDTH * LANES * 4, BYTES_AHEAD);
            u8v w[WIDTH];
#pragma GCC unroll 8
            for (int i = 0; i < WIDTH; ++i) w[i] = as_multiplied(load_bytes(weights + i * LANES * 4));
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; ++row) {
                Quad inputs = x[quad * ROWS + row];
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; ++i) {
                    high[row][i] = dot_bytes(high[row][i], w[i], inputs.high);
                    low[row][i] = dot_bytes(low[row][i], w[i], inputs.low);
                }
            }
        }
        for (int i = 0; i < WIDTH; ++i) {
            f32v scale = load(reinterpret_cast<const float*>(tile) + (first + i) * LANES);
            for (int row = 0; row < ROWS; ++row) {
                f32v upper = __builtin_convertvector(high[row][i] - OFFSET * input_sums[row], f32v);
                f32v lower = __builtin_convertvector(low[row][i] - OFFSET * input_sums[ROWS + row], f32v);
                sums[row][first + i] = (256.0f * upper + lower) * scale * scales[row];
            }
        }
    }
}

template <int ROWS>
INLINE void multiply_bytes(const Four* inputs, const GroupScale* scales, const u8* tile, long in, f32v (&sums)[ROWS][VECTORS]) {
    constexpr int WIDTH = vectors_with(ROWS, NARROW_SUMS, 2, 1);
    for (int first = 0; first < VECTORS; first += WIDTH) {
        f32v totals[ROWS][WIDTH] = {};
        const Four* x = inputs;
        const GroupScale* rows = scales;
        const u8* weights = tile + TILE * sizeof(float) + first * LANES * 4;
        for (long start = 0; start < in; start += INPUT_GROUP, rows += ROWS) {
            i32v dots[ROWS][WIDTH];
            for (int row = 0; row < ROWS; ++row)
                for (int i = 0; i < WIDTH; ++i) dots[row][i] = -OFFSET * rows[row].integer - i32v{};
            long quads = smaller(INPUT_GROUP, in - start) / 4;
            for (long quad = 0; quad < quads; ++quad, weights += 4 * TILE, x += ROWS) {
                prefetch_stream<false>(weights, WIDTH * LANES * 4, BYTES_AHEAD);
                u8v w[WIDTH];
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; ++i) w[i] = as_multiplied(load_bytes(weights + i * LANES * 4));
#pragma GCC unroll 6
                for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                    for (int i = 0; i < WIDTH; ++i) dots[row][i] = dot_bytes(dots[row][i], w[i], x[row]);
            }
            for (int row = 0; row < ROWS; ++row)
                for (int i = 0; i < WIDTH; ++i) totals[row][i] += __builtin_convertvector(dots[row][i], f32v) * rows[row].scale;
        }
        for (int i = 0; i < WIDTH; ++i) {
            f32v scale = load(reinterpret_cast<const float*>(tile) + (first + i) * LANES);
            for (int row = 0; row < ROWS; ++row) sums[row][first + i] = totals[row][i] * scale;
        }
    }
}

// Weights in groups, with 8-bit inputs.
template <int BITS, bool IS_CODED, int ROWS>
INLINE void multiply_groups(const Four* inputs, const GroupScale* scales, const u8* tile, long in, WeightForm form,
                            f32v (&sums)[ROWS][VECTORS]) {
    static_assert(!IS_CODED, "codes have wide inputs");
    constexpr int WIDTH = vectors_with(ROWS, NARROW_SUMS, 2, 1), PARTS = 8 / BITS;
    const long groups = in / form.group, units = form.group / (4 * PARTS);
    const std::int32_t zero = BITS == 8 ? OFFSET : form.minimums ? 0 : MIDDLE_OF_4_BITS;
    const long parameter_bytes = form.parameter_bytes(), group_bytes = form.group_bytes();
    for (int first = 0; first < VECTORS; first += WIDTH) {
        f32v totals[ROWS][WIDTH] = {};
        const Four* x = inputs;
        const GroupScale* rows = scales;
        const u8* place = tile;
        for (long number = 0; number < groups; ++number, place += group_bytes, rows += ROWS) {
            i32v dots[ROWS][WIDTH];
            for (int row = 0; row < ROWS; ++row)
                for (int i = 0; i < WIDTH; ++i) dots[row][i] = -zero * rows[row].integer - i32v{};
            const u8* weights = place + parameter_bytes + first * LANES * 4;
            for (long unit = 0; unit < units; ++unit, weights += 4 * TILE) {
                prefetch_stream<BITS == 4 && (ROWS > MEMORY_BOUND_ROWS)>(weights, WIDTH * LANES * 4);
                u8v bytes[WIDTH];
                for (int i = 0; i < WIDTH; ++i) bytes[i] = load_bytes(weights + i * LANES * 4);
#pragma GCC unroll 2
                for (int part = 0; part < PARTS; ++part, x += ROWS) {
                    u8v w[WIDTH];
#pragma GCC unroll 8
                    for (int i = 0; i < WIDTH; ++i) w[i] = BITS == 8 ? as_multiplied(bytes[i]) : nibbles(bytes[i], part);
#pragma GCC unroll 6
                    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                        for (int i = 0; i < WIDTH; ++i) dots[row][i] = dot_bytes(dots[row][i], w[i], x[row]);
                }
            }
            for (int i = 0; i < WIDTH; ++i) {
                f32v scale = group_scales(place, first + i);
                for (int row = 0; row < ROWS; ++row)
                    totals[row][i] += __builtin_convertvector(dots[row][i], f32v) * (scale * rows[row].scale);
                if (!form.minimums) continue;
                f32v minimum = group_minimums(place, first + i);
                for (int row = 0; row < ROWS; ++row) totals[row][i] += minimum * rows[row].sum;
            }
        }
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < WIDTH; ++i) sums[row][first + i] = totals[row][i];
    }
}

// The same with 16-bit inputs.
template <int BITS, bool IS_CODED, int ROWS>
INLINE void multiply_wide(const Quad* inputs, const float* scales, const GroupSum* input_sums, const u8* tile, long in,
                          WeightForm form, f32v (&sums)[ROWS][VECTORS]) {
    constexpr int WIDTH = vectors_with(ROWS, WIDE_SUMS, 3, 1), PARTS = 8 / BITS;
    const long groups = in / form.group, units = form.group / (4 * PARTS);
    const std::int32_t zero = BITS == 8 || IS_CODED ? OFFSET : form.minimums ? 0 : MIDDLE_OF_4_BITS;
    const long parameter_bytes = form.parameter_bytes(), group_bytes = form.group_bytes();
    for (int first = 0; first < VECTORS; first += WIDTH) {
        f32v totals[ROWS][WIDTH] = {};
        const Quad* x = inputs;
        const GroupSum* group_sums = input_sums;
        const u8* place = tile;
        for (long number = 0; number < groups; ++number, place += group_bytes, group_sums += ROWS) {
            i32v high[ROWS][WIDTH] = {}, low[ROWS][WIDTH];
            for (int row = 0; row < ROWS; ++row)
                for (int i = 0; i < WIDTH; ++i)
                    low[row][i] = -zero * group_sums[row].integer - i32v{};
            const u8* weights = place + parameter_bytes + first * LANES * 4;
            for (long unit = 0; unit < units; ++unit, weights += 4 * TILE) {
                prefetch_stream<(ROWS > MEMORY_BOUND_ROWS)>(weights, WIDTH * LANES * 4);
                u8v bytes[WIDTH];
                for (int i = 0; i < WIDTH; ++i) bytes[i] = load_bytes(weights + i * LANES * 4);
#pragma GCC unroll 2
                for (int part = 0; part < PARTS; ++part, x += ROWS) {
                    u8v w[WIDTH];
#pragma GCC unroll 8
                    for (int i = 0; i < WIDTH; ++i) {
                        w[i] = BITS == 8 ? as_multiplied(bytes[i]) : nibbles(bytes[i], part);
                        if (IS_CODED) w[i] = decode<OFFSET>(w[i]);
                    }
#pragma GCC unroll 4
                    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                        for (int i = 0; i < WIDTH; ++i) {
                            high[row][i] = dot_bytes(high[row][i], w[i], x[row].high);
                            low[row][i] = dot_bytes(low[row][i], w[i], x[row].low);
                        }
                }
            }
            for (int i = 0; i < WIDTH; ++i) {
                f32v scale = group_scales(place, first + i);
                for (int row = 0; row < ROWS; ++row)
                    totals[row][i] += __builtin_convertvector(high[row][i] * 256 + low[row][i], f32v) * scale;
                if (!form.minimums) continue;
                f32v minimum = group_minimums(place, first + i);
                for (int row = 0; row < ROWS; ++row) totals[row][i] += minimum * group_sums[row].sum;
            }
        }
        // Scales loaded before the loops would take registers from the sums.
        if (LOADS_APART) asm volatile("" ::: "memory");
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < WIDTH; ++i) sums[row][first + i] = totals[row][i] * scales[row];
    }
}

}  // namespace
