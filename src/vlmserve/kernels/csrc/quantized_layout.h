// How weights of 8 and 4 bits lie in memory.
//
// Weights are unsigned: in 8 bits w = scale * (u - 128) with a scale for each output, in 4 bits w = scale * u + zero with
// both for each group of inputs of each output. Tiles hold 32 outputs, as those of linear.h do, and four inputs in turn:
// in 8 bits [in / 4][32][4] bytes; in 4 bits for each group its 32 scales, its 32 zeros (float16), and
// [group / 8][32][4] bytes, whose lower halves are the first four inputs and whose upper halves are the next four. `in` is
// padded to a whole group (to four in 8 bits) with inputs of 0.
#pragma once

#include "linear.h"

namespace {

typedef std::uint8_t u8;

// Four bytes for each lane, and the same as 16-bit numbers.
typedef VectorOf<u8, 4 * LANES>::Type u8v;
typedef VectorOf<std::uint16_t, 2 * LANES>::Type pairs16;

INLINE u8v load_bytes(const u8* from) {
    u8v value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

// The lower (part 0) or upper halves of bytes.
INLINE u8v nibbles(u8v bytes, int part) {
    if (part) bytes = bit_cast<u8v>(bit_cast<pairs16>(bytes) >> 4);
    return bytes & static_cast<u8>(15);
}

INLINE long padded_in(const LinearArgs& args) {
    long unit = args.weight_bits == 4 ? args.group : 4;
    return (args.in + unit - 1) / unit * unit;
}

// Bytes of a tile: for every group (all inputs in 8 bits) what each output needs beside its weights, then the weights.
INLINE long group_bytes(long group) { return TILE * (2 * static_cast<long>(sizeof(f16)) + group / 2); }
INLINE long tile_bytes(long in, int bits, long group) {
    return bits == 8 ? TILE * (static_cast<long>(sizeof(float)) + in) : in / group * group_bytes(group);
}

// The scales and zeros of a group's outputs from a vector of a tile on.
struct GroupParameters {
    f32v scale, zero;

    GroupParameters(const u8* group, int vector) {
        const f16* from = reinterpret_cast<const f16*>(group) + vector * LANES;
        scale = load(from);
        zero = load(from + TILE);
    }
};

INLINE const u8* group_weights(const u8* group) { return group + TILE * 2 * sizeof(f16); }

// Of unsigned weights [out, in], one a byte; scales and zeros [out, groups] float32 (8 bits: scales [out], no zeros).
void pack_quantized(const u8* weight, const float* scales, const float* zeros, u8* packed, long out, long in, int bits,
                    long group, int gated, int threads) {
    long unit = bits == 4 ? group : 4, padded = (in + unit - 1) / unit * unit, groups = padded / unit;
    long tiles = num_tiles(out, gated), features = gated ? out / 2 : out, each = features_of_tile(gated);
    long bytes = tile_bytes(padded, bits, group);
    auto pack_tile = [&](long tile) {
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
                parameters[TILE + lane] = to_f16(zeros[row * groups + number]);
                u8* weights = begin + TILE * 2 * sizeof(f16);
                for (long i = 0; i < group && number * group + i < in; ++i)
                    weights[(i / 8 * TILE + lane) * 4 + i % 4] |= static_cast<u8>(from[number * group + i] << (i / 4 % 2 * 4));
            }
        }
    };
    each_range(threads, tiles, in * TILE, [&](long first, long last, int) {
        for (long tile = first; tile < last; ++tile) pack_tile(tile);
    });
}

template <class T>
void gather_int8(const u8* packed, const std::int64_t* ids, T* y, long count, long in, int threads) {
    long bytes = tile_bytes((in + 3) / 4 * 4, 8, 0);
    auto gather_row = [&](long i) {
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
    };
    each_range(threads, count, in, [&](long first, long last, int) {
        for (long i = first; i < last; ++i) gather_row(i);
    });
}

}  // namespace
