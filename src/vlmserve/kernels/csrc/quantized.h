// Products with weights of 8 or 4 bits, for any number of rows, and the choice between them and plain ones.
//
// Weights are unsigned: in 8 bits w = scale * (u - 128) with a scale for each output, in 4 bits w = scale * u + shift with
// both for each group of inputs of each output. Tiles hold 32 outputs, as those of linear.h do, and four inputs in turn:
// in 8 bits [in / 4][32][4] bytes; in 4 bits for each group its 32 scales, its 32 shifts (float16), and
// [group / 8][32][4] bytes, whose lower halves are the first four inputs and whose upper halves are the next four. `in` is
// padded to a whole group (to four in 8 bits) with inputs of 0.
//
// With an instruction that multiplies bytes (VNNI) inputs become integers as well. Beside weights of 8 bits a row becomes
// 16-bit integers by a scale of its own, split into two signed bytes, x = scale * (256 * high + low): two products of bytes
// cost what one of bfloat16 does, and lose less than that would. So they do beside weights of 4 bits with `wide_inputs`;
// otherwise, since these lose far more, each group of inputs becomes bytes by a scale of its own. Without the instruction
// bytes become floats.
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
INLINE long group_bytes(long group) { return TILE * (2 * static_cast<long>(sizeof(f16)) + group / 2); }
INLINE long tile_bytes(long in, int bits, long group) {
    return bits == 8 ? TILE * (static_cast<long>(sizeof(float)) + in) : in / group * group_bytes(group);
}

#if defined(__AVX512VNNI__)

constexpr int WIDE_BLOCK = 4;    // 16 integer sums, of 32 registers
constexpr int NARROW_BLOCK = 6;  // 12 of them and as many of floats

// Four inputs of a row, high and low bytes.
struct Quad {
    std::int32_t high, low;
};

struct RowScale {
    float scale;
    std::int32_t high, low;  // sums of all bytes
};

// Four inputs of a row as bytes.
typedef std::int32_t Four;

// Of a row's inputs in a group. sum: of them all, as they are after rounding.
struct GroupScale {
    float scale, sum;
};

INLINE i32x16 dot_bytes(i32x16 sum, __m512i weights, std::int32_t inputs) {
    return bit_cast<i32x16>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sum), weights, _mm512_set1_epi32(inputs)));
}

// To the nearest, halves to even. The masked form, of which GCC does not think that it reads what was never written.
INLINE i32x16 round_to_integers(f32x16 value) {
    return bit_cast<i32x16>(_mm512_maskz_cvtps_epi32(0xffff, bit_cast<__m512>(value)));
}

// Of the elements' sizes; NaN if one is not finite.
template <class T>
INLINE float largest_size(const T* x, long count) {
    i32x16 most{};
    // As integers, sizes are in order, and what is no number comes after infinity.
    for (long i = 0; i < count; i += LANES) {
        i32x16 size = bit_cast<i32x16>(load_some(x + i, smaller(LANES, count - i))) & 0x7fffffff;
        most = most > size ? most : size;
    }
    constexpr std::int32_t INFINITE = 0x7f800000;
    bool finite = !_mm512_cmpge_epi32_mask(bit_cast<__m512i>(most), _mm512_set1_epi32(INFINITE));
    return finite ? largest(bit_cast<f32x16>(most)) : __builtin_nanf("");
}

// Row `place` of a block of `count` rows, whose quads lie side by side. Returns what its inputs were multiplied with.
template <class T>
float split_row(const T* x, long in, long padded, Quad* quads, RowScale* scales, long place, long count) {
    constexpr float MOST = 127 * 256 + 127;
    float most = largest_size(x, in);
    float factor = most > 0 ? MOST / most : 0.0f;
    i32x16 high_sums{}, low_sums{};
    for (long i = 0; i < padded; i += LANES) {
        f32x16 scaled = i < in ? load_some(x + i, smaller(LANES, in - i)) * factor : f32x16{};
        i32x16 value = round_to_integers(scaled);
        i32x16 high = (value + 128) >> 8, low = value - (high << 8);
        high_sums += high;
        low_sums += low;
        auto high_quads = bit_cast<i32x4>(__builtin_convertvector(high, s8x16));
        auto low_quads = bit_cast<i32x4>(__builtin_convertvector(low, s8x16));
        long num_quads = smaller(LANES, padded - i) / 4;
        for (long quad = 0; quad < num_quads; ++quad)
            quads[(i / 4 + quad) * count + place] = {high_quads[quad], low_quads[quad]};
    }
    scales[place] = {most == most ? most / MOST : most, sum(high_sums), sum(low_sums)};
    return factor;
}

// Of each group of a row that was split, the sum of its inputs in units of the row's scale.
template <class T>
void add_groups(const T* x, long in, long padded, long group, float factor, float* sums, long place, long count) {
    for (long start = 0; start < padded; start += group) {
        i32x16 total{};
        for (long i = start; i < smaller(start + group, in); i += LANES)
            total += round_to_integers(load_some(x + i, smaller(LANES, in - i)) * factor);
        sums[start / group * count + place] = static_cast<float>(sum(total));
    }
}

// As split_row, each group of inputs by a scale of its own.
template <class T>
void round_row(const T* x, long in, long padded, long group, Four* fours, GroupScale* scales, long place, long count) {
    for (long start = 0; start < padded; start += group) {
        float most = largest_size(x + start, smaller(group, in - start));
        float factor = most > 0 ? 127 / most : 0.0f, scale = most == most ? most / 127 : most;
        i32x16 total{};
        for (long i = start; i < start + group; i += LANES) {
            f32x16 scaled = i < in ? load_some(x + i, smaller(LANES, in - i)) * factor : f32x16{};
            i32x16 value = round_to_integers(scaled);
            total += value;
            auto bytes = bit_cast<i32x4>(__builtin_convertvector(value, s8x16));
            long num_fours = smaller(LANES, start + group - i) / 4;
            for (long four = 0; four < num_fours; ++four) fours[(i / 4 + four) * count + place] = bytes[four];
        }
        scales[start / group * count + place] = {scale, scale * static_cast<float>(sum(total))};
    }
}

template <int ROWS>
INLINE void multiply_int8(const Quad* x, const RowScale* rows, const u8* tile, long in, f32x16 (&sums)[ROWS][2]) {
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
INLINE void multiply_int4(const Four* x, const GroupScale* rows, const u8* tile, long in, long group,
                          f32x16 (&sums)[ROWS][2]) {
    for (int row = 0; row < ROWS; ++row) sums[row][0] = sums[row][1] = f32x16{};
    const __m512i nibble = _mm512_set1_epi8(15);
    for (long number = 0; number < in / group; ++number, tile += group_bytes(group), rows += ROWS) {
        i32x16 dots[ROWS][2] = {};
        const u8* weights = tile + TILE * 2 * sizeof(f16);
        for (long octet = 0; octet < group / 8; ++octet, weights += 4 * TILE, x += 2 * ROWS) {
            __builtin_prefetch(weights + PREFETCH_BYTES);
            __builtin_prefetch(weights + PREFETCH_BYTES + 64);
            __m512i left = _mm512_loadu_si512(weights), right = _mm512_loadu_si512(weights + 64);
            __m512i first[2] = {_mm512_and_si512(left, nibble), _mm512_and_si512(right, nibble)};
            __m512i second[2] = {_mm512_and_si512(_mm512_srli_epi16(left, 4), nibble),
                                 _mm512_and_si512(_mm512_srli_epi16(right, 4), nibble)};
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; ++row)
                for (int half = 0; half < 2; ++half) dots[row][half] = dot_bytes(dots[row][half], first[half], x[row]);
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; ++row)
                for (int half = 0; half < 2; ++half)
                    dots[row][half] = dot_bytes(dots[row][half], second[half], x[ROWS + row]);
        }
        const f16* parameters = reinterpret_cast<const f16*>(tile);
        for (int half = 0; half < 2; ++half) {
            f32x16 scale = load(parameters + half * LANES), shift = load(parameters + TILE + half * LANES);
            for (int row = 0; row < ROWS; ++row) {
                sums[row][half] += __builtin_convertvector(dots[row][half], f32x16) * (scale * rows[row].scale);
                sums[row][half] += shift * rows[row].sum;
            }
        }
    }
}

template <int ROWS>
INLINE void multiply_int4_wide(const Quad* x, const RowScale* rows, const float* input_sums, const u8* tile, long in,
                               long group, f32x16 (&sums)[ROWS][2]) {
    for (int row = 0; row < ROWS; ++row) sums[row][0] = sums[row][1] = f32x16{};
    const __m512i nibble = _mm512_set1_epi8(15);
    for (long number = 0; number < in / group; ++number, tile += group_bytes(group), input_sums += ROWS) {
        i32x16 high[ROWS][2] = {}, low[ROWS][2] = {};
        const u8* weights = tile + TILE * 2 * sizeof(f16);
        for (long octet = 0; octet < group / 8; ++octet, weights += 4 * TILE)
            for (int part = 0; part < 2; ++part, x += ROWS) {
                __builtin_prefetch(weights + part * 64 + PREFETCH_BYTES);
                __m512i left = _mm512_loadu_si512(weights), right = _mm512_loadu_si512(weights + 64);
                __m512i values[2] = {
                    _mm512_and_si512(part ? _mm512_srli_epi16(left, 4) : left, nibble),
                    _mm512_and_si512(part ? _mm512_srli_epi16(right, 4) : right, nibble),
                };
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; ++row)
                    for (int half = 0; half < 2; ++half) {
                        high[row][half] = dot_bytes(high[row][half], values[half], x[row].high);
                        low[row][half] = dot_bytes(low[row][half], values[half], x[row].low);
                    }
            }
        const f16* parameters = reinterpret_cast<const f16*>(tile);
        for (int half = 0; half < 2; ++half) {
            f32x16 scale = load(parameters + half * LANES), shift = load(parameters + TILE + half * LANES);
            for (int row = 0; row < ROWS; ++row) {
                sums[row][half] += __builtin_convertvector((high[row][half] << 8) + low[row][half], f32x16) * scale;
                sums[row][half] += shift * input_sums[row];
            }
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int half = 0; half < 2; ++half) sums[row][half] *= rows[row].scale;
}

#else

#if defined(__AVX512F__)
constexpr int WIDE_BLOCK = 4, NARROW_BLOCK = 4;
#else
constexpr int WIDE_BLOCK = 2, NARROW_BLOCK = 2;
#endif

struct Quad {
    float values[4];
};
typedef Quad Four;

struct RowScale {};

struct GroupScale {
    float sum;
};

template <class T>
void split_row(const T* x, long in, long padded, Quad* quads, RowScale*, long place, long count) {
    for (long i = 0; i < padded; ++i) quads[i / 4 * count + place].values[i % 4] = i < in ? to_float(x[i]) : 0.0f;
}

template <class T>
void round_row(const T* x, long in, long padded, long group, Four* fours, GroupScale* sums, long place, long count) {
    split_row(x, in, padded, fours, static_cast<RowScale*>(nullptr), place, count);
    for (long start = 0; start < padded; start += group) {
        float total = 0;
        for (long i = start; i < smaller(start + group, in); ++i) total += to_float(x[i]);
        sums[start / group * count + place].sum = total;
    }
}

INLINE u32x16 load_bytes(const u8* from) {
    u32x16 value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

template <int ROWS>
INLINE void multiply_int8(const Quad* x, const RowScale*, const u8* tile, long in, f32x16 (&sums)[ROWS][2]) {
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
INLINE void multiply_int4(const Four* x, const GroupScale* rows, const u8* tile, long in, long group,
                          f32x16 (&sums)[ROWS][2]) {
    for (int row = 0; row < ROWS; ++row) sums[row][0] = sums[row][1] = f32x16{};
    for (long number = 0; number < in / group; ++number, tile += group_bytes(group)) {
        const f16* parameters = reinterpret_cast<const f16*>(tile);
        const u8* weights = tile + TILE * 2 * sizeof(f16);
        const Four* inputs = x + number * group / 4 * ROWS;
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
            f32x16 scale = load(parameters + half * LANES), shift = load(parameters + TILE + half * LANES);
            for (int row = 0; row < ROWS; ++row)
                sums[row][half] += dots[row] * scale + rows[number * ROWS + row].sum * shift;
        }
    }
}

#endif

// Rows, prepared for a weight of 8 bits, and where they are in the scratch memory of a call.
struct Int8Rows {
    static constexpr int BLOCK = WIDE_BLOCK;
    long in, padded;
    Quad* quads;
    RowScale* scales;

    explicit Int8Rows(const LinearArgs& args) : in(args.in), padded(padded_in(args)) {
        quads = static_cast<Quad*>(args.scratch);
        scales = reinterpret_cast<RowScale*>(quads + args.rows * (padded / 4));
    }

    long row_bytes() const { return padded / 4 * static_cast<long>(sizeof(Quad)); }
    long bytes(long rows) const { return rows * (row_bytes() + static_cast<long>(sizeof(RowScale))); }

    template <class T>
    void prepare(const T* x, long first, long place, long count) const {
        split_row(x, in, padded, quads + first * (padded / 4), scales + first, place, count);
    }

    template <int ROWS>
    static void multiply(const Int8Rows& rows, const u8* weight, long row, long tile, f32x16 (&sums)[ROWS][2]) {
        multiply_int8(rows.quads + row * (rows.padded / 4), rows.scales + row, weight + tile * tile_bytes(rows.padded, 8, 0),
                      rows.padded, sums);
    }
};

// Likewise for one of 4 bits.
struct Int4Rows {
    static constexpr int BLOCK = NARROW_BLOCK;
    long in, padded, group;
    Four* fours;
    GroupScale* scales;

    explicit Int4Rows(const LinearArgs& args) : in(args.in), padded(padded_in(args)), group(args.group) {
        fours = static_cast<Four*>(args.scratch);
        scales = reinterpret_cast<GroupScale*>(fours + args.rows * (padded / 4));
    }

    long groups() const { return padded / group; }
    long row_bytes() const { return padded / 4 * static_cast<long>(sizeof(Four)); }
    long bytes(long rows) const { return rows * (row_bytes() + groups() * static_cast<long>(sizeof(GroupScale))); }

    template <class T>
    void prepare(const T* x, long first, long place, long count) const {
        round_row(x, in, padded, group, fours + first * (padded / 4), scales + first * groups(), place, count);
    }

    template <int ROWS>
    static void multiply(const Int4Rows& rows, const u8* weight, long row, long tile, f32x16 (&sums)[ROWS][2]) {
        multiply_int4(rows.fours + row * (rows.padded / 4), rows.scales + row * rows.groups(),
                      weight + tile * tile_bytes(rows.padded, 4, rows.group), rows.padded, rows.group, sums);
    }
};

#if defined(__AVX512VNNI__)
// Likewise with inputs of 16 bits.
struct Int4WideRows {
    static constexpr int BLOCK = WIDE_BLOCK;
    long in, padded, group;
    Quad* quads;
    RowScale* scales;
    float* sums;

    explicit Int4WideRows(const LinearArgs& args) : in(args.in), padded(padded_in(args)), group(args.group) {
        quads = static_cast<Quad*>(args.scratch);
        scales = reinterpret_cast<RowScale*>(quads + args.rows * (padded / 4));
        sums = reinterpret_cast<float*>(scales + args.rows);
    }

    long groups() const { return padded / group; }
    long row_bytes() const { return padded / 4 * static_cast<long>(sizeof(Quad)); }
    long bytes(long rows) const {
        return rows * (row_bytes() + static_cast<long>(sizeof(RowScale)) + groups() * static_cast<long>(sizeof(float)));
    }

    template <class T>
    void prepare(const T* x, long first, long place, long count) const {
        float factor = split_row(x, in, padded, quads + first * (padded / 4), scales + first, place, count);
        add_groups(x, in, padded, group, factor, sums + first * groups(), place, count);
    }

    template <int ROWS>
    static void multiply(const Int4WideRows& rows, const u8* weight, long row, long tile, f32x16 (&sums)[ROWS][2]) {
        multiply_int4_wide(rows.quads + row * (rows.padded / 4), rows.scales + row, rows.sums + row * rows.groups(),
                           weight + tile * tile_bytes(rows.padded, 4, rows.group), rows.padded, rows.group, sums);
    }
};
#else
typedef Int4Rows Int4WideRows;
#endif

template <class Rows, class T, class Out>
void multiply_quantized(const LinearArgs& args) {
    constexpr int BLOCK_ROWS = Rows::BLOCK;
    Rows rows(args);
    each_tile<BLOCK_ROWS>(
        args, rows.row_bytes(),
        [&](long block) {
            long first = block_start(args.rows, block, BLOCK_ROWS);
            long count = block_start(args.rows, block + 1, BLOCK_ROWS) - first;
            for (long place = 0; place < count; ++place)
                rows.prepare(static_cast<const T*>(args.x) + (first + place) * args.x_stride, first, place, count);
        },
        [&](auto count, long row, long tile) {
            f32x16 sums[decltype(count)::value][2];
            Rows::multiply(rows, static_cast<const u8*>(args.weight), row, tile, sums);
            finish_block<Out, T>(args, row, tile, sums);
        });
}

template <class Rows>
void linear_of(const LinearArgs& args) {
    if (args.dtype == FLOAT32)
        multiply_quantized<Rows, float, float>(args);
    else if (args.float_output)
        multiply_quantized<Rows, bf16, float>(args);
    else
        multiply_quantized<Rows, bf16, bf16>(args);
}

void linear_quantized(const LinearArgs& args) {
    if (args.weight_bits == 8)
        linear_of<Int8Rows>(args);
    else
        args.wide_inputs ? linear_of<Int4WideRows>(args) : linear_of<Int4Rows>(args);
}

long quantized_scratch(const LinearArgs& args) {
    if (args.weight_bits == 8) return Int8Rows(args).bytes(args.rows);
    return args.wide_inputs ? Int4WideRows(args).bytes(args.rows) : Int4Rows(args).bytes(args.rows);
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
                f16* parameters = reinterpret_cast<f16*>(begin);
                parameters[lane] = to_f16(scales[row * groups + number]);
                parameters[TILE + lane] = to_f16(shifts[row * groups + number]);
                u8* weights = begin + TILE * 2 * sizeof(f16);
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
