// How the cache stores keys and values, and how they are multiplied.
#pragma once

#include "linear.h"
#include "pairs.h"

namespace {

// Keys and values of the model's dtype. Met: how rows meet them, which does not depend on types that only queries have.
template <class Format>
struct Unquantized : Format {
    typedef typename Format::Element Element, Stored;
    typedef typename Format::Input Input;
    typedef Unquantized Storage, Met;
    typedef f32v Sum;
    static constexpr bool QUANTIZED = false, EXPANDED = false, TILED = false;

    // Packs a query of `size` elements, `stride` apart. Returns the factor of its scores.
    INLINE float arrange(const Element* query, long size, Input* to, long stride) {
        for (long unit = 0; unit < size / Format::PAIR; ++unit) to[unit * stride] = Format::input(query + unit * Format::PAIR);
        return 1.0f;
    }
};

// Whether bfloat16 keys and values are expanded to float32 for many rows, because no instruction multiplies them.
constexpr bool EXPANDS_BFLOAT16 = BFloat16::STEPS > 1;

// Keys and values stored as `Storage`, expanded once for all rows of an item instead of once per block of rows. The order of
// summation is the same.
struct Expanded : Unquantized<Float32> {
    typedef bf16 Element;
    typedef Unquantized<BFloat16> Storage;
    static constexpr bool EXPANDED = true;

    INLINE float arrange(const bf16* query, long size, float* to, long stride) {
        for (long i = 0; i < size; ++i) to[i * stride] = to_float(query[i]);
        return 1.0f;
    }
};

// Expands units of `width` pairs, [units][width][2], to [units * 2][width].
INLINE void expand_pairs(const bf16* from, long units, long width, float* to) {
    for (long unit = 0; unit < units; ++unit, from += 2 * width, to += 2 * width)
        for (long i = 0; i < width; i += LANES) {
            u32v pairs;
            __builtin_memcpy(&pairs, from + 2 * i, sizeof pairs);
            store(to + i, bit_cast<f32v>(pairs << 16));
            store(to + width + i, bit_cast<f32v>(pairs & 0xffff0000u));
        }
}

// 8-bit keys and values with a scale per token and head. Queries and weights become 16-bit integers, which adds little error.
// Integer sums are exact, so they do not depend on how rows are grouped.
struct QuantizedPairs {
    typedef signed char Stored;
    typedef QuantizedPairs Storage, Met;
    typedef i32v Sum;
    static constexpr bool QUANTIZED = true, EXPANDED = false, TILED = false;
    static constexpr long PAIR = 2;
#if defined(__SSE2__)
    // An instruction multiplies pairs.
    typedef std::int16_t Integer;
    typedef std::int32_t Input;
    typedef i16v Weights;
    static constexpr int STEPS = 1, BLOCK = rows_of_block(STEPS);
    INLINE Weights weights(const Stored* from, int) { return widen(from); }
    INLINE void multiply(Sum& sum, Input x, Weights w, int) { sum = add_products(sum, w, in_all_lanes(x)); }
#else
    typedef std::int32_t Integer;
    struct Input {
        Integer values[2];
    };
    typedef i32v Weights;
    static constexpr int STEPS = 2, BLOCK = rows_of_block(STEPS);
    INLINE Weights weights(const Stored* from, int step) {
        u16v pairs;
        __builtin_memcpy(&pairs, from, sizeof pairs);
        i32v wide = __builtin_convertvector(pairs, i32v);
        return (step == 0 ? wide << 24 : wide << 16) >> 24;
    }
    INLINE void multiply(Sum& sum, const Input& x, Weights w, int step) { sum += x.values[step] * w; }
#endif
    // Padding meets an input of 0.
    INLINE Weights first_of_pair(const Stored* from) { return weights(from, 0); }

    // Stores LANES numbers as integers of at most 16 bits.
    INLINE void store_integers(Input* to, f32v values) {
        auto integers = __builtin_convertvector(round_to_integers(values), typename VectorOf<Integer, LANES>::Type);
        __builtin_memcpy(to, &integers, sizeof integers);
    }
};

// The same with queries, keys and values of type T.
template <class T>
struct Quantized : QuantizedPairs {
    typedef T Element;

    // With MAX_HEAD_SIZE elements, a sum stays below 2^31.
    INLINE float arrange(const T* query, long size, Input* to, long stride) {
        float most = largest_size(query, size), factor = most > 0 ? MOST_OF_16_BITS / most : 0.0f;
        for (long i = 0; i < size; i += LANES) {
            long count = smaller(LANES, size - i);
            Input pairs[LANES / 2];
            store_integers(pairs, load_some(query + i, count) * factor);
            for (long pair = 0; pair < count / 2; ++pair) to[(i / 2 + pair) * stride] = pairs[pair];
        }
        return most == most ? most / MOST_OF_16_BITS : most;
    }
};

// Quantizes a row to 8 bits. Returns its scale, NaN if an element is not finite.
template <class T>
INLINE float quantize_row(const T* row, long size, signed char* to) {
    float most = largest_size(row, size), factor = most > 0 ? 127 / most : 0.0f;
    for (long i = 0; i < size; i += LANES) {
        long count = smaller(LANES, size - i);
        s8v bytes = __builtin_convertvector(round_to_integers(load_some(row + i, count) * factor), s8v);
        __builtin_memcpy(to + i, &bytes, static_cast<std::size_t>(count));
    }
    return most == most ? most / 127 : most;
}

INLINE f32v as_floats(f32v sum) { return sum; }
INLINE f32v as_floats(i32v sum) { return __builtin_convertvector(sum, f32v); }

// Scales of a tile: 16 of keys, then 16 of values.
constexpr long KEY_SCALES = 0, VALUE_SCALES = 16, TILE_SCALES = 32;

}  // namespace
