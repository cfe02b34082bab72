// The layout of superblock weights: llama.cpp's K-quants and IQ4_XS, at their bits in a GGUF file.
//
// A superblock is 256 inputs of one output: an f16 scale `d`, an integer scale for each group of 16 or 32 inputs, and
// unsigned weights u of few bits. Some kinds also have an f16 `dmin` and an integer minimum for each group.
//
//     with minimums:  w = d * scale * u - dmin * minimum
//     coded:          w = d * scale * CODES[u]
//     otherwise:      w = d * scale * (u - OFFSET)
//
// Tiles hold 32 outputs, like those of linear.h. A tile interleaves the superblocks of its outputs lane by lane:
//
//     d [32] f16, a second number [32] of 16 bits (dmin; bits of scales), packed scales and minimums [SCALE_WORDS][32] of 4 bytes,
//     then for each 32 inputs: lower bits [LOW][32] of 4 bytes, upper bits [HIGH][32] of 4 bytes
//
// Byte j of a word has inputs j, j + 4, j + 8, ... of the next 32 / b inputs, where b is the number of bits. Q6_K has words of 6
// and 2 bits instead.
//
// An array of int64 precedes the tiles, one number for each tile and one for the end: the offset in bytes plus the kind. So
// one weight may have tiles of several kinds.
#pragma once

#include "quantized_layout.h"

namespace {

constexpr long SUPERBLOCK = 256;
// Maximum `OFFSET` of a kind.
constexpr int MOST_OFFSET = 32;
// Inputs whose bits are together.
constexpr long UNIT = 32;
constexpr long WORD_BYTES = 4 * TILE, F16_BYTES = 2 * TILE, TILE_ALIGNMENT = 64;

INLINE u32v load_words(const u8* from) { return bit_cast<u32v>(load_bytes(from)); }

// Moves fields of `BITS` bits from bit `from` of each byte to bit `to`.
template <int BITS>
INLINE u32v field(u32v word, int from, int to) {
    const u8 bits = static_cast<u8>(((1 << BITS) - 1) << to);
    const u8v mask = bits - u8v{};
    return (from > to ? word >> (from - to) : word << (to - from)) & bit_cast<u32v>(mask);
}

// Common properties. SIGNED: scales may be negative. CODED: weights are codes.
template <long BLOCK_BYTES_, int LOW_, int HIGH_, long GROUP_, bool MINIMUMS_, int OFFSET_, bool SIGNED_, int SCALE_WORDS_,
          bool CODED_ = false>
struct KindOf {
    static constexpr long BLOCK_BYTES = BLOCK_BYTES_, GROUP = GROUP_, GROUPS = SUPERBLOCK / GROUP_;
    static constexpr int LOW = LOW_, HIGH = HIGH_, OFFSET = OFFSET_, SCALE_WORDS = SCALE_WORDS_;
    static constexpr bool MINIMUMS = MINIMUMS_, SIGNED = SIGNED_, CODED = CODED_, HAS_SECOND = MINIMUMS || CODED;
    static constexpr bool CENTERED = !MINIMUMS && !CODED;
    static constexpr int QUADS_OF_GROUP = GROUP / 4, MOST = CODED ? 127 : (1 << (LOW + HIGH)) - 1;
    static constexpr long SCALES_AT = F16_BYTES * (1 + HAS_SECOND), PARAMETER_BYTES = SCALES_AT + WORD_BYTES * SCALE_WORDS;
    // Starts of groups are for MOST_OFFSET.
    static constexpr int START_SHIFT = CENTERED ? __builtin_ctz(MOST_OFFSET / (CENTERED ? OFFSET : 1)) : 0;
    static constexpr long UNIT_BYTES = WORD_BYTES * (LOW + HIGH);
    static constexpr long BYTES = PARAMETER_BYTES + SUPERBLOCK / UNIT * UNIT_BYTES;
    static_assert(BYTES == BLOCK_BYTES * TILE && BYTES % TILE_ALIGNMENT == 0, "a tile has the bits of the file");

    // The weights of four inputs of each lane. unit: the first byte of a vector's lanes.
    INLINE u8v weights(const u8* unit, int quad) {
        constexpr int LOWS = 8 / LOW;
        u32v low = field<LOW>(load_words(unit + quad / LOWS * WORD_BYTES), quad % LOWS * LOW, 0);
        if constexpr (HIGH > 0) {
            constexpr int HIGHS = 8 / HIGH;
            const u8* word = unit + (LOW + quad / HIGHS) * WORD_BYTES;
            low |= field<HIGH>(load_words(word), quad % HIGHS * HIGH, LOW);
        }
        return CODED ? decode<OFFSET>(bit_cast<u8v>(low)) : bit_cast<u8v>(low);
    }

    // Packs the words of a lane. quads: four values each.
    static void pack_unit(const std::uint32_t* quads, u8* words) {
        auto pack_plane = [&](const std::uint32_t* from, int bits, int shift) {
            const std::uint32_t mask = 0x01010101u * ((1u << bits) - 1);
            for (int word = 0; word < bits; ++word, words += WORD_BYTES) {
                std::uint32_t plane = 0;
                for (int i = 0; i < 8 / bits; ++i) plane |= (*from++ >> shift & mask) << (i * bits);
                __builtin_memcpy(words, &plane, 4);
            }
        };
        pack_plane(quads, LOW, 0);
        if (HIGH) pack_plane(quads, HIGH, LOW);
    }
};

// Unpacks bits of a superblock's values, one input per byte: `count` bytes, with values `bits` apart for inputs `stride` apart.
INLINE void unpack_bits(const u8* from, long count, int bits, int to, u8* values) {
    for (int part = 0; part < 8 / bits; ++part)
        for (long i = 0; i < count; ++i)
            values[part * count + i] |= static_cast<u8>((from[i] >> (part * bits) & ((1 << bits) - 1)) << to);
}

// 6-bit scales and minimums in 12 bytes, as in Q4_K and Q5_K.
struct SixBitPairs {
    template <int WORDS>
    INLINE void unpack(const u8* words, const u8*, u32v (&scales)[WORDS], u32v (&minimums)[WORDS]) {
        u32v first = load_words(words), second = load_words(words + WORD_BYTES), rest = load_words(words + 2 * WORD_BYTES);
        scales[0] = field<6>(first, 0, 0);
        minimums[0] = field<6>(second, 0, 0);
        scales[1] = field<4>(rest, 0, 0) | field<2>(first, 6, 4);
        minimums[1] = field<4>(rest, 4, 0) | field<2>(second, 6, 4);
    }
};

struct Q4_K : KindOf<144, 4, 0, 32, true, 0, false, 3>, SixBitPairs {
    static constexpr int D = 0, SECOND = 2, SCALES = 4;
    static void values(const u8* block, u8* to) {
        for (long i = 0; i < 4; ++i) unpack_bits(block + 16 + 32 * i, 32, 4, 0, to + 64 * i);
    }
};

struct Q5_K : KindOf<176, 4, 1, 32, true, 0, false, 3>, SixBitPairs {
    static constexpr int D = 0, SECOND = 2, SCALES = 4;
    static void values(const u8* block, u8* to) {
        for (long i = 0; i < 4; ++i) unpack_bits(block + 48 + 32 * i, 32, 4, 0, to + 64 * i);
        unpack_bits(block + 16, 32, 1, 4, to);
    }
};

struct Q6_K : KindOf<210, 4, 2, 16, false, 32, true, 4> {
    static constexpr int D = 208, SECOND = 0, SCALES = 192;
    static void values(const u8* block, u8* to) {
        for (long i = 0; i < 2; ++i) {
            unpack_bits(block + 64 * i, 64, 4, 0, to + 128 * i);
            unpack_bits(block + 128 + 32 * i, 32, 2, 4, to + 128 * i);
        }
    }
    template <int WORDS>
    INLINE void unpack(const u8* words, const u8*, u32v (&scales)[WORDS], u32v (&)[WORDS]) {
        for (int i = 0; i < WORDS; ++i) scales[i] = load_words(words + i * WORD_BYTES);
    }

    // Of each four quads, the first three fill the lower bits of a word each, and the last one their upper bits. That takes
    // fewer instructions than planes.
    INLINE u8v weights(const u8* unit, int quad) {
        unit += quad / 4 * 3 * WORD_BYTES;
        if (quad % 4 < 3) return bit_cast<u8v>(field<6>(load_words(unit + quad % 4 * WORD_BYTES), 0, 0));
        u32v last = field<2>(load_words(unit), 6, 0);
        for (int i = 1; i < 3; ++i) last |= field<2>(load_words(unit + i * WORD_BYTES), 6, 2 * i);
        return bit_cast<u8v>(last);
    }
    static void pack_unit(const std::uint32_t* quads, u8* words) {
        for (int i = 0; i < 6; ++i, words += WORD_BYTES) {
            std::uint32_t word = quads[i / 3 * 4 + i % 3] | (quads[i / 3 * 4 + 3] >> (i % 3 * 2) & 0x03030303u) << 6;
            __builtin_memcpy(words, &word, 4);
        }
    }
};

struct Q3_K : KindOf<110, 2, 1, 16, false, 4, true, 3> {
    static constexpr int D = 108, SECOND = 0, SCALES = 96;
    static void values(const u8* block, u8* to) {
        for (long i = 0; i < 2; ++i) unpack_bits(block + 32 + 32 * i, 32, 2, 0, to + 128 * i);
        unpack_bits(block, 32, 1, 2, to);
    }
    // 6-bit with 32 as zero: 8 bytes have the lower four bits, 4 bytes the upper two.
    template <int WORDS>
    INLINE void unpack(const u8* words, const u8*, u32v (&scales)[WORDS], u32v (&)[WORDS]) {
        u32v upper = load_words(words + 2 * WORD_BYTES);
        for (int i = 0; i < WORDS; ++i) {
            u32v lower = load_words(words + i % 2 * WORD_BYTES);
            u32v biased = field<4>(lower, i / 2 * 4, 0) | field<2>(upper, 2 * i, 4);
            scales[i] = bit_cast<u32v>(bit_cast<u8v>(biased) - static_cast<u8>(32));
        }
    }
};

struct Q2_K : KindOf<84, 2, 0, 16, true, 0, false, 4> {
    static constexpr int D = 80, SECOND = 82, SCALES = 0;
    static void values(const u8* block, u8* to) {
        for (long i = 0; i < 2; ++i) unpack_bits(block + 16 + 32 * i, 32, 2, 0, to + 128 * i);
    }
    template <int WORDS>
    INLINE void unpack(const u8* words, const u8*, u32v (&scales)[WORDS], u32v (&minimums)[WORDS]) {
        for (int i = 0; i < WORDS; ++i) {
            u32v both = load_words(words + i * WORD_BYTES);
            scales[i] = field<4>(both, 0, 0);
            minimums[i] = field<4>(both, 4, 0);
        }
    }
};

struct IQ4_XS : KindOf<136, 4, 0, 32, false, OFFSET, true, 1, true> {
    static constexpr int D = 0, SECOND = 2, SCALES = 4;
    static void values(const u8* block, u8* to) {
        for (long i = 0; i < 8; ++i) unpack_bits(block + 8 + 16 * i, 16, 4, 0, to + 32 * i);
    }
    // 6-bit with 32 as zero: four bytes have the lower four bits, the second number has the upper two.
    template <int WORDS>
    INLINE void unpack(const u8* words, const u8* second, u32v (&scales)[WORDS], u32v (&)[WORDS]) {
        u16v bits;
        __builtin_memcpy(&bits, second, sizeof bits);
        u32v lower = load_words(words), upper = __builtin_convertvector(bits, u32v);
        for (int i = 0; i < WORDS; ++i) {
            u32v low = lower >> (16 * i) & 0xffffu, high = upper >> (8 * i) & 0xffu;
            low = (low | low << 8) & 0x00ff00ffu;
            low = (low | low << 4) & 0x0f0f0f0fu;
            high = (high | high << 12) & 0x000f000fu;
            high = (high | high << 6) & 0x03030303u;
            scales[i] = bit_cast<u32v>(bit_cast<u8v>(low | high << 4) - static_cast<u8>(32));
        }
    }
};

// Whether a GGUF type consists of superblocks.
INLINE bool is_superblock(int kind) { return (kind >= 10 && kind <= 14) || kind == 23; }

// Calls `work` with a kind by its GGUF number.
template <class Work>
INLINE auto with_kind(int kind, Work work) {
    switch (kind) {
        case 10: return work(Q2_K{});
        case 11: return work(Q3_K{});
        case 12: return work(Q4_K{});
        case 13: return work(Q5_K{});
        case 23: return work(IQ4_XS{});
        default: return work(Q6_K{});
    }
}

// The places of a weight's tiles.
struct TileTable {
    const u8* packed;

    explicit TileTable(const void* packed) : packed(static_cast<const u8*>(packed)) {}

    std::int64_t entry(long tile) const {
        std::int64_t value;
        __builtin_memcpy(&value, packed + tile * 8, sizeof value);
        return value;
    }
    int kind(long tile) const { return static_cast<int>(entry(tile) % TILE_ALIGNMENT); }
    long offset(long tile) const { return entry(tile) / TILE_ALIGNMENT * TILE_ALIGNMENT; }
    const u8* at(long tile) const { return packed + offset(tile); }
};

// Packs one superblock of a lane. to: its tile's superblock.
template <class Kind>
void pack_superblock(const u8* block, u8* to, long lane) {
    __builtin_memcpy(to + lane * 2, block + Kind::D, 2);
    if (Kind::HAS_SECOND) __builtin_memcpy(to + F16_BYTES + lane * 2, block + Kind::SECOND, 2);
    for (long i = 0; i < Kind::SCALE_WORDS; ++i)
        __builtin_memcpy(to + Kind::SCALES_AT + (i * TILE + lane) * 4, block + Kind::SCALES + i * 4, 4);
    u8 values[SUPERBLOCK] = {};
    Kind::values(block, values);
    std::uint32_t quads[SUPERBLOCK / 4];
    __builtin_memcpy(quads, values, sizeof quads);
    u8* words = to + Kind::PARAMETER_BYTES + lane * 4;
    for (long unit = 0; unit < SUPERBLOCK / UNIT; ++unit, words += Kind::UNIT_BYTES) Kind::pack_unit(quads + unit * UNIT / 4, words);
}

template <class Kind>
void pack_tiles_of(const u8* blocks, const u8* ups, u8* to, long out, long in, long gated, int threads) {
    long tiles = num_tiles(out, gated), features = gated ? out / 2 : out, each = features_of_tile(gated);
    long count = in / SUPERBLOCK, row_bytes = count * Kind::BLOCK_BYTES;
    if (!ups) ups = blocks + features * row_bytes;
    each_range(threads, tiles, in * TILE, [&](long first, long last, int) {
        for (long tile = first; tile < last; ++tile)
            for (long i = 0; i < count; ++i)
                for (long lane = 0; lane < TILE; ++lane) {
                    long feature = tile * each + lane % each;
                    if (feature >= features) continue;
                    const u8* row = (lane < each ? blocks : ups) + feature * row_bytes;
                    pack_superblock<Kind>(row + i * Kind::BLOCK_BYTES, to + (tile * count + i) * Kind::BYTES, lane);
                }
    });
}

// Packs GGUF blocks [out, in / 256] of one kind into zeroed memory: tiles from `first_tile` on, the first at `offset`, with
// their table entries. ups: blocks of the second half of gated outputs; null: they follow the gates.
void pack_superblocks(const u8* blocks, const u8* ups, u8* packed, long out, long in, int kind, long first_tile, long offset,
                      int gated, int threads) {
    with_kind(kind, [&](auto of) {
        typedef decltype(of) Kind;
        long tiles = num_tiles(out, gated), bytes = in / SUPERBLOCK * Kind::BYTES;
        for (long tile = 0; tile <= tiles; ++tile) {
            std::int64_t entry = offset + tile * bytes + kind;
            __builtin_memcpy(packed + (first_tile + tile) * 8, &entry, sizeof entry);
        }
        pack_tiles_of<Kind>(blocks, ups, packed + offset, out, in, gated, threads);
    });
}

// The weights of one lane of a tile's superblock.
template <class Kind>
void unpack_superblock(const u8* from, long lane, float* to) {
    constexpr int WORDS = Kind::GROUPS / 4;
    long vector = lane / LANES * LANES;
    u32v scales[WORDS], minimums[WORDS] = {};
    Kind::unpack(from + Kind::SCALES_AT + vector * 4, from + F16_BYTES + vector * 2, scales, minimums);
    const f16* parameters = reinterpret_cast<const f16*>(from);
    float d = to_float(parameters[lane]), dmin = Kind::MINIMUMS ? to_float(parameters[TILE + lane]) : 0.0f;
    auto byte_of = [&](const u32v(&words)[WORDS], long group) {
        return static_cast<u8>(words[group / 4][lane - vector] >> (group % 4 * 8));
    };
    for (long i = 0; i < SUPERBLOCK; i += 4) {
        const u8* unit = from + Kind::PARAMETER_BYTES + i / UNIT * Kind::UNIT_BYTES + vector * 4;
        u8v quad = Kind::weights(unit, static_cast<int>(i % UNIT / 4));
        int scale = byte_of(scales, i / Kind::GROUP);
        if (Kind::SIGNED) scale = static_cast<signed char>(scale);
        float minimum = Kind::MINIMUMS ? dmin * byte_of(minimums, i / Kind::GROUP) : 0.0f;
        for (int j = 0; j < 4; ++j)
            to[i + j] = d * static_cast<float>(scale * static_cast<signed char>(quad[(lane - vector) * 4 + j] - Kind::OFFSET)) - minimum;
    }
}

template <class T>
void gather_superblocks(const void* packed, const std::int64_t* ids, T* y, long count, long in, int threads) {
    const TileTable table(packed);
    each_range(threads, count, in, [&](long first, long last, int) {
        for (long i = first; i < last; ++i) {
            const u8* tile = table.at(ids[i] / TILE);
            with_kind(table.kind(ids[i] / TILE), [&](auto of) {
                typedef decltype(of) Kind;
                for (long start = 0; start < in; start += SUPERBLOCK) {
                    float values[SUPERBLOCK];
                    unpack_superblock<Kind>(tile + start / SUPERBLOCK * Kind::BYTES, ids[i] % TILE, values);
                    for (long j = 0; j < SUPERBLOCK; j += LANES) store(y + i * in + start + j, load(values + j));
                }
            });
        }
    });
}

}  // namespace
