// Rounds inputs to integers for low-bit weights.
#pragma once

#include "pairs.h"
#include "quantized_layout.h"

namespace {

// Four inputs of a row as signed bytes.
typedef std::int32_t Four;

// Shuffles bytes within each 16. A place with its highest bit set gives 0.
INLINE u8v shuffle_bytes(u8v bytes, u8v places) {
#if defined(__AVX512BW__)
    return bit_cast<u8v>(_mm512_shuffle_epi8(bit_cast<__m512i>(bytes), bit_cast<__m512i>(places)));
#elif defined(__AVX2__)
    return bit_cast<u8v>(_mm256_shuffle_epi8(bit_cast<__m256i>(bytes), bit_cast<__m256i>(places)));
#elif defined(__aarch64__)
    return bit_cast<u8v>(vqtbl1q_u8(bit_cast<uint8x16_t>(bytes), bit_cast<uint8x16_t>(places)));
#endif
}

// The values of codes plus OFFSET, for each 16 bytes of a vector.
template <int OFFSET>
struct CodeTable {
    u8 values[4 * LANES] = {};

    constexpr CodeTable() {
        for (int i = 0; i < 4 * LANES; ++i) values[i] = static_cast<u8>(CODES[i % 16] + OFFSET);
    }
};

template <int OFFSET>
INLINE u8v decode(u8v codes) {
    static constexpr CodeTable<OFFSET> table;
    return shuffle_bytes(load_bytes(table.values), codes);
}

// A group of a row's inputs. sum: after rounding; integer: the same in units of the scale.
struct GroupScale {
    float scale, sum;
    std::int32_t integer;
};

// Group size of inputs for 8-bit weights without groups.
constexpr long INPUT_GROUP = 128;

// Stores integers as bytes, four per word; words are `stride` apart.
INLINE void store_fours(Four* to, i32v value, long count, long stride) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    // GCC 12 would convert them one by one.
    __m256i pairs = _mm256_packs_epi32(bit_cast<__m256i>(value), bit_cast<__m256i>(value)), both = _mm256_packs_epi16(pairs, pairs);
    to[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(both));
    if (count > 1) to[stride] = _mm_cvtsi128_si32(_mm256_extracti128_si256(both, 1));
    return;
#endif
    s8v bytes = __builtin_convertvector(value, s8v);
    Four fours[LANES / 4];
    __builtin_memcpy(fours, &bytes, sizeof fours);
    for (long i = 0; i < count; ++i) to[i * stride] = fours[i];
}

// A group of a row's inputs after rounding, in units of the row's scale, as both types.
struct GroupSum {
    float sum;
    std::int32_t integer;
};

// The groups of a split row.
template <class T>
void add_groups(const T* x, long in, long padded, long group, float factor, GroupSum* sums, long place, long count) {
    for (long start = 0; start < padded; start += group) {
        i32v total{};
        for (long i = start; i < smaller(start + group, in); i += LANES)
            total += round_to_integers(load_some(x + i, smaller(LANES, in - i)) * factor);
        std::int32_t integer = sum(total);
        sums[start / group * count + place] = {static_cast<float>(integer), integer};
    }
}

// Rounds a row to bytes with a scale per group. Calls `put` with a place, `LANES` bytes and how many of them count, and
// `put_scale` with a group's number.
template <class T, class Put, class PutScale>
INLINE void round_inputs(const T* x, long in, long padded, long group, Put put, PutScale put_scale) {
    for (long start = 0; start < padded; start += group) {
        long end = smaller(start + group, padded);
        float most = largest_size(x + start, smaller(group, in - start));
        float factor = most > 0 ? 127 / most : 0.0f, scale = most == most ? most / 127 : most;
        i32v total{};
        for (long i = start; i < end; i += LANES) {
            f32v scaled = i < in ? load_some(x + i, smaller(LANES, smaller(end, in) - i)) * factor : f32v{};
            i32v value = round_to_integers(scaled);
            total += value;
            put(i, value, smaller(LANES, end - i));
        }
        std::int32_t integer = sum(total);
        put_scale(start / group, GroupScale{scale, scale * static_cast<float>(integer), integer});
    }
}

// The same into row `place` of a block of `count` rows with interleaved fours.
template <class T>
void round_row(const T* x, long in, long padded, long group, Four* fours, GroupScale* scales, long place, long count) {
    round_inputs(
        x, in, padded, group,
        [&](long i, i32v value, long some)
            __attribute__((always_inline)) { store_fours(fours + i / 4 * count + place, value, some / 4, count); },
        [&](long number, GroupScale scale) { scales[number * count + place] = scale; });
}

}  // namespace
