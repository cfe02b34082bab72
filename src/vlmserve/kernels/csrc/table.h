// What every instruction set offers: the same functions, compiled once for each.
#pragma once

#include <cstdint>

enum DType : int { FLOAT32 = 0, BFLOAT16 = 1 };

// y = activation(x w^T + bias), or, where the weight holds gates and ups in turn, activation(gate) * up; plus residual.
struct LinearArgs {
    const void* x;         // [rows, in] of `dtype`, `x_stride` elements from row to row
    const void* weight;    // as `pack` leaves it
    const void* bias;      // [out] of `dtype`, or null; not with `gated`
    const void* residual;  // as y, `y_stride` elements from row to row, or null; may be y itself
    void* y;               // [rows, out] ([rows, out / 2] if gated) of `dtype`, or float32 if `float_output`
    void* scratch;         // `linear_scratch(rows, in, dtype)` bytes
    long rows, in, out, x_stride, y_stride;
    int dtype, activation, gated, float_output, threads;
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

struct EncoderAttentionArgs {
    const void* qkv;  // [pictures, length, 3, heads, head_size] contiguous
    void* y;          // [pictures, length, heads, head_size] contiguous
    void* scratch;    // `encoder_attention_scratch` bytes
    long pictures, length, heads, head_size;
    float scale;  // of scores, above 0
    int dtype, threads;
};

struct Kernels {
    const char* isa;
    void (*pack)(const void* weight, void* packed, long out, long in, int dtype, int gated);
    void (*gather)(const void* packed, const std::int64_t* ids, void* y, long count, long in, int dtype);
    long (*linear_scratch)(long rows, long in, int dtype);
    void (*linear)(const LinearArgs&);
    void (*norm)(const NormArgs&);
    long (*encoder_attention_scratch)(const EncoderAttentionArgs&);
    void (*encoder_attention)(const EncoderAttentionArgs&);
};
