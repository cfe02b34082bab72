// Numbers as integers of 16 bits, and where x86 adds the products of pairs of them up, one in each lane of 32 bits.
#pragma once

#include "vector.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

// The largest integer of 16 bits that inputs become: their upper and lower bytes are both signed.
constexpr float MOST_OF_16_BITS = 127 * 256 + 127;

// Of the elements' sizes; NaN if one is not finite.
template <class T>
INLINE float largest_size(const T* x, long count) {
    i32v most{};
    // As integers, sizes are in order, and what is no number comes after infinity.
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

// Bytes as numbers of 16 bits. GCC 12 makes five instructions of what is one.
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

// The same added to sums.
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
