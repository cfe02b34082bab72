// Operand formats of matmuls, and how many sums fit into registers.
#pragma once

#include "table.h"
#include "threads.h"
#include "vector.h"

namespace {

constexpr long TILE = 32, PANEL = 16;
constexpr int VECTORS = TILE / LANES, PANEL_VECTORS = PANEL / LANES;

// Sums that fit into registers, in addition to weights and an input. Weights that take two steps need more registers.
constexpr int SUMS = REGISTERS == 32 ? 24 : 12;
constexpr int most_sums(int steps) { return REGISTERS == 16 && steps > 1 ? 8 : SUMS; }
// Arm has many short registers, but its instructions take no memory operands.
constexpr bool LOADS_APART = LANES == 4 && REGISTERS == 32;

// Rows of a block: two vectors of a tile (four short ones) then fill the registers. If weights take two steps, the compiler
// needs more registers.
constexpr int rows_of_block(int steps) { return LANES == 16 ? 12 : steps == 1 ? 6 : LOADS_APART ? 5 : 4; }

// Whether the sums of some rows and vectors fit into registers. per_sum, per_vector: registers of each sum and each vector of
// weights, if operands are loaded separately; three more hold an input and masks.
constexpr bool sums_fit(int rows, int vectors, int sums, int per_sum, int per_vector) {
    return rows * vectors <= sums &&
           (!LOADS_APART || per_sum * rows * vectors + per_vector * vectors + 3 <= REGISTERS);
}

// Vectors of a tile to compute at once with some rows, a divisor of all.
constexpr int vectors_with(int rows, int sums, int per_sum, int per_vector) {
    int vectors = VECTORS;
    while (vectors > 1 && !sums_fit(rows, vectors, sums, per_sum, per_vector)) vectors /= 2;
    return vectors;
}
template <class Format>
constexpr int vectors_with(int rows) {
    return vectors_with(rows, most_sums(Format::STEPS), 1, Format::STEPS);
}

// An operand format. `Weights` is a vector of weights, read by step `step` of STEPS from a unit of PAIR inputs. `Inner` is the
// type of results that become `Input`s of another matmul.
struct Float32 {
    typedef float Element;
    typedef float Input;
    typedef float Inner;
    typedef f32v Weights;
    static constexpr long PAIR = 1;
    static constexpr int STEPS = 1, BLOCK = rows_of_block(STEPS);
    static constexpr bool EXPANDED = false;
    INLINE Input input(const Element* x) { return *x; }
    INLINE Weights weights(const Element* packed, int) { return load(packed); }
    INLINE Weights first_of_pair(const Element* packed) { return load(packed); }
    INLINE void multiply(f32v& sum, const Input& x, Weights w, int) { sum += x * w; }
};

// The first or second elements of a vector of bfloat16 pairs, as float32.
INLINE f32v half_of_pairs(const bf16* packed, int step) {
    u32v pairs;
    __builtin_memcpy(&pairs, packed, sizeof pairs);
    return bit_cast<f32v>(step == 0 ? pairs << 16 : pairs & 0xffff0000u);
}

struct BFloat16 {
    typedef bf16 Element;
    static constexpr long PAIR = 2;
    static constexpr bool EXPANDED = false;
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    // An instruction multiplies pairs. Arm's matrix instructions (bfmmla; smmla for bytes) take tiles of two outputs with four
    // (eight) inputs each, so panels would be zipped while they are read, and rows would come in twos. That gains nothing for
    // few rows, which are limited by reading weights; many rows were not measured.
    typedef std::uint32_t Input;
    typedef bf16 Inner;
    typedef u32v Weights;
    static constexpr int STEPS = 1, BLOCK = rows_of_block(STEPS);
    INLINE Input input(const Element* x) {
        Input pair;
        __builtin_memcpy(&pair, x, sizeof pair);
        return pair;
    }
    INLINE Weights weights(const Element* packed, int) {
        Weights pairs;
        __builtin_memcpy(&pairs, packed, sizeof pairs);
        return pairs;
    }
    INLINE Weights first_of_pair(const Element* packed) { return weights(packed, 0) & 0xffffu; }
    INLINE void multiply(f32v& sum, const Input& x, Weights w, int) {
#if defined(__AVX512BF16__)
        u32v pair = x - u32v{};
        sum = bit_cast<f32v>(
            _mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(pair), bit_cast<__m512bh>(w)));
#else
        sum = bit_cast<f32v>(vbfdotq_lane_f32(bit_cast<float32x4_t>(sum), bit_cast<bfloat16x8_t>(w),
                                              vreinterpret_bf16_u64(vcreate_u64(x)), 0));
#endif
    }
#else
    struct Input {
        float values[2];
    };
    typedef float Inner;
    typedef f32v Weights;
    static constexpr int STEPS = 2, BLOCK = rows_of_block(STEPS);
    INLINE Input input(const Element* x) { return {{to_float(x[0]), to_float(x[1])}}; }
    INLINE Weights weights(const Element* packed, int step) { return half_of_pairs(packed, step); }
    INLINE Weights first_of_pair(const Element* packed) { return weights(packed, 0); }
    INLINE void multiply(f32v& sum, const Input& x, Weights w, int step) { sum += x.values[step] * w; }
#endif
};

// For many rows, if a block of float32 has more rows than a block of pairs that take two steps: weights are expanded first.
struct ExpandedBFloat16 {
    typedef bf16 Element;
    typedef float Input;
    static constexpr long PAIR = 1;
    static constexpr int BLOCK = Float32::BLOCK;
    static constexpr bool EXPANDED = true;
    INLINE Input input(const Element* x) { return to_float(*x); }
};
constexpr bool EXPANDS_MANY_ROWS = BFloat16::BLOCK < Float32::BLOCK;
// With fewer rows, expanding takes longer than it saves.
constexpr long EXPANDED_ROWS = 24;

// The format of an element type.
template <class Element>
struct FormatOf;
template <>
struct FormatOf<float> {
    typedef Float32 Type;
};
template <>
struct FormatOf<bf16> {
    typedef BFloat16 Type;
};

template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls `work` with a number of rows, 1 to MOST, as a constant.
template <int MOST, class Work>
INLINE void with_rows(long rows, Work work) {
    if constexpr (MOST > 1)
        if (rows < MOST) return with_rows<MOST - 1>(rows, work);
    work(Count<MOST>{});
}

}  // namespace
