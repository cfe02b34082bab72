// Matmuls of bytes with AVX2 or AVX-512 without VNNI. These multiply 16-bit numbers, and unsigned by signed bytes if the sums
// are small.
//
// For 16-bit inputs, weights are widened to 16 bits, every second byte of a vector at a time, so four inputs are read as the
// pairs (0, 2) and (1, 3). 4-bit weights and 8-bit inputs are multiplied as bytes.
#pragma once

#include "quantized_rounding.h"

namespace {

constexpr int WIDE_SUMS = 8, NARROW_SUMS = 8, WIDE_BLOCK = 3, NARROW_BLOCK = 4;

// Four inputs of a row: the 16-bit pairs (0, 2) and (1, 3).
struct Quad {
    std::int32_t even, odd;
};

// Products of signed 8-bit and 16-bit numbers whose sum fits into 32 bits.
constexpr long INPUTS_PER_SUM = 512;

// For each row: the sums of inputs, one per `INPUTS_PER_SUM`.
INLINE long num_sums(long in) { return (in + INPUTS_PER_SUM - 1) / INPUTS_PER_SUM; }

// Vectors of products of 4-bit and 8-bit numbers whose sums fit into 16 bits.
constexpr long OCTETS_PER_SUM = 4;

// Sums of the products of two bytes each, unsigned and signed.
INLINE i16v multiply_bytes(u8v weights, i16v inputs) {
#if defined(__AVX512F__)
    return bit_cast<i16v>(_mm512_maddubs_epi16(bit_cast<__m512i>(weights), bit_cast<__m512i>(inputs)));
#else
    return bit_cast<i16v>(_mm256_maddubs_epi16(bit_cast<__m256i>(weights), bit_cast<__m256i>(inputs)));
#endif
}

// Keeps the compiler from loading everything first, which would exceed the registers.
INLINE void read_in_turn() { asm volatile("" ::: "memory"); }

// Keeps the compiler from delaying additions, whose operands would be spilled. With one row they stay in registers, and this
// costs a few percent.
template <class V>
INLINE void add_at_once(V& sum) {
    asm("" : "+v"(sum));
}

// Sums of products of low-bit weights with 8-bit inputs, two per lane, and their factors.
typedef i16v Partial, Factor;
typedef VectorOf<signed char, 4 * LANES>::Type s8v4;

// Quads of weights up to `most` whose sums fit into 16 bits.
constexpr int most_quads(int most) { return 32767 / (2 * 127 * most); }

// Quads of a group to add up before they are scaled. Sums of centered weights may overflow on the way, but the last one fits.
template <class Kind>
constexpr int quads_at_once() {
    static_assert(most_quads(Kind::MOST) > 0, "a quad's sums fit into 16 bits");
    constexpr int MOST = most_quads(Kind::CENTERED ? Kind::OFFSET : Kind::MOST);
    static_assert(!Kind::CENTERED || MOST >= Kind::QUADS_OF_GROUP, "a group has one start");
    return MOST < Kind::QUADS_OF_GROUP ? MOST : Kind::QUADS_OF_GROUP;
}

// The sums of a group's products, two per lane, that make unsigned weights relative to `offset`. total: sums of every `LANES`th
// input.
template <int offset>
INLINE std::int32_t centered(i32v total) {
    typedef VectorOf<std::int32_t, 4>::Type FourSums;
    struct Parts {
        FourSums of[LANES / 4];
    } parts = bit_cast<Parts>(total);
    FourSums sums = parts.of[0];
    for (int i = 1; i < LANES / 4; ++i) sums += parts.of[i];
    const auto low = static_cast<std::uint32_t>(-offset * (sums[0] + sums[1]));
    const auto high = static_cast<std::uint32_t>(-offset * (sums[2] + sums[3]));
    return static_cast<std::int32_t>((low & 0xffff) | high << 16);
}

INLINE Partial start_from(std::int32_t start) { return in_all_lanes(start); }

// Offset of signed weights during multiplication.
constexpr std::int32_t OFFSET = 0;

// Inputs with the signs of weights.
INLINE i16v signed_as(i16v inputs, u8v weights) {
#if defined(__AVX512F__)
    s8v4 negative = bit_cast<s8v4>(weights) < 0;
    return bit_cast<i16v>((bit_cast<s8v4>(inputs) ^ negative) - negative);
#else
    return bit_cast<i16v>(_mm256_sign_epi8(bit_cast<__m256i>(inputs), bit_cast<__m256i>(weights)));
#endif
}

// SIGNED: weights are signed bytes; the sum of one product pair fits into 16 bits.
template <bool SIGNED>
INLINE Partial add_quad(Partial sum, u8v weights, std::int32_t inputs) {
    // Unsigned, because it may overflow.
    if constexpr (!SIGNED)
        return bit_cast<i16v>(bit_cast<pairs16>(sum) + bit_cast<pairs16>(multiply_bytes(weights, in_all_lanes(inputs))));
    s8v4 size = bit_cast<s8v4>(weights);
    size = size < 0 ? -size : size;
    return sum + multiply_bytes(bit_cast<u8v>(size), signed_as(in_all_lanes(inputs), weights));
}

INLINE i32v add_scaled(i32v sum, Partial partial, Factor factor) { return sum + multiply_pairs(partial, factor); }

// A byte of each lane, signed or unsigned, in both halves of a pair.
template <bool SIGNED>
INLINE Factor factor_of(u32v word, int byte) {
    const std::int32_t order = SIGNED ? 0x00800080 | byte << 8 | byte << 24 : static_cast<std::int32_t>(0x80008000 | byte | byte << 16);
    i32v lanes = i32v{} + order;
    for (int i = 0; i < LANES; ++i) lanes[i] += (SIGNED ? 0x04000400 : 0x00040004) * (i % 4);
    i16v pairs = bit_cast<i16v>(shuffle_bytes(bit_cast<u8v>(word), bit_cast<u8v>(lanes)));
    return SIGNED ? pairs >> 8 : pairs;
}

// Sums of the inputs of COUNT groups. Of each four groups, the first and third are adjacent, then the others.
template <long COUNT>
struct InputSums {
    std::int32_t pairs[COUNT / 2];

    void set(const std::int32_t* sums) {
        for (long i = 0; i < COUNT / 2; ++i) {
            const std::int32_t* first = sums + i / 2 * 4 + i % 2;
            pairs[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(first[0] & 0xffff) | static_cast<std::uint32_t>(first[2]) << 16);
        }
    }
};

// Each lane's bytes, one per group, as pairs in the order of `InputSums`.
template <bool SIGNED, int WORDS>
struct Spread {
    i16v pairs[2 * WORDS];

    Spread() = default;
    explicit Spread(const u32v (&words)[WORDS]) {
#pragma GCC unroll 8
        for (int i = 0; i < WORDS; ++i) {
            pairs[2 * i] = (bit_cast<i16v>(words[i]) << 8) >> 8;
            pairs[2 * i + 1] = bit_cast<i16v>(words[i]) >> 8;
            if (!SIGNED) pairs[2 * i] &= static_cast<std::int16_t>(255);
        }
    }
};

// Multiplies bytes by the groups' sums.
template <bool SIGNED, int WORDS>
INLINE i32v multiply_sums(const Spread<SIGNED, WORDS>& bytes, const InputSums<4 * WORDS>& sums) {
    i32v total{};
#pragma GCC unroll 8
    for (int i = 0; i < 2 * WORDS; ++i) total += multiply_pairs(bytes.pairs[i], in_all_lanes(sums.pairs[i]));
    return total;
}

template <class T>
float split_row(const T* x, long in, long padded, Quad* quads, float* scales, std::int32_t* sums, long place, long count) {
    float most = largest_size(x, in);
    float factor = most > 0 ? MOST_OF_16_BITS / most : 0.0f;
    i32v total{};
    for (long i = 0; i < padded; i += LANES) {
        f32v scaled = i < in ? load_some(x + i, smaller(LANES, in - i)) * factor : f32v{};
        i32v rounded = round_to_integers(scaled);
        total += rounded;
        if ((i + LANES) % INPUTS_PER_SUM == 0 || i + LANES >= padded) {
            sums[i / INPUTS_PER_SUM * count + place] = sum(total);
            total = i32v{};
        }
        std::uint64_t low[LANES / 2], high[LANES / 2];
        u32v lower = bit_cast<u32v>(rounded) & 0xffffu, upper = bit_cast<u32v>(rounded) << 16;
        __builtin_memcpy(low, &lower, sizeof low);
        __builtin_memcpy(high, &upper, sizeof high);
        long num_quads = smaller(LANES, padded - i) / 4;
        for (long quad = 0; quad < num_quads; ++quad)
            quads[(i / 4 + quad) * count + place] = bit_cast<Quad>(low[2 * quad] | high[2 * quad + 1]);
    }
    scales[place] = most == most ? most / MOST_OF_16_BITS : most;
    return factor;
}

template <int ROWS>
INLINE void multiply_int8(const Quad* inputs, const float* scales, const std::int32_t* input_sums, const u8* tile, long in,
                          f32v (&sums)[ROWS][VECTORS]) {
    constexpr int WIDTH = vectors_with(ROWS, WIDE_SUMS, 1, 1);
    for (int first = 0; first < VECTORS; first += WIDTH) {
        f32v totals[ROWS][WIDTH] = {};
        const u8* weights = tile + TILE * sizeof(float) + first * LANES * 4;
        const Quad* x = inputs;
        for (long start = 0; start < in; start += INPUTS_PER_SUM) {
            // These may overflow. The result after subtracting the offset does not.
            u32v dots[ROWS][WIDTH] = {};
            long quads = smaller(INPUTS_PER_SUM, in - start) / 4;
            for (long quad = 0; quad < quads; ++quad, weights += 4 * TILE, x += ROWS) {
                for (long line = 0; line < WIDTH * LANES * 4; line += 64) __builtin_prefetch(weights + PREFETCH_BYTES + line);
#pragma GCC unroll 2
                for (int part = 0; part < 2; ++part) {
                    read_in_turn();
                    i16v w[WIDTH];
#pragma GCC unroll 8
                    for (int i = 0; i < WIDTH; ++i) {
                        pairs16 bytes = bit_cast<pairs16>(load_bytes(weights + i * LANES * 4));
                        w[i] = bit_cast<i16v>(part ? bytes >> 8 : bytes & static_cast<std::uint16_t>(255));
                    }
#pragma GCC unroll 4
                    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                        for (int i = 0; i < WIDTH; ++i) {
                            dots[row][i] += bit_cast<u32v>(multiply_pairs(w[i], in_all_lanes(part ? x[row].odd : x[row].even)));
                            if (ROWS > 1) add_at_once(dots[row][i]);
                        }
                }
            }
            for (int row = 0; row < ROWS; ++row) {
                std::uint32_t offset = 128u * static_cast<std::uint32_t>(input_sums[start / INPUTS_PER_SUM * ROWS + row]);
                for (int i = 0; i < WIDTH; ++i)
                    totals[row][i] += __builtin_convertvector(bit_cast<i32v>(dots[row][i] - offset), f32v);
            }
        }
        for (int i = 0; i < WIDTH; ++i) {
            f32v scale = load(reinterpret_cast<const float*>(tile) + (first + i) * LANES);
            for (int row = 0; row < ROWS; ++row) sums[row][first + i] = totals[row][i] * scale * scales[row];
        }
    }
}

// Weights in groups, with 8-bit inputs.
template <int BITS, bool IS_CODED, int ROWS>
INLINE void multiply_groups(const Four* inputs, const GroupScale* scales, const u8* tile, long in, WeightForm form,
                            f32v (&sums)[ROWS][VECTORS]) {
    static_assert(BITS == 4 && !IS_CODED, "weights of 8 bits and codes have wide inputs");
    constexpr int WIDTH = vectors_with(ROWS, NARROW_SUMS, 1, 1);
    const long groups = in / form.group, octets_of_group = form.group / 8;
    const std::int32_t zero = form.minimums ? 0 : MIDDLE_OF_4_BITS;
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
            for (long start = 0; start < octets_of_group; start += OCTETS_PER_SUM) {
                i16v small[ROWS][WIDTH] = {};
                long octets = smaller(OCTETS_PER_SUM, octets_of_group - start);
                for (long octet = 0; octet < octets; ++octet, weights += 4 * TILE) {
                    for (long line = 0; line < WIDTH * LANES * 4; line += 64)
                        __builtin_prefetch(weights + PREFETCH_BYTES + line);
#pragma GCC unroll 2
                    for (int part = 0; part < 2; ++part, x += ROWS) {
                        read_in_turn();
                        u8v w[WIDTH];
#pragma GCC unroll 8
                        for (int i = 0; i < WIDTH; ++i) w[i] = nibbles(load_bytes(weights + i * LANES * 4), part);
#pragma GCC unroll 8
                        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                            for (int i = 0; i < WIDTH; ++i) {
                                small[row][i] += multiply_bytes(w[i], in_all_lanes(x[row]));
                                if (ROWS > 1) add_at_once(small[row][i]);
                            }
                    }
                }
                for (int row = 0; row < ROWS; ++row)
                    for (int i = 0; i < WIDTH; ++i)
                        dots[row][i] += multiply_pairs(small[row][i], in_all_lanes(0x10001));
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
    constexpr int WIDTH = vectors_with(ROWS, WIDE_SUMS, 1, 1), QUADS = 8 / BITS;
    const long groups = in / form.group, units = form.group / (4 * QUADS);
    const std::int32_t zero = BITS == 8 ? 128 : IS_CODED || form.minimums ? 0 : MIDDLE_OF_4_BITS;
    const long parameter_bytes = form.parameter_bytes(), group_bytes = form.group_bytes();
    for (int first = 0; first < VECTORS; first += WIDTH) {
        f32v totals[ROWS][WIDTH] = {};
        const Quad* x = inputs;
        const GroupSum* group_sums = input_sums;
        const u8* place = tile;
        for (long number = 0; number < groups; ++number, place += group_bytes, group_sums += ROWS) {
            i32v dots[ROWS][WIDTH];
            for (int row = 0; row < ROWS; ++row)
                for (int i = 0; i < WIDTH; ++i) dots[row][i] = -zero * group_sums[row].integer - i32v{};
            const u8* weights = place + parameter_bytes + first * LANES * 4;
            for (long unit = 0; unit < units; ++unit, weights += 4 * TILE, x += QUADS * ROWS) {
                for (long line = 0; line < WIDTH * LANES * 4; line += 64)
                    __builtin_prefetch(weights + PREFETCH_BYTES + line);
                i16v decoded[WIDTH];
#pragma GCC unroll 8
                for (int part = 0; part < 2 * QUADS; ++part) {
                    read_in_turn();
                    // Inputs 0 and 2 (4-bit: then 4 and 6), then 1 and 3 (5 and 7). Codes: one quad after another.
                    const int quad = IS_CODED ? part / 2 : part % QUADS, odd = IS_CODED ? part % 2 : part / QUADS;
                    i16v w[WIDTH];
#pragma GCC unroll 8
                    for (int i = 0; i < WIDTH; ++i) {
                        u8v bytes = load_bytes(weights + i * LANES * 4);
                        if constexpr (IS_CODED) {
                            if (!odd) decoded[i] = bit_cast<i16v>(decode<0>(nibbles(bytes, quad)));
                            w[i] = (odd ? decoded[i] : decoded[i] << 8) >> 8;
                        } else {
                            w[i] = bit_cast<i16v>((bit_cast<pairs16>(bytes) >> (BITS * part)) & static_cast<std::uint16_t>((1 << BITS) - 1));
                        }
                    }
#pragma GCC unroll 8
                    for (int row = 0; row < ROWS; ++row) {
                        const Quad& inputs_of = x[quad * ROWS + row];
#pragma GCC unroll 8
                        for (int i = 0; i < WIDTH; ++i) {
                            dots[row][i] += multiply_pairs(w[i], in_all_lanes(odd ? inputs_of.odd : inputs_of.even));
                            add_at_once(dots[row][i]);
                        }
                    }
                }
            }
            for (int i = 0; i < WIDTH; ++i) {
                f32v scale = group_scales(place, first + i);
                for (int row = 0; row < ROWS; ++row) totals[row][i] += __builtin_convertvector(dots[row][i], f32v) * scale;
                if (!form.minimums) continue;
                f32v minimum = group_minimums(place, first + i);
                for (int row = 0; row < ROWS; ++row) totals[row][i] += minimum * group_sums[row].sum;
            }
        }
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < WIDTH; ++i) sums[row][first + i] = totals[row][i] * scales[row];
    }
}

}  // namespace
