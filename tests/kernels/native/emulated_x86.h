// Instructions of AVX-512, VNNI and BF16 and of AVX-VNNI that the kernels use, computed with AVX2 and plain C++ after Intel's
// Intrinsics Guide. Include this before a source in place of a compiler flag: EMULATE_avx512f for -mavx512f. So a processor
// with AVX2 runs the kernels for newer ones.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(EMULATE_avx512f)
#define __AVX512F__ 1
#endif
#if defined(EMULATE_avx512bw)
#define __AVX512BW__ 1
#endif
#if defined(EMULATE_avx512vnni)
#define __AVX512VNNI__ 1
#endif
#if defined(EMULATE_avx512bf16)
#define __AVX512BF16__ 1
#endif
#if defined(EMULATE_avxvnni)
#define __AVXVNNI__ 1
#endif

// Vectors as arguments of templates lose an attribute that says how they may be read from memory, which happens nowhere here.
#pragma GCC diagnostic ignored "-Wignored-attributes"

// Code that is not copied to every use takes a fraction of the time to compile.
#define OUT_OF_LINE __attribute__((noinline))

namespace emulated {

template <class To, class From>
To as(const From& value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

// An array of the elements of a vector.
template <class T, class Vector>
struct Elements {
    static constexpr int COUNT = sizeof(Vector) / sizeof(T);
    T at[COUNT];
};
template <class T, class Vector>
Elements<T, Vector> elements(const Vector& value) {
    return as<Elements<T, Vector>>(value);
}

template <class Half, class Work>
__m512i by_halves(__m512i a, __m512i b, Work work) {
    auto x = elements<Half>(a), y = elements<Half>(b);
    for (int i = 0; i < 2; ++i) x.at[i] = work(x.at[i], y.at[i]);
    return as<__m512i>(x);
}

OUT_OF_LINE inline __m512i madd_epi16(__m512i a, __m512i b) {
    return by_halves<__m256i>(a, b, [](__m256i x, __m256i y) { return _mm256_madd_epi16(x, y); });
}
OUT_OF_LINE inline __m512i shuffle_epi8(__m512i a, __m512i b) {
    return by_halves<__m256i>(a, b, [](__m256i x, __m256i y) { return _mm256_shuffle_epi8(x, y); });
}

// Adds the products of `A`s and `B`s that share a lane of 32 bits.
template <class A, class B, class Vector>
OUT_OF_LINE Vector add_products(Vector sum, Vector a, Vector b) {
    auto sums = elements<std::uint32_t>(sum);
    auto x = elements<A>(a);
    auto y = elements<B>(b);
    constexpr int OF_LANE = 4 / sizeof(A);
    for (int i = 0; i < x.COUNT; ++i) sums.at[i / OF_LANE] += static_cast<std::uint32_t>(x.at[i] * y.at[i]);
    return as<Vector>(sums);
}

template <class Vector>
Vector dpbusd(Vector sum, Vector a, Vector b) {
    return add_products<std::uint8_t, std::int8_t>(sum, a, b);
}
template <class Vector>
Vector dpwssd(Vector sum, Vector a, Vector b) {
    return add_products<std::int16_t, std::int16_t>(sum, a, b);
}

inline float flushed(float value) { return __builtin_fabsf(value) < 0x1p-126f ? __builtin_copysignf(0, value) : value; }

// To the nearest, halves to even; denormals become 0, NaNs quiet.
inline std::uint16_t to_bf16(float value) {
    auto bits = as<std::uint32_t>(flushed(value));
    if (value != value) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(std::uint16_t bits) { return flushed(as<float>(static_cast<std::uint32_t>(bits) << 16)); }

OUT_OF_LINE inline __m256bh cvtneps_pbh(__m512 a) {
    auto x = elements<float>(a);
    Elements<std::uint16_t, __m256bh> result;
    for (int i = 0; i < 16; ++i) result.at[i] = to_bf16(x.at[i]);
    return as<__m256bh>(result);
}
OUT_OF_LINE inline __m512bh cvtne2ps_pbh(__m512 upper, __m512 lower) {
    struct {
        __m256bh lower, upper;
    } both = {cvtneps_pbh(lower), cvtneps_pbh(upper)};
    return as<__m512bh>(both);
}
OUT_OF_LINE inline __m512 dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    auto sums = elements<float>(sum);
    auto x = elements<std::uint16_t>(a), y = elements<std::uint16_t>(b);
    for (int i = 0; i < 16; ++i)
        for (int odd = 1; odd >= 0; --odd)
            sums.at[i] = flushed(__builtin_fmaf(from_bf16(x.at[2 * i + odd]), from_bf16(y.at[2 * i + odd]), flushed(sums.at[i])));
    return as<__m512>(sums);
}

// Of the masked forms, the kernels use those in which all elements count, and `scalef`'s.
OUT_OF_LINE inline __m512i cvtepi8_epi16(std::uint32_t, __m256i a) {
    auto x = elements<std::int8_t>(a);
    Elements<std::int16_t, __m512i> result;
    for (int i = 0; i < 32; ++i) result.at[i] = x.at[i];
    return as<__m512i>(result);
}
OUT_OF_LINE inline __m512i permutexvar_epi16(std::uint32_t, __m512i places, __m512i a) {
    auto order = elements<std::uint16_t>(places), x = elements<std::uint16_t>(a), result = x;
    for (int i = 0; i < 32; ++i) result.at[i] = x.at[order.at[i] % 32];
    return as<__m512i>(result);
}
OUT_OF_LINE inline __m512 cvtph_ps(std::uint16_t, __m256i a) {
    auto x = elements<__m128i>(a);
    Elements<__m256, __m512> result;
    for (int i = 0; i < 2; ++i) result.at[i] = _mm256_cvtph_ps(x.at[i]);
    return as<__m512>(result);
}
OUT_OF_LINE inline __m512i cvtps_epi32(std::uint16_t, __m512 a) {
    auto x = elements<__m256>(a);
    Elements<__m256i, __m512i> result;
    for (int i = 0; i < 2; ++i) result.at[i] = _mm256_cvtps_epi32(x.at[i]);
    return as<__m512i>(result);
}
template <class Work>
__m512 each_float(__m512 a, Work work) {
    auto x = elements<float>(a);
    for (int i = 0; i < 16; ++i) x.at[i] = work(x.at[i], i);
    return as<__m512>(x);
}
OUT_OF_LINE inline __m512 roundscale_ps(std::uint16_t, __m512 a, int) {
    return each_float(a, [](float x, int) { return __builtin_nearbyintf(x); });
}
OUT_OF_LINE inline __m512 scalef_ps(std::uint16_t mask, __m512 a, __m512 b) {
    auto exponents = elements<float>(b);
    return each_float(a, [&](float x, int i) {
        float power = __builtin_floorf(exponents.at[i]);
        if (power != power) return mask >> i & 1 ? power : 0.0f;
        int bounded = power > 512 ? 512 : power < -512 ? -512 : static_cast<int>(power);
        return mask >> i & 1 ? __builtin_scalbnf(x, bounded) : 0.0f;
    });
}
OUT_OF_LINE inline std::uint16_t not_less(__m512 a, __m512 b) {
    auto x = elements<float>(a), y = elements<float>(b);
    std::uint16_t mask = 0;
    for (int i = 0; i < 16; ++i) mask = static_cast<std::uint16_t>(mask | !(x.at[i] < y.at[i]) << i);
    return mask;
}
template <int PREDICATE>
std::uint16_t compare(__m512 a, __m512 b) {
    static_assert(PREDICATE == _CMP_NLT_UQ);
    return not_less(a, b);
}

}  // namespace emulated

#undef _mm512_cmp_ps_mask
#undef _mm512_maskz_roundscale_ps
#define _mm512_cmp_ps_mask(a, b, predicate) emulated::compare<predicate>(a, b)
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_dpbusd_epi32 emulated::dpbusd<__m512i>
#define _mm512_dpwssd_epi32 emulated::dpwssd<__m512i>
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_maskz_cvtepi8_epi16 emulated::cvtepi8_epi16
#define _mm512_maskz_cvtph_ps emulated::cvtph_ps
#define _mm512_maskz_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_maskz_permutexvar_epi16 emulated::permutexvar_epi16
#define _mm512_maskz_roundscale_ps emulated::roundscale_ps
#define _mm512_maskz_scalef_ps emulated::scalef_ps
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#define _mm256_dpbusd_avx_epi32 emulated::dpbusd<__m256i>
#define _mm256_dpwssd_avx_epi32 emulated::dpwssd<__m256i>
