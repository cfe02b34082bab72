// What every instruction set offers: the same functions, compiled once for each.
#pragma once

#include <cstdint>

enum DType : int { FLOAT32 = 0, BFLOAT16 = 1 };

// y = activation(x w^T + bias), or, where the weight holds gates and ups in turn, activation(gate) * up; plus residual.
struct LinearArgs {
    const void* x;         // [rows, in] of `dtype`, `x_stride` elements from row to row
    const void* weight;    // as `pack` or `pack_quantized` leaves it
    const void* bias;      // [out] of `dtype`, or null; not with `gated`
    const void* residual;  // as y, `y_stride` elements from row to row, or null; may be y itself
    void* y;               // [rows, out] ([rows, out / 2] if gated) of `dtype`, or float32 if `float_output`
    void* scratch;         // `linear_scratch` bytes
    long rows, in, out, x_stride, y_stride;
    int dtype, activation, gated, float_output, threads;
    int weight_bits;  // 8, 4, or 0 for weights of `dtype`
    int group;        // with 4 bits: how many inputs share a scale, a multiple of 8
};

struct NormArgs {
    const void* x;       // [rows, size], `x_stride` elements from row to row
    const void* weight;  // [size]
    const void* bias;    // [size] for LayerNorm, null for RMSNorm
    void* y;             // [rows, size] contiguous
    long rows, size, x_stride;
    float eps;
    int dtype, threads;
};

struct Kernels {
    const char* isa;
    void (*pack)(const void* weight, void* packed, long out, long in, int dtype, int gated);
    void (*pack_quantized)(const std::uint8_t* weight, const float* scales, const float* shifts, std::uint8_t* packed, long out,
                           long in, int bits, long group, int gated);
    // Bits: as LinearArgs::weight_bits; rows of 4 bits cannot be gathered.
    void (*gather)(const void* packed, const std::int64_t* ids, void* y, long count, long in, int dtype, int bits);
    long (*linear_scratch)(const LinearArgs&);
    void (*linear)(const LinearArgs&);
    void (*norm)(const NormArgs&);
};
