// Vectors of 16 floats in the compiler's own vector type: one source for every instruction set.
//
// Nothing here or in a file that includes this one may use the C++ library's templates: the linker could keep the copy
// that was compiled for a newer processor than the one it runs on.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef std::int32_t i32x16 __attribute__((vector_size(64)));
typedef std::uint32_t u32x16 __attribute__((vector_size(64)));
typedef std::uint16_t u16x16 __attribute__((vector_size(32)));

constexpr float LOG2_E = 1.44269504f;

// How a bfloat16 number is stored: the upper half of a float.
struct bf16 {
    std::uint16_t bits;
};

// A number of 16 bits with 5 of exponent: finer than bfloat16, and with a range of 6e-8 to 65504.
struct f16 {
    std::uint16_t bits;
};

template <class To, class From>
INLINE To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
    To result;
    __builtin_memcpy(&result, &value, sizeof result);
    return result;
}

INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE long larger(long a, long b) { return a > b ? a : b; }

INLINE f32x16 broadcast(float value) { return value - f32x16{}; }

INLINE float to_float(float value) { return value; }
INLINE float to_float(bf16 value) { return bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }

INLINE f32x16 load(const float* from) {
    f32x16 value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

INLINE f32x16 load(const bf16* from) {
    u16x16 bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    return bit_cast<f32x16>(__builtin_convertvector(bits, u32x16) << 16);
}

INLINE f32x16 load(const f16* from) {
#if defined(__AVX512F__)
    // The masked form, of which GCC does not think that it reads what was never written.
    return bit_cast<f32x16>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
    const __m128i* halves = reinterpret_cast<const __m128i*>(from);
    __m256 values[2] = {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
    f32x16 value;
    __builtin_memcpy(&value, values, sizeof value);
    return value;
#else
    u16x16 bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    u32x16 wide = __builtin_convertvector(bits, u32x16);
    // The exponent's bias is 15 instead of 127.
    f32x16 magnitude = bit_cast<f32x16>((wide & 0x7fffu) << 13) * 0x1p112f;
    return bit_cast<f32x16>(bit_cast<u32x16>(magnitude) | (wide & 0x8000u) << 16);
#endif
}

// To the nearest, halves to even; what is too large becomes the largest.
INLINE f16 to_f16(float value) {
    std::uint32_t bits = bit_cast<std::uint32_t>(value), magnitude = bits & 0x7fffffffu, result;
    if (magnitude < bit_cast<std::uint32_t>(0x1p-14f)) {
        // Numbers at 0.5 are as far apart as the smallest ones here: the sum is rounded to them.
        result = bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<std::uint32_t>(0.5f);
    } else {
        result = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
        if (magnitude > bit_cast<std::uint32_t>(65504.0f)) result = 0x7bffu;
    }
    return {static_cast<std::uint16_t>(result | (bits >> 16 & 0x8000u))};
}

INLINE void store(float* to, f32x16 value) { __builtin_memcpy(to, &value, sizeof value); }

// To the nearest, halves to even; NaN stays NaN.
INLINE u16x16 round_to_bf16(f32x16 value) {
#if defined(__AVX512BF16__)
    return bit_cast<u16x16>(_mm512_cvtneps_pbh(bit_cast<__m512>(value)));
#else
    u32x16 bits = bit_cast<u32x16>(value);
    u32x16 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    u32x16 is_nan = bit_cast<u32x16>(value != value);
    rounded = (rounded & ~is_nan) | ((bits | 0x400000u) & is_nan);
    return __builtin_convertvector(rounded >> 16, u16x16);
#endif
}

INLINE void store(bf16* to, f32x16 value) {
    u16x16 bits = round_to_bf16(value);
    __builtin_memcpy(to, &bits, sizeof bits);
}

// The first `count` (1 to 16) elements; the others are 0.
template <class T>
INLINE f32x16 load_some(const T* from, long count) {
    if (count == 16) return load(from);
    T padded[16] = {};
    __builtin_memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(T));
    return load(padded);
}

template <class T>
INLINE void store_some(T* to, f32x16 value, long count) {
    if (count == 16) return store(to, value);
    T padded[16];
    store(padded, value);
    __builtin_memcpy(to, padded, static_cast<std::size_t>(count) * sizeof(T));
}

template <class Vector>
INLINE auto sum(Vector value) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) value[i] += value[i + half];
    return +value[0];
}

INLINE f32x16 choose(i32x16 mask, f32x16 one, f32x16 other) {
    return bit_cast<f32x16>((bit_cast<i32x16>(one) & mask) | (bit_cast<i32x16>(other) & ~mask));
}

INLINE f32x16 minimum(f32x16 a, f32x16 b) { return choose(a < b, a, b); }
INLINE f32x16 maximum(f32x16 a, f32x16 b) { return choose(a > b, a, b); }

INLINE float largest(f32x16 value) {
    struct Eights {
        f32x8 low, high;
    } eights = bit_cast<Eights>(value);
    struct Fours {
        f32x4 low, high;
    } fours = bit_cast<Fours>(eights.low > eights.high ? eights.low : eights.high);
    f32x4 four = fours.low > fours.high ? fours.low : fours.high;
    float first = four[0] > four[1] ? four[0] : four[1], second = four[2] > four[3] ? four[2] : four[3];
    return first > second ? first : second;
}

// e^x to about one unit in the last place: 2^n times a polynomial of the rest (Cody and Waite's reduction). 0 below
// -87.3, where results would be denormal; infinity above 88.7; NaN stays NaN.
INLINE f32x16 exponential(f32x16 x) {
    f32x16 clamped = minimum(maximum(x, broadcast(-87.33654f)), broadcast(88.72283f));
    f32x16 shifted = clamped * LOG2_E + 12582912.0f;
    f32x16 n = shifted - 12582912.0f;
    f32x16 r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    f32x16 p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    // In two steps: 2^128 is not a float, though e^88.7 is.
    i32x16 exponent = __builtin_convertvector(n, i32x16);
    i32x16 half = exponent >> 1;
    p = p * bit_cast<f32x16>((half + 127) << 23) * bit_cast<f32x16>((exponent - half + 127) << 23);
    p = choose(x < -87.33654f, f32x16{}, p);
    p = choose(x > 88.72283f, broadcast(__builtin_inff()), p);
    return choose(x == x, p, x);
}

// 2^x for x <= 0, to about one unit in the last place; 0 below -126; NaN stays NaN.
INLINE f32x16 power_of_two(f32x16 x) {
    f32x16 shifted = x + 12582912.0f;
    f32x16 r = x - (shifted - 12582912.0f);
    f32x16 p = broadcast(1.535336188e-4f);
    p = p * r + 1.339887440e-3f;
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472028e-1f;
    p = p * r + 1.0f;
    p = bit_cast<f32x16>(bit_cast<i32x16>(p) + (bit_cast<i32x16>(shifted) << 23));
    return choose(x < -126.0f, f32x16{}, p);
}

INLINE float power_of_two(float x) { return power_of_two(broadcast(x))[0]; }

INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exponential(-x)); }

// By the sigmoid, of which it is the stretched form.
INLINE f32x16 hyperbolic_tangent(f32x16 x) {
    // For small x the difference would cancel; the series is exact enough there.
    f32x16 square = x * x;
    f32x16 series = x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315))));
    f32x16 result = 2.0f * sigmoid(2.0f * x) - 1.0f;
    return choose(square < 0.01f, series, result);
}

// The error function, absolute error below 2e-7 (Abramowitz and Stegun, 7.1.26).
INLINE f32x16 error_function(f32x16 x) {
    f32x16 size = choose(x < 0.0f, -x, x);
    f32x16 t = 1.0f / (1.0f + 0.3275911f * size);
    f32x16 p = broadcast(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    f32x16 result = 1.0f - p * t * exponential(-size * size);
    return choose(x < 0.0f, -result, result);
}

enum Activation : int { IDENTITY = 0, SILU = 1, GELU = 2, GELU_TANH = 3, QUICK_GELU = 4, RELU = 5 };

INLINE f32x16 activate(int kind, f32x16 x) {
    switch (kind) {
        case SILU: return x * sigmoid(x);
        case GELU: return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
        case GELU_TANH: return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * (x + 0.044715f * x * x * x)));
        case QUICK_GELU: return x * sigmoid(1.702f * x);
        case RELU: return maximum(x, f32x16{});
        default: return x;
    }
}
