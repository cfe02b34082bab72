// Vectors of the machine's register width, in the compiler's vector type: one source for every instruction set.
//
// This file and its includers must not use C++ library templates: the linker could keep a copy that was compiled for a newer
// processor.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

// Floats per register, and number of registers. Wider vectors would go through the stack in every operation.
#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

template <class Element, int COUNT>
struct VectorOf {
    typedef Element Type __attribute__((vector_size(COUNT * sizeof(Element))));
};

typedef VectorOf<float, LANES>::Type f32v;
typedef VectorOf<std::int32_t, LANES>::Type i32v;
typedef VectorOf<std::uint32_t, LANES>::Type u32v;
typedef VectorOf<std::uint16_t, LANES>::Type u16v;
typedef VectorOf<signed char, LANES>::Type s8v;

constexpr float LOG2_E = 1.44269504f;

// The storage of bfloat16: the upper half of a float.
struct bf16 {
    std::uint16_t bits;
};

// 16 bits with a 5-bit exponent: finer than bfloat16, with a range of 6e-8 to 65504.
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

INLINE f32v broadcast(float value) { return value - f32v{}; }

INLINE float to_float(float value) { return value; }
INLINE float to_float(bf16 value) { return bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }

INLINE f32v load(const float* from) {
    f32v value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

// GCC 12 emits five instructions for this conversion instead of one.
INLINE f32v load(const bf16* from) {
#if defined(__AVX2__)
    if constexpr (LANES == 8)
        return bit_cast<f32v>(bit_cast<u32v>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))) << 16);
#endif
    u16v bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    return bit_cast<f32v>(__builtin_convertvector(bits, u32v) << 16);
}

INLINE f32v load(const f16* from) {
#if defined(__AVX512F__)
    if constexpr (LANES == 16)
        // The masked form avoids GCC's warning about uninitialized values.
        return bit_cast<f32v>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#endif
#if defined(__F16C__)
    if constexpr (LANES == 8)
        return bit_cast<f32v>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__aarch64__)
    return bit_cast<f32v>(vcvt_f32_f16(vld1_f16(reinterpret_cast<const float16_t*>(from))));
#endif
    u16v bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    u32v wide = __builtin_convertvector(bits, u32v);
    // The exponent's bias is 15 instead of 127.
    f32v magnitude = bit_cast<f32v>((wide & 0x7fffu) << 13) * 0x1p112f;
    return bit_cast<f32v>(bit_cast<u32v>(magnitude) | (wide & 0x8000u) << 16);
}

// Rounds to nearest even. Too large values become the maximum.
INLINE f16 to_f16(float value) {
    std::uint32_t bits = bit_cast<std::uint32_t>(value), magnitude = bits & 0x7fffffffu, result;
    if (magnitude < bit_cast<std::uint32_t>(0x1p-14f)) {
        // Numbers near 0.5 have the spacing of the smallest f16, so the sum rounds to it.
        result = bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<std::uint32_t>(0.5f);
    } else {
        result = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
        if (magnitude > bit_cast<std::uint32_t>(65504.0f)) result = 0x7bffu;
    }
    return {static_cast<std::uint16_t>(result | (bits >> 16 & 0x8000u))};
}

INLINE float to_float(f16 value) {
    f16 all[LANES] = {value};
    return load(all)[0];
}

INLINE void store(float* to, f32v value) { __builtin_memcpy(to, &value, sizeof value); }

// Rounds to nearest even. NaN stays NaN.
INLINE u16v round_to_bf16(f32v value) {
#if defined(__AVX512BF16__)
    return bit_cast<u16v>(_mm512_cvtneps_pbh(bit_cast<__m512>(value)));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return bit_cast<u16v>(vcvt_bf16_f32(bit_cast<float32x4_t>(value)));
#else
    u32v bits = bit_cast<u32v>(value);
    u32v rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    u32v is_nan = bit_cast<u32v>(value != value);
    rounded = (rounded & ~is_nan) | ((bits | 0x400000u) & is_nan);
    return __builtin_convertvector(rounded >> 16, u16v);
#endif
}

INLINE void store(bf16* to, f32v value) {
    u16v bits = round_to_bf16(value);
    __builtin_memcpy(to, &bits, sizeof bits);
}

// Loads the first `count` (1 to LANES) elements, padded with 0.
template <class T>
INLINE f32v load_some(const T* from, long count) {
    if (count == LANES) return load(from);
    T padded[LANES] = {};
    __builtin_memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(T));
    return load(padded);
}

template <class T>
INLINE void store_some(T* to, f32v value, long count) {
    if (count == LANES) return store(to, value);
    T padded[LANES];
    store(padded, value);
    __builtin_memcpy(to, padded, static_cast<std::size_t>(count) * sizeof(T));
}

// Combines all elements in a binary tree.
template <class Element, int COUNT = LANES, class Vector, class Combine>
INLINE Element reduce(Vector value, Combine combine) {
    if constexpr (COUNT == 2) {
        return combine(+value[0], +value[1]);
    } else {
        typedef typename VectorOf<Element, COUNT / 2>::Type Half;
        struct Halves {
            Half low, high;
        } halves = bit_cast<Halves>(value);
        return reduce<Element, COUNT / 2>(combine(halves.low, halves.high), combine);
    }
}

INLINE float sum(f32v value) { return reduce<float>(value, [](auto a, auto b) { return a + b; }); }
INLINE std::int32_t sum(i32v value) { return reduce<std::int32_t>(value, [](auto a, auto b) { return a + b; }); }
INLINE float largest(f32v value) { return reduce<float>(value, [](auto a, auto b) { return a > b ? a : b; }); }

INLINE f32v choose(i32v mask, f32v one, f32v other) { return mask ? one : other; }

// Lane numbers, starting at `first`.
INLINE i32v lanes_from(long first) {
    i32v lanes{};
    for (int i = 0; i < LANES; ++i) lanes[i] = i;
    return lanes + static_cast<std::int32_t>(first);
}

// Rounds to nearest even. NaN and values of at least 65,536 become 0, so that no sum overflows.
INLINE i32v round_to_integers(f32v value) {
    value = choose(value * value < 4294967296.0f, value, f32v{});
#if defined(__AVX512F__)
    // The masked form avoids GCC's warning about uninitialized values.
    if constexpr (LANES == 16) return bit_cast<i32v>(_mm512_maskz_cvtps_epi32(0xffff, bit_cast<__m512>(value)));
#endif
#if defined(__AVX2__)
    if constexpr (LANES == 8) return bit_cast<i32v>(_mm256_cvtps_epi32(bit_cast<__m256>(value)));
#elif defined(__aarch64__)
    return bit_cast<i32v>(vcvtnq_s32_f32(bit_cast<float32x4_t>(value)));
#endif
    f32v magic = value + 12582912.0f;
    return bit_cast<i32v>(magic) - bit_cast<std::int32_t>(12582912.0f);
}

INLINE f32v minimum(f32v a, f32v b) { return choose(a < b, a, b); }
INLINE f32v maximum(f32v a, f32v b) { return choose(a > b, a, b); }

// Whether instructions round to integers and multiply by powers of two.
#if defined(__AVX512F__)
constexpr bool SCALES = true;

INLINE f32v nearest_integer(f32v x) {
    return bit_cast<f32v>(_mm512_maskz_roundscale_ps(0xffff, bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// p * 2^n, or 0 where x is below `least`.
INLINE f32v scale_from(f32v x, float least, f32v p, f32v n) {
    __mmask16 counts = _mm512_cmp_ps_mask(bit_cast<__m512>(x), bit_cast<__m512>(broadcast(least)), _CMP_NLT_UQ);
    return bit_cast<f32v>(_mm512_maskz_scalef_ps(counts, bit_cast<__m512>(p), bit_cast<__m512>(n)));
}
#else
constexpr bool SCALES = false;
INLINE f32v nearest_integer(f32v x) { return x; }
INLINE f32v scale_from(f32v, float, f32v p, f32v) { return p; }
#endif

// e^x to about one unit in the last place: 2^n times a polynomial of the rest (Cody and Waite's reduction). 0 below -87.3,
// where results would be denormal; infinity above 88.7; NaN stays NaN.
INLINE f32v exponential(f32v x) {
    constexpr float LEAST = -87.33654f, MOST = 88.72283f;
    // These instructions return infinity slightly above MOST.
    f32v clamped = minimum(maximum(x, broadcast(LEAST)), broadcast(SCALES ? MOST + 1.0f : MOST));
    f32v exact = clamped * LOG2_E, n = SCALES ? nearest_integer(exact) : (exact + 12582912.0f) - 12582912.0f;
    f32v r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    f32v p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    if constexpr (SCALES) return choose(x == x, scale_from(x, LEAST, p, n), x);
    // In two steps, because 2^128 is not a float, though e^88.7 is.
    i32v exponent = __builtin_convertvector(n, i32v);
    i32v half = exponent >> 1;
    p = p * bit_cast<f32v>((half + 127) << 23) * bit_cast<f32v>((exponent - half + 127) << 23);
    p = choose(x < LEAST, f32v{}, p);
    p = choose(x > MOST, broadcast(__builtin_inff()), p);
    return choose(x == x, p, x);
}

// 2^x for x <= 0, to about one unit in the last place, or with COARSE to a relative error of 3e-6. 0 below -126; NaN stays NaN.
template <bool COARSE = false>
INLINE f32v power_of_two(f32v x) {
    constexpr float LEAST = -126.0f;
    f32v shifted = x + 12582912.0f, n = SCALES ? nearest_integer(x) : shifted - 12582912.0f, r = x - n, p;
    if constexpr (COARSE) {
        p = broadcast(9.5701e-3f) * r + 5.591786e-2f;
        p = p * r + 2.4024745e-1f;
        p = p * r + 6.9312181e-1f;
        p = p * r + 9.9999926e-1f;
    } else {
        p = broadcast(1.535336188e-4f) * r + 1.339887440e-3f;
        p = p * r + 9.618437357e-3f;
        p = p * r + 5.550332471e-2f;
        p = p * r + 2.402264791e-1f;
        p = p * r + 6.931472028e-1f;
        p = p * r + 1.0f;
    }
    if constexpr (SCALES) return scale_from(x, LEAST, p, n);
    // Unsigned, because this overflows where x is below LEAST, and is not used there.
    p = bit_cast<f32v>(bit_cast<u32v>(p) + (bit_cast<u32v>(shifted) << 23));
    return choose(x < LEAST, f32v{}, p);
}

INLINE float power_of_two(float x) { return power_of_two<>(broadcast(x))[0]; }

// Computed from e^-|x|, which neither overflows nor loses precision.
INLINE f32v sigmoid(f32v x) {
    f32v power = power_of_two<>(choose(x < 0.0f, x, -x) * LOG2_E);
    return choose(x < 0.0f, power, broadcast(1.0f)) / (1.0f + power);
}

// Computed from the sigmoid.
INLINE f32v hyperbolic_tangent(f32v x) {
    // For small x the difference would cancel, but the series is exact enough.
    f32v square = x * x;
    f32v series = x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315))));
    f32v result = 2.0f * sigmoid(2.0f * x) - 1.0f;
    return choose(square < 0.01f, series, result);
}

// The error function, absolute error below 2e-7 (Abramowitz and Stegun, 7.1.26).
INLINE f32v error_function(f32v x) {
    f32v size = choose(x < 0.0f, -x, x);
    f32v t = 1.0f / (1.0f + 0.3275911f * size);
    f32v p = broadcast(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    f32v result = 1.0f - p * t * exponential(-size * size);
    return choose(x < 0.0f, -result, result);
}

enum Activation : int { IDENTITY = 0, SILU = 1, GELU = 2, GELU_TANH = 3, QUICK_GELU = 4, RELU = 5 };

INLINE f32v activate(int kind, f32v x) {
    switch (kind) {
        case SILU: return x * sigmoid(x);
        case GELU: return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
        // (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        case GELU_TANH: return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
        case QUICK_GELU: return x * sigmoid(1.702f * x);
        case RELU: return maximum(x, f32v{});
        default: return x;
    }
}
