// 16-bit integers, and x86 instructions that add the products of pairs in 32-bit lanes.
#pragma once

#include "vector.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

// Maximum 16-bit integer of inputs. Its upper and lower bytes are both signed.
constexpr float MOST_OF_16_BITS = 127 * 256 + 127;

// The maximum absolute value; NaN if an element is not finite.
template <class T>
INLINE float largest_size(const T* x, long count) {
    i32v most{};
    // As integers, absolute values are ordered, with NaN after infinity.
    for (long i = 0; i < count; i += LANES) {
        i32v size = bit_cast<i32v>(load_some(x + i, smaller(LANES, count - i))) & 0x7fffffff;
        most = most > size ? most : size;
    }
    constexpr std::int32_t INFINITE = 0x7f800000;
    std::int32_t size = reduce<std::int32_t>(most, [](auto a, auto b) { return a > b ? a : b; });
    return size < INFINITE ? bit_cast<float>(size) : __builtin_nanf("");
}

#if defined(__SSE2__)

typedef VectorOf<std::int16_t, 2 * LANES>::Type i16v;

// Converts bytes to 16 bits. GCC 12 emits five instructions instead of one.
INLINE i16v widen(const signed char* from) {
#if defined(__AVX512BW__)
    if constexpr (LANES == 16)
        return bit_cast<i16v>(
            _mm512_maskz_cvtepi8_epi16(0xffffffffu, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#endif
#if defined(__AVX2__)
    if constexpr (LANES == 8)
        return bit_cast<i16v>(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#endif
    VectorOf<signed char, 2 * LANES>::Type bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, i16v);
}

INLINE i16v in_all_lanes(std::int32_t pair) { return bit_cast<i16v>(pair - i32v{}); }

// Sums of the products of two 16-bit numbers in each lane.
INLINE i32v multiply_pairs(i16v weights, i16v inputs) {
#if defined(__AVX512BW__)
    if constexpr (LANES == 16)
        return bit_cast<i32v>(_mm512_madd_epi16(bit_cast<__m512i>(weights), bit_cast<__m512i>(inputs)));
#endif
#if defined(__AVX2__)
    if constexpr (LANES == 8)
        return bit_cast<i32v>(_mm256_madd_epi16(bit_cast<__m256i>(weights), bit_cast<__m256i>(inputs)));
#endif
    if constexpr (LANES == 4)
        return bit_cast<i32v>(_mm_madd_epi16(bit_cast<__m128i>(weights), bit_cast<__m128i>(inputs)));
}

// The same, added to sums.
INLINE i32v add_products(i32v sum, i16v weights, i16v inputs) {
#if defined(__AVX512VNNI__)
    return bit_cast<i32v>(
        _mm512_dpwssd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(weights), bit_cast<__m512i>(inputs)));
#elif defined(__AVXVNNI__)
    return bit_cast<i32v>(
        _mm256_dpwssd_avx_epi32(bit_cast<__m256i>(sum), bit_cast<__m256i>(weights), bit_cast<__m256i>(inputs)));
#else
    return sum + multiply_pairs(weights, inputs);
#endif
}

#endif

}  // namespace
