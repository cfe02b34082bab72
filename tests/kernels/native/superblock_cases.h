// Products with superblock weights, against a plain reading of their bytes in the order of llama.cpp's ggml-quants.c.
#pragma once

#include <algorithm>

#include "products.h"

enum SuperblockKind : int { Q2_K_KIND = 10, Q3_K_KIND, Q4_K_KIND, Q5_K_KIND, Q6_K_KIND, IQ4_XS_KIND = 23 };

inline long block_bytes(int kind) {
    constexpr long BYTES[] = {84, 110, 144, 176, 210};
    return kind == IQ4_XS_KIND ? 136 : BYTES[kind - Q2_K_KIND];
}

// A random float16 between 2^-10 and 2^-9.
inline void set_scale(std::uint8_t* to, Random& random) {
    auto bits = static_cast<std::uint16_t>(5 << 10 | random.below(1024));
    std::memcpy(to, &bits, 2);
}

inline double scale_at(const std::uint8_t* from) {
    std::uint16_t bits;
    std::memcpy(&bits, from, 2);
    return std::ldexp(1024 + (bits & 1023), (bits >> 10) - 25);
}

inline void six_bit_pair(const std::uint8_t* q, long group, int& scale, int& minimum) {
    if (group < 4) {
        scale = q[group] & 63;
        minimum = q[group + 4] & 63;
    } else {
        scale = (q[group + 4] & 15) | q[group - 4] >> 6 << 4;
        minimum = q[group + 4] >> 4 | q[group] >> 6 << 4;
    }
}

// Value i of a superblock.
inline double superblock_value(int kind, const std::uint8_t* block, long i) {
    long half = i / 128, place = i % 32, quarter = i % 128 / 32;
    if (kind == Q6_K_KIND) {
        int low = block[64 * half + i % 64] >> (i % 128 / 64 * 4) & 15, high = block[128 + 32 * half + place] >> (2 * quarter) & 3;
        auto scale = static_cast<signed char>(block[192 + i / 16]);
        return scale_at(block + 208) * scale * ((low | high << 4) - 32);
    }
    if (kind == Q3_K_KIND) {
        int low = block[32 + 32 * half + place] >> (2 * quarter) & 3, high = block[place] >> (4 * half + quarter) & 1;
        long group = i / 16;
        int scale = (block[96 + group % 8] >> (group / 8 * 4) & 15) | (block[104 + group % 4] >> (group / 4 * 2) & 3) << 4;
        return scale_at(block + 108) * (scale - 32) * (low - (high ? 0 : 4));
    }
    if (kind == Q2_K_KIND) {
        int value = block[16 + 32 * half + place] >> (2 * quarter) & 3, both = block[i / 16];
        return scale_at(block + 80) * (both & 15) * value - scale_at(block + 82) * (both >> 4);
    }
    if (kind == IQ4_XS_KIND) {
        long group = i / 32;
        int low = block[4 + group / 2] >> (group % 2 * 4) & 15, high = (block[2] | block[3] << 8) >> (2 * group) & 3;
        return scale_at(block) * ((low | high << 4) - 32) * VALUES_OF_CODES[block[8 + group * 16 + i % 16] >> (i % 32 / 16 * 4) & 15];
    }
    int scale, minimum, value = block[(kind == Q4_K_KIND ? 16 : 48) + i / 64 * 32 + place] >> (i % 64 / 32 * 4) & 15;
    six_bit_pair(block + 4, i / 32, scale, minimum);
    if (kind == Q5_K_KIND) value |= (block[16 + place] >> (i / 32) & 1) << 4;
    return scale_at(block) * scale * value - scale_at(block + 2) * minimum;
}

// Random blocks [out, in / 256] of a kind, packed, and what they stand for.
struct SuperblockWeight {
    int kind;
    long out, in;
    std::vector<double> values;
    std::unique_ptr<Memory> packed;

    SuperblockWeight(int kind, long out, long in, Random& random) : kind(kind), out(out), in(in) {
        long bytes = block_bytes(kind), count = out * in / 256;
        std::vector<std::uint8_t> blocks(static_cast<std::size_t>(count * bytes));
        for (auto& byte : blocks) byte = static_cast<std::uint8_t>(random.below(256));
        for (long i = 0; i < count; ++i) {
            std::uint8_t* block = blocks.data() + i * bytes;
            bool pairs = kind == Q4_K_KIND || kind == Q5_K_KIND, first = pairs || kind == IQ4_XS_KIND;
            set_scale(first ? block : block + bytes - (kind == Q2_K_KIND ? 4 : 2), random);
            if (pairs || kind == Q2_K_KIND) set_scale(pairs ? block + 2 : block + bytes - 2, random);
            for (long j = 0; j < 256; ++j) values.push_back(superblock_value(kind, block, j));
        }
        long tiles = (out + 31) / 32, offset = (8 * (tiles + 1) + 63) / 64 * 64;
        packed = std::make_unique<Memory>(offset + tiles * 32 * in / 256 * bytes);
        kernels->pack_blocks(blocks.data(), nullptr, static_cast<std::uint8_t*>(packed->data()), out, in, kind, 0, offset, 0, 2);
    }

    double at(long row, long column) const { return values[static_cast<std::size_t>(row * in + column)]; }
};

// A row of inputs as kernels round it.
inline std::vector<double> rounded_inputs(const Numbers& x, long place, long in) {
    std::vector<double> result;
    for (long start = 0; start < in; start += 256) {
        float most = 0;
        for (long i = start; i < start + 256; ++i) most = std::max(most, std::fabs(static_cast<float>(x[place + i])));
        float factor = 127 / most;
        for (long i = start; i < start + 256; ++i)
            result.push_back(std::nearbyint(static_cast<float>(x[place + i]) * factor) * static_cast<double>(most / 127));
    }
    return result;
}

struct SuperblockProduct {
    double value, allowed;
};

// Products of rows with a weight [rows, out], and how far a kernel may be from them.
inline std::vector<SuperblockProduct> superblock_products(const SuperblockWeight& weight, const Numbers& x, long rows, int dtype) {
    std::vector<SuperblockProduct> result;
    for (long row = 0; row < rows; ++row) {
        std::vector<double> inputs = rounded_inputs(x, row * weight.in, weight.in);
        for (long column = 0; column < weight.out; ++column) {
            double value = 0, magnitude = 1;
            for (long i = 0; i < weight.in; ++i) {
                double input = inputs[static_cast<std::size_t>(i)];
                value += weight.at(column, i) * input;
                // Weights and their minimums are multiplied apart.
                magnitude += (std::fabs(weight.at(column, i)) + 0.3) * std::fabs(input);
            }
            result.push_back({value, magnitude * 0x1p-20 + (dtype == BFLOAT16 ? std::fabs(value) * 0x1p-8 : 0)});
        }
    }
    return result;
}

inline void test_superblock_products(int kind, int dtype) {
    Random random(static_cast<std::uint64_t>(kind));
    SuperblockWeight weight(kind, 70, 512, random);
    Case results("superblocks of type " + std::to_string(kind) + ", " + name_of(dtype));
    constexpr long MOST = 19;
    Numbers x(dtype, MOST * weight.in, random);
    std::vector<SuperblockProduct> expected = superblock_products(weight, x, MOST, dtype);
    for (long rows : {1L, 2L, 4L, 7L, MOST}) {
        Numbers y(dtype, rows * weight.out);
        LinearArgs args = {};
        args.x = x.data();
        args.weight = weight.packed->data();
        args.y = y.data();
        args.rows = rows;
        args.in = args.x_stride = weight.in;
        args.out = args.y_stride = weight.out;
        args.dtype = dtype;
        args.threads = 2;
        args.weight_bits = SUPERBLOCKS;
        Memory scratch(kernels->linear_scratch(args), 0xff);
        args.scratch = scratch.data();
        kernels->linear(args);
        for (long i = 0; i < rows * weight.out; ++i) {
            const SuperblockProduct& one = expected[static_cast<std::size_t>(i)];
            results.compare(y[i], one.value, one.allowed);
        }
        results.require(scratch.intact() && y.intact() && weight.packed->intact(), "memory behind an array was written");
    }
}

inline void test_superblock_rows(int kind, int dtype) {
    Random random(7);
    SuperblockWeight weight(kind, 45, 512, random);
    Case results("rows of superblocks of type " + std::to_string(kind) + ", " + name_of(dtype));
    std::vector<std::int64_t> ids;
    for (long i = 0; i < 60; ++i) ids.push_back(random.below(weight.out));
    Numbers y(dtype, static_cast<long>(ids.size()) * weight.in);
    kernels->gather(weight.packed->data(), ids.data(), y.data(), static_cast<long>(ids.size()), weight.in, dtype, SUPERBLOCKS, 0, 0, 2);
    for (long i = 0; i < static_cast<long>(ids.size()); ++i)
        for (long column = 0; column < weight.in; ++column) {
            double expected = rounded(dtype, weight.at(ids[static_cast<std::size_t>(i)], column));
            results.compare(y[i * weight.in + column], expected, 1e-6 + std::fabs(expected) * (dtype == FLOAT32 ? 0x1p-22 : 0x1p-7));
        }
    results.require(y.intact(), "memory behind the rows was written");
}

inline void test_superblocks() {
    if (!kernels->has_superblocks) return;
    for (int kind : {Q2_K_KIND, Q3_K_KIND, Q4_K_KIND, Q5_K_KIND, Q6_K_KIND, IQ4_XS_KIND})
        for (int dtype : {FLOAT32, BFLOAT16}) {
            test_superblock_products(kind, dtype);
            test_superblock_rows(kind, dtype);
        }
}
