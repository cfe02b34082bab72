// Products with weights of 8 or 4 bits, for any number of rows, and the choice between them and plain ones.
//
// Weights are unsigned: in 8 bits w = scale * (u - 128) with a scale for each output, in 4 bits w = scale * u + shift with
// both for each group of inputs of each output. Tiles hold 32 outputs, as those of linear.h do, and four inputs in turn:
// in 8 bits [in / 4][32][4] bytes; in 4 bits for each group its 32 scales, its 32 shifts (bfloat16), and
// [group / 8][32][4] bytes, whose lower halves are the first four inputs and whose upper halves are the next four. `in` is
// padded to a whole group (to four in 8 bits) with inputs of 0.
//
// With an instruction that multiplies bytes (VNNI) a row becomes 16-bit integers by a scale of its own, split into two
// signed bytes, x = scale * (256 * high + low): two products of bytes cost what one of bfloat16 does, and lose less than
// that would. Without, bytes become floats.
#pragma once

#include "linear.h"

namespace {

typedef std::uint8_t u8;
typedef signed char s8x16 __attribute__((vector_size(16)));
typedef std::int32_t i32x4 __attribute__((vector_size(16)));

INLINE long padded_in(const LinearArgs& args) {
    long unit = args.weight_bits == 4 ? args.group : 4;
    return (args.in + unit - 1) / unit * unit;
}

// Bytes of a tile: for every group (all inputs in 8 bits) what each output needs beside its weights, then the weights.
INLINE long group_bytes(long group) { return TILE * (2 * static_cast<long>(sizeof(bf16)) + group / 2); }
INLINE long tile_bytes(long in, int bits, long group) {
    return bits == 8 ? TILE * (static_cast<long>(sizeof(float)) + in) : in / group * group_bytes(group);
}

#if defined(__AVX512VNNI__)

constexpr int QUANTIZED_BLOCK = 4;  // 16 integer sums and 8 of floats, of 32 registers

// Four inputs of a row, high and low bytes.
struct Quad {
    std::int32_t high, low;
};

struct RowScale {
    float scale;
    std::int32_t high, low;  // sums of all bytes
};

INLINE i32x16 dot_bytes(i32x16 sum, __m512i weights, std::int32_t inputs) {
    return bit_cast<i32x16>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sum), weights, _mm512_set1_epi32(inputs)));
}

// Of the elements' sizes; NaN if one is not finite.
template <class T>
INLINE float largest_size(const T* x, long count) {
    f32x16 most{};
    i32x16 fine = broadcast(0) == broadcast(0);
    for (long i = 0; i < count; i += LANES) {
        f32x16 value = load_some(x + i, smaller(LANES, count - i));
        f32x16 size = maximum(value, -value);
        fine &= size < __builtin_inff();
        most = maximum(most, size);
    }
    for (int i = 0; i < LANES; ++i)
        if (!fine[i]) return __builtin_nanf("");
    return largest(most);
}

// Row `place` of a block of `count` rows, whose quads lie side by side. group_sums: of each group, likewise; or null.
template <class T>
void split_row(const T* x, long in, long padded, long group, Quad* quads, RowScale* scale, float* group_sums, long place,
               long count) {
    constexpr float MOST = 127 * 256 + 127;
    float most = largest_size(x, in);
    float factor = most > 0 ? MOST / most : 0.0f;
    RowScale result = {most == most ? most / MOST : most, 0, 0};
    for (long start = 0; start < padded; start += group) {
        i32x16 high_sums{}, low_sums{};
        for (long i = start; i < start + group; i += LANES) {
            f32x16 scaled = i < in ? load_some(x + i, smaller(LANES, in - i)) * factor : f32x16{};
            scaled = most == most ? scaled : f32x16{};
            i32x16 value = __builtin_convertvector(scaled + choose(scaled < 0.0f, broadcast(-0.5f), broadcast(0.5f)), i32x16);
            i32x16 high = (value + 128) >> 8, low = value - (high << 8);
            high_sums += high;
            low_sums += low;
            auto high_quads = bit_cast<i32x4>(__builtin_convertvector(high, s8x16));
            auto low_quads = bit_cast<i32x4>(__builtin_convertvector(low, s8x16));
            long num_quads = smaller(LANES, start + group - i) / 4;
            for (long quad = 0; quad < num_quads; ++quad)
                quads[(i / 4 + quad) * count + place] = {high_quads[quad], low_quads[quad]};
        }
        std::int32_t high_sum = sum(high_sums), low_sum = sum(low_sums);
        result.high += high_sum;
        result.low += low_sum;
        if (group_sums) group_sums[start / group * count + place] = static_cast<float>(256 * high_sum + low_sum);
    }
    scale[place] = result;
}

template <int ROWS>
INLINE void multiply_int8(const Quad* x, const RowScale* rows, const float*, const u8* tile, long in, long,
                          f32x16 (&sums)[ROWS][2]) {
    i32x16 high[ROWS][2] = {}, low[ROWS][2] = {};
    const u8* weights = tile + TILE * sizeof(float);
    for (long quad = 0; quad < in / 4; ++quad) {
        const u8* place = weights + quad * 4 * TILE;
        __builtin_prefetch(place + PREFETCH_BYTES);
        __builtin_prefetch(place + PREFETCH_BYTES + 64);
        __m512i first = _mm512_loadu_si512(place), second = _mm512_loadu_si512(place + 64);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; ++row) {
            Quad inputs = x[quad * ROWS + row];
            high[row][0] = dot_bytes(high[row][0], first, inputs.high);
            high[row][1] = dot_bytes(high[row][1], second, inputs.high);
            low[row][0] = dot_bytes(low[row][0], first, inputs.low);
            low[row][1] = dot_bytes(low[row][1], second, inputs.low);
        }
    }
    for (int half = 0; half < 2; ++half) {
        f32x16 scale = load(reinterpret_cast<const float*>(tile) + half * LANES);
        for (int row = 0; row < ROWS; ++row) {
            f32x16 upper = __builtin_convertvector(high[row][half] - 128 * rows[row].high, f32x16);
            f32x16 lower = __builtin_convertvector(low[row][half] - 128 * rows[row].low, f32x16);
            sums[row][half] = (256.0f * upper + lower) * scale * rows[row].scale;
        }
    }
}

template <int ROWS>
INLINE void multiply_int4(const Quad* x, const RowScale* rows, const float* group_sums, const u8* tile, long in, long group,
                          f32x16 (&sums)[ROWS][2]) {
    for (int row = 0; row < ROWS; ++row) sums[row][0] = sums[row][1] = f32x16{};
    const __m512i nibble = _mm512_set1_epi8(15);
    for (long number = 0; number < in / group; ++number, tile += group_bytes(group)) {
        i32x16 high[ROWS][2] = {}, low[ROWS][2] = {};
        const u8* weights = tile + TILE * 2 * sizeof(bf16);
        const Quad* inputs = x + number * group / 4 * ROWS;
        for (long octet = 0; octet < group / 8; ++octet, weights += 4 * TILE, inputs += 2 * ROWS) {
            __builtin_prefetch(weights + PREFETCH_BYTES);
            __builtin_prefetch(weights + PREFETCH_BYTES + 64);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                __m512i both = _mm512_loadu_si512(weights + half * 64);
                __m512i first = _mm512_and_si512(both, nibble);
                __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; ++row) {
                    high[row][half] = dot_bytes(high[row][half], first, inputs[row].high);
                    low[row][half] = dot_bytes(low[row][half], first, inputs[row].low);
                    high[row][half] = dot_bytes(high[row][half], second, inputs[ROWS + row].high);
                    low[row][half] = dot_bytes(low[row][half], second, inputs[ROWS + row].low);
                }
            }
        }
        const bf16* scales = reinterpret_cast<const bf16*>(tile);
        for (int half = 0; half < 2; ++half) {
            f32x16 scale = load(scales + half * LANES), shift = load(scales + TILE + half * LANES);
            for (int row = 0; row < ROWS; ++row) {
                f32x16 dot = __builtin_convertvector((high[row][half] << 8) + low[row][half], f32x16);
                sums[row][half] += dot * scale + group_sums[number * ROWS + row] * shift;
            }
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int half = 0; half < 2; ++half) sums[row][half] *= rows[row].scale;
}

#else

#if defined(__AVX512F__)
constexpr int QUANTIZED_BLOCK = 4;
#else
constexpr int QUANTIZED_BLOCK = 2;
#endif

struct Quad {
    float values[4];
};

struct RowScale {};

template <class T>
void split_row(const T* x, long in, long padded, long group, Quad* quads, RowScale*, float* group_sums, long place,
               long count) {
    for (long start = 0; start < padded; start += group) {
        float total = 0;
        for (long i = start; i < start + group; ++i) {
            float value = i < in ? to_float(x[i]) : 0.0f;
            quads[i / 4 * count + place].values[i % 4] = value;
            total += value;
        }
        if (group_sums) group_sums[start / group * count + place] = total;
    }
}

INLINE u32x16 load_bytes(const u8* from) {
    u32x16 value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

template <int ROWS>
INLINE void multiply_int8(const Quad* x, const RowScale*, const float*, const u8* tile, long in, long,
                          f32x16 (&sums)[ROWS][2]) {
    for (int row = 0; row < ROWS; ++row) sums[row][0] = sums[row][1] = f32x16{};
    const u8* weights = tile + TILE * sizeof(float);
    for (long quad = 0; quad < in / 4; ++quad)
        for (int half = 0; half < 2; ++half) {
            u32x16 bytes = load_bytes(weights + (quad * TILE + half * LANES) * 4);
            for (int i = 0; i < 4; ++i) {
                i32x16 value = bit_cast<i32x16>((bytes >> (8 * i)) & 255u) - 128;
                f32x16 weight = __builtin_convertvector(value, f32x16);
                for (int row = 0; row < ROWS; ++row) sums[row][half] += x[quad * ROWS + row].values[i] * weight;
            }
        }
    for (int row = 0; row < ROWS; ++row)
        for (int half = 0; half < 2; ++half)
            sums[row][half] *= load(reinterpret_cast<const float*>(tile) + half * LANES);
}

template <int ROWS>
INLINE void multiply_int4(const Quad* x, const RowScale*, const float* group_sums, const u8* tile, long in, long group,
                          f32x16 (&sums)[ROWS][2]) {
    for (int row = 0; row < ROWS; ++row) sums[row][0] = sums[row][1] = f32x16{};
    for (long number = 0; number < in / group; ++number, tile += group_bytes(group)) {
        const bf16* scales = reinterpret_cast<const bf16*>(tile);
        const u8* weights = tile + TILE * 2 * sizeof(bf16);
        const Quad* inputs = x + number * group / 4 * ROWS;
        for (int half = 0; half < 2; ++half) {
            f32x16 dots[ROWS] = {};
            for (long octet = 0; octet < group / 8; ++octet) {
                u32x16 bytes = load_bytes(weights + (octet * TILE + half * LANES) * 4);
                for (int i = 0; i < 8; ++i) {
                    u32x16 value = (bytes >> (8 * (i % 4) + 4 * (i / 4))) & 15u;
                    f32x16 weight = __builtin_convertvector(bit_cast<i32x16>(value), f32x16);
                    for (int row = 0; row < ROWS; ++row)
                        dots[row] += inputs[(2 * octet + i / 4) * ROWS + row].values[i % 4] * weight;
                }
            }
            f32x16 scale = load(scales + half * LANES), shift = load(scales + TILE + half * LANES);
            for (int row = 0; row < ROWS; ++row)
                sums[row][half] += dots[row] * scale + group_sums[number * ROWS + row] * shift;
        }
    }
}

#endif

// Where a call's prepared rows are in its scratch memory.
struct Prepared {
    Quad* quads;
    RowScale* scales;
    float* group_sums;
    long padded, groups;

    explicit Prepared(const LinearArgs& args) {
        padded = padded_in(args);
        groups = args.weight_bits == 4 ? padded / args.group : 0;
        quads = static_cast<Quad*>(args.scratch);
        group_sums = reinterpret_cast<float*>(quads + args.rows * (padded / 4));
        scales = reinterpret_cast<RowScale*>(group_sums + args.rows * groups);
    }
};

template <class T>
void prepare_block(const LinearArgs& args, const Prepared& to, long block) {
    long first = block_start(args.rows, block, QUANTIZED_BLOCK);
    long count = block_start(args.rows, block + 1, QUANTIZED_BLOCK) - first;
    for (long row = 0; row < count; ++row)
        split_row(static_cast<const T*>(args.x) + (first + row) * args.x_stride, args.in, to.padded,
                  to.groups ? args.group : to.padded, to.quads + first * (to.padded / 4), to.scales + first,
                  to.groups ? to.group_sums + first * to.groups : nullptr, row, count);
}

template <class T, class Out, int ROWS>
void run_quantized(const LinearArgs& args, const Prepared& from, long row, long tile) {
    f32x16 sums[ROWS][2];
    const u8* weights = static_cast<const u8*>(args.weight) + tile * tile_bytes(from.padded, args.weight_bits, args.group);
    const Quad* quads = from.quads + row * (from.padded / 4);
    if (args.weight_bits == 8)
        multiply_int8<ROWS>(quads, from.scales + row, nullptr, weights, from.padded, 0, sums);
    else
        multiply_int4<ROWS>(quads, from.scales + row, from.group_sums + row * from.groups, weights, from.padded, args.group,
                            sums);
    finish_block<Out, T>(args, row, tile, sums);
}

template <class T, class Out>
void multiply_quantized(const LinearArgs& args) {
    Prepared prepared(args);
    each_tile<QUANTIZED_BLOCK>(
        args, prepared.padded / 4 * static_cast<long>(sizeof(Quad)),
        [&](long block) { prepare_block<T>(args, prepared, block); },
        [&](auto rows, long row, long tile) {
            run_quantized<T, Out, decltype(rows)::value>(args, prepared, row, tile);
        });
}

void linear_quantized(const LinearArgs& args) {
    if (args.dtype == FLOAT32)
        multiply_quantized<float, float>(args);
    else if (args.float_output)
        multiply_quantized<bf16, float>(args);
    else
        multiply_quantized<bf16, bf16>(args);
}

long quantized_scratch(const LinearArgs& args) {
    long padded = padded_in(args), groups = args.weight_bits == 4 ? padded / args.group : 0;
    return args.rows * (padded / 4 * static_cast<long>(sizeof(Quad)) + groups * static_cast<long>(sizeof(float)) +
                        static_cast<long>(sizeof(RowScale)));
}

// Of unsigned weights [out, in], one a byte; scales and shifts [out, groups] float32 (8 bits: scales [out], no shifts).
void pack_quantized(const u8* weight, const float* scales, const float* shifts, u8* packed, long out, long in, int bits,
                    long group, int gated) {
    long unit = bits == 4 ? group : 4, padded = (in + unit - 1) / unit * unit, groups = padded / unit;
    long tiles = num_tiles(out, gated), features = gated ? out / 2 : out, each = features_of_tile(gated);
    long bytes = tile_bytes(padded, bits, group);
#pragma omp parallel for schedule(static)
    for (long tile = 0; tile < tiles; ++tile) {
        u8* to = packed + tile * bytes;
        __builtin_memset(to, 0, static_cast<std::size_t>(bytes));
        for (long lane = 0; lane < TILE; ++lane) {
            long feature = tile * each + lane % each;
            if (feature >= features) continue;
            long row = feature + lane / each * features;
            const u8* from = weight + row * in;
            if (bits == 8) {
                reinterpret_cast<float*>(to)[lane] = scales[row];
                u8* weights = to + TILE * sizeof(float);
                for (long column = 0; column < in; ++column)
                    weights[(column / 4 * TILE + lane) * 4 + column % 4] = from[column];
                continue;
            }
            for (long number = 0; number < groups; ++number) {
                u8* begin = to + number * group_bytes(group);
                bf16* parameters = reinterpret_cast<bf16*>(begin);
                bf16 rounded[LANES];
                store(rounded, broadcast(scales[row * groups + number]));
                parameters[lane] = rounded[0];
                store(rounded, broadcast(shifts[row * groups + number]));
                parameters[TILE + lane] = rounded[0];
                u8* weights = begin + TILE * 2 * sizeof(bf16);
                for (long i = 0; i < group && number * group + i < in; ++i)
                    weights[(i / 8 * TILE + lane) * 4 + i % 4] |= static_cast<u8>(from[number * group + i] << (i / 4 % 2 * 4));
            }
        }
    }
}

template <class T>
void gather_int8(const u8* packed, const std::int64_t* ids, T* y, long count, long in) {
    long bytes = tile_bytes((in + 3) / 4 * 4, 8, 0);
#pragma omp parallel for schedule(static) if (count > 64)
    for (long i = 0; i < count; ++i) {
        const u8* tile = packed + ids[i] / TILE * bytes;
        long lane = ids[i] % TILE;
        float scale = reinterpret_cast<const float*>(tile)[lane];
        for (long column = 0; column < in; column += LANES) {
            float values[LANES] = {};
            long columns = smaller(LANES, in - column);
            for (long j = 0; j < columns; ++j) {
                long place = ((column + j) / 4 * TILE + lane) * 4 + (column + j) % 4;
                values[j] = scale * static_cast<float>(tile[TILE * sizeof(float) + static_cast<std::size_t>(place)] - 128);
            }
            store_some(y + i * in + column, load(values), columns);
        }
    }
}

void linear_by_team(const LinearArgs& args) { args.weight_bits ? linear_quantized(args) : linear_plain(args); }

long linear_scratch(const LinearArgs& args) { return args.weight_bits ? quantized_scratch(args) : plain_scratch(args); }

}  // namespace
