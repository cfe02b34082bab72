// How weights of 8 and 4 bits lie in memory.
//
// Weights are unsigned:
//
//     8 bits, one scale per output:   w = scale * (u - 128)
//     8 bits in groups of inputs:     w = scale * (u - 128) + minimum
//     4 bits in groups:               w = scale * u + minimum
//     4 bits, no minimums:            w = scale * (u - 8)
//     codes of 4 bits in groups:      w = scale * CODES[u]
//
// Tiles have 32 outputs, like those of linear.h, and interleave them four inputs at a time: 8-bit weights without groups are
// 32 scales (float32) and [in / 4][32][4] bytes. Groups follow each other, each with 32 scales, 32 minimums if it has any
// (float16), and weights: [group / 4][32][4] bytes of 8 bits, or [group / 8][32][4] bytes of 4 bits, whose lower halves are the
// first four inputs and whose upper halves are the next four. `in` is padded to a whole group (to four without groups) with
// inputs of 0.
#pragma once

#include "linear.h"

namespace {

typedef std::uint8_t u8;

// Four bytes per lane, and the same as 16-bit numbers.
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

// From MANY_ROWS rows on, unpacking a tile's weights once takes less time than unpacking them for every block. MANY_BLOCK,
// MANY_WIDTH: rows and vectors that are multiplied at once, as many as registers can hold.
constexpr long MANY_ROWS = 16;
constexpr int MANY_BLOCK = 6, MANY_WIDTH = 2;

// Calls `work` with the size, a constant, and the first row of blocks `first` to `last` of at least MANY_ROWS rows.
template <class Work>
INLINE void each_block(long rows, long first, long last, Work work) {
    static_assert(MANY_ROWS >= 16 && MANY_BLOCK == 6, "blocks have 4 to 6 rows");
    for (long block = first, row = block_start(rows, first, MANY_BLOCK), end; block < last; ++block, row = end) {
        end = block_start(rows, block + 1, MANY_BLOCK);
        switch (end - row) {
            case 4: work(Count<4>(), row); break;
            case 5: work(Count<5>(), row); break;
            default: work(Count<6>(), row);
        }
    }
}

// The 4-bit value that means zero in groups without minimums.
constexpr int MIDDLE_OF_4_BITS = 8;

// Weights of a GGUF block that is no superblock, and blocks of a row to pack at once.
constexpr long BLOCK_WEIGHTS = 32, BLOCKS_AT_ONCE = 8;

// Values of codes: `kvalues_iq4nl` in llama.cpp's ggml-common.h.
constexpr signed char CODES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// bits: 8 or 4. coded: weights are codes. group: inputs that share a scale; 0: all (8-bit). minimums: groups have minimums.
struct WeightForm {
    int bits;
    bool coded;
    long group;
    bool minimums;

    // kind: 8, 4 or CODED_GROUPS.
    WeightForm(int kind, long group, bool minimums)
        : bits(kind == CODED_GROUPS ? 4 : kind), coded(kind == CODED_GROUPS), group(group), minimums(minimums) {}
    explicit WeightForm(const LinearArgs& args) : WeightForm(args.weight_bits, args.group, args.minimums) {}

    long padded(long in) const {
        long unit = group ? group : 4;
        return (in + unit - 1) / unit * unit;
    }
    long parameter_bytes() const { return TILE * static_cast<long>(group ? sizeof(f16) * (minimums ? 2 : 1) : sizeof(float)); }
    long group_bytes() const { return parameter_bytes() + TILE * group * bits / 8; }
    long tile_bytes(long padded) const { return group ? padded / group * group_bytes() : parameter_bytes() + TILE * padded; }

    // Place of an input's byte after a group's parameters.
    long place(long i, long lane) const {
        return bits == 8 ? (i / 4 * TILE + lane) * 4 + i % 4 : (i / 8 * TILE + lane) * 4 + i % 4;
    }
    int shift(long i) const { return bits == 8 ? 0 : static_cast<int>(i / 4 % 2 * 4); }
};

// Scales and minimums of a group's outputs, from a vector of a tile on.
INLINE f32v group_scales(const u8* group, int vector) { return load(reinterpret_cast<const f16*>(group) + vector * LANES); }
INLINE f32v group_minimums(const u8* group, int vector) {
    return load(reinterpret_cast<const f16*>(group) + TILE + vector * LANES);
}

// Packs inputs of one lane of a group, from its first word on. The last word may be partial.
template <int BITS>
INLINE void pack_group(const u8* from, long count, u8* to) {
    constexpr long OF_WORD = 32 / BITS;
    auto pack_word = [&](std::uint32_t (&words)[OF_WORD / 4]) {
        if constexpr (BITS == 4) words[0] |= words[1] << 4;
        __builtin_memcpy(to, words, sizeof words[0]);
        to += 4 * TILE;
    };
    for (; count >= OF_WORD; count -= OF_WORD, from += OF_WORD) {
        std::uint32_t words[OF_WORD / 4];
        __builtin_memcpy(words, from, sizeof words);
        pack_word(words);
    }
    if (count) {
        std::uint32_t words[OF_WORD / 4] = {};
        __builtin_memcpy(words, from, static_cast<std::size_t>(count));
        pack_word(words);
    }
}

// Packs unsigned weights [out, in], one per byte. scales, minimums: float32 [out, groups]; minimums may be null.
void pack_quantized(const u8* weight, const float* scales, const float* minimums, u8* packed, long out, long in, int bits,
                    long group, int gated, int threads) {
    const WeightForm form(bits, group, minimums);
    long padded = form.padded(in), size = group ? group : padded, groups = padded / size;
    long tiles = num_tiles(out, gated), features = gated ? out / 2 : out, each = features_of_tile(gated);
    long bytes = form.tile_bytes(padded), parameter_bytes = form.parameter_bytes();
    auto pack_tile = [&](long tile) {
        u8* to = packed + tile * bytes;
        __builtin_memset(to, 0, static_cast<std::size_t>(bytes));
        // Lanes of a group are interleaved, so one group at a time stays in the first-level cache.
        for (long number = 0; number < groups; ++number) {
            u8* begin = to + number * form.group_bytes();
            f16* parameters = reinterpret_cast<f16*>(begin);
            for (long lane = 0; lane < TILE; ++lane) {
                long feature = tile * each + lane % each;
                if (feature >= features) continue;
                long row = feature + lane / each * features;
                if (group)
                    parameters[lane] = to_f16(scales[row * groups + number]);
                else
                    reinterpret_cast<float*>(begin)[lane] = scales[row];
                if (form.minimums) parameters[TILE + lane] = to_f16(minimums[row * groups + number]);
                const u8* from = weight + row * in + number * size;
                u8* words = begin + parameter_bytes + lane * 4;
                long count = smaller(size, in - number * size);
                if (form.bits == 8)
                    pack_group<8>(from, count, words);
                else
                    pack_group<4>(from, count, words);
            }
        }
    };
    each_range(threads, tiles, in * TILE, [&](long first, long last, int) {
        for (long tile = first; tile < last; ++tile) pack_tile(tile);
    });
}

// A GGUF block of 32 weights: an f16 scale, an f16 minimum if MINIMUMS, and 8-bit or 4-bit weights. FIFTHS: four bytes have a
// fifth bit of each weight. ADDED: makes weights unsigned, with 128 in the middle.
template <int BITS_, bool MINIMUMS_, bool FIFTHS = false, int ADDED = 0>
struct BlockOf {
    static constexpr int BITS = BITS_;
    static constexpr bool MINIMUMS = MINIMUMS_, BYTES_OF_WEIGHTS = BITS == 8 && !FIFTHS;
    static constexpr long FIFTHS_AT = 2 * (1 + MINIMUMS), WEIGHTS_AT = FIFTHS_AT + 4 * FIFTHS;
    static constexpr long BYTES = WEIGHTS_AT + (BYTES_OF_WEIGHTS ? BLOCK_WEIGHTS : BLOCK_WEIGHTS / 2);

    static void weights(const u8* block, u8* to) {
        const u8* from = block + WEIGHTS_AT;
        if (BYTES_OF_WEIGHTS) {
            for (long i = 0; i < BLOCK_WEIGHTS; ++i) to[i] = static_cast<u8>(from[i] + ADDED);
            return;
        }
        for (long i = 0; i < BLOCK_WEIGHTS / 2; ++i) {
            to[i] = from[i] & 15;
            to[BLOCK_WEIGHTS / 2 + i] = from[i] >> 4;
        }
        if (!FIFTHS) return;
        std::uint32_t fifths;
        __builtin_memcpy(&fifths, block + FIFTHS_AT, sizeof fifths);
        for (long i = 0; i < BLOCK_WEIGHTS; ++i) to[i] = static_cast<u8>((to[i] | (fifths >> i & 1) << 4) + ADDED);
    }
};

// Calls `work` with a block type by its GGUF number. Codes have the layout of Q4_0.
template <class Work>
INLINE void with_block(int kind, Work work) {
    switch (kind) {
        case 3: return work(BlockOf<4, true>{});
        case 6: return work(BlockOf<8, false, true, 128 - 16>{});
        case 7: return work(BlockOf<8, true, true, 128>{});
        case 8: return work(BlockOf<8, false, false, 128>{});
        default: return work(BlockOf<4, false>{});
    }
}

// Packs GGUF blocks [out, in / 32]. ups: blocks of the second half of gated outputs; null: they follow the gates.
void pack_group_blocks(const u8* blocks, const u8* ups, u8* packed, long out, long in, int kind, int gated, int threads) {
    long tiles = num_tiles(out, gated), features = gated ? out / 2 : out, each = features_of_tile(gated);
    with_block(kind, [&](auto of) {
        typedef decltype(of) Block;
        const WeightForm form(Block::BITS, BLOCK_WEIGHTS, Block::MINIMUMS);
        long count = in / BLOCK_WEIGHTS, row_bytes = count * Block::BYTES, bytes = form.tile_bytes(in);
        if (!ups) ups = blocks + features * row_bytes;
        auto pack_block = [&](const u8* block, u8* to, long lane) {
            __builtin_memcpy(to + lane * 2, block, 2);
            if (Block::MINIMUMS) __builtin_memcpy(to + (TILE + lane) * 2, block + 2, 2);
            u8 weights[BLOCK_WEIGHTS];
            Block::weights(block, weights);
            pack_group<Block::BITS>(weights, BLOCK_WEIGHTS, to + form.parameter_bytes() + lane * 4);
        };
        each_range(threads, tiles, in * TILE, [&](long first, long last, int) {
            for (long tile = first; tile < last; ++tile) {
                u8* to = packed + tile * bytes;
                if ((tile + 1) * each > features) __builtin_memset(to, 0, static_cast<std::size_t>(bytes));
                // Some blocks of a row at once, because switching rows takes time.
                for (long start = 0; start < count; start += BLOCKS_AT_ONCE)
                    for (long lane = 0; lane < TILE; ++lane) {
                        long feature = tile * each + lane % each;
                        if (feature >= features) continue;
                        const u8* row = (lane < each ? blocks : ups) + feature * row_bytes;
                        for (long i = start; i < smaller(start + BLOCKS_AT_ONCE, count); ++i)
                            pack_block(row + i * Block::BYTES, to + i * form.group_bytes(), lane);
                    }
            }
        });
    });
}

template <class T>
void gather_quantized(const u8* packed, const std::int64_t* ids, T* y, long count, long in, WeightForm form, int threads) {
    long padded = form.padded(in), bytes = form.tile_bytes(padded), size = form.group ? form.group : padded;
    const int mask = (1 << form.bits) - 1, middle = form.bits == 8 ? 128 : form.minimums ? 0 : MIDDLE_OF_4_BITS;
    auto gather_row = [&](long i) {
        const u8* begin = packed + ids[i] / TILE * bytes;
        long lane = ids[i] % TILE;
        for (long start = 0; start < in; start += size, begin += form.group_bytes()) {
            const f16* parameters = reinterpret_cast<const f16*>(begin);
            float scale = form.group ? to_float(parameters[lane]) : reinterpret_cast<const float*>(begin)[lane];
            float minimum = form.minimums ? to_float(parameters[TILE + lane]) : 0.0f;
            const u8* weights = begin + form.parameter_bytes();
            for (long column = 0; column < smaller(size, in - start); column += LANES) {
                float values[LANES] = {};
                long columns = smaller(LANES, smaller(size, in - start) - column);
                for (long j = 0; j < columns; ++j) {
                    int value = weights[form.place(column + j, lane)] >> form.shift(column + j) & mask;
                    values[j] = scale * static_cast<float>(form.coded ? CODES[value] : value - middle) + minimum;
                }
                store_some(y + i * in + start + column, load(values), columns);
            }
        }
    };
    each_range(threads, count, in, [&](long first, long last, int) {
        for (long i = first; i < last; ++i) gather_row(i);
    });
}

}  // namespace
