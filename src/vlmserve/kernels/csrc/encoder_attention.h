// Full attention within each image, as in a vision tower.
//
// Everything is transposed: the 32 lanes of a tile are queries; rows are tokens in the first matmul, features in the second. So
// maxima, sums and weights never cross lanes, and both matmuls use `linear.h`: scores^T = keys queries^T, output^T = values^T
// weights^T. All scores of a tile are kept: one pass finds the maxima, one computes weights. Without bfloat16 instructions,
// everything is converted to float32 once, because it is multiplied many times.
#pragma once

#include "encoder_tiles.h"
#include "linear.h"

namespace {

// One thread's part of the scratch: a head's keys and values, and the data of a tile of queries.
template <class Format>
struct EncoderScratch {
    typedef typename Format::Element Element;
    typedef typename Format::Input Input;

    Input* keys;       // blocks of tokens, each [head_size / pair][tokens of the block]
    Input* values;     // blocks of features, each [tokens / pair][features of the block]
    float* scores;     // [tokens][TILE], then outputs, [head_size, rounded up][TILE]
    Element* queries;  // a tile of panels [head_size / pair][16][pair]
    Element* weights;  // a tile of panels [tokens / pair][16][pair]

    static long units(long count) { return (count + Format::PAIR - 1) / Format::PAIR; }

    EncoderScratch(const EncoderAttentionArgs& args, long thread) {
        lay_out(args, static_cast<char*>(args.scratch) + thread * bytes(args));
    }

    static long bytes(const EncoderAttentionArgs& args) { return EncoderScratch().lay_out(args, nullptr); }

private:
    EncoderScratch() = default;

    // Places the arrays in `memory`, unless it is null. Returns their bytes.
    long lay_out(const EncoderAttentionArgs& args, char* memory) {
        long end = 0;
        auto take = [&](auto*& place, long count) {
            place = memory ? reinterpret_cast<decltype(+place)>(memory + end) : nullptr;
            end += (count * static_cast<long>(sizeof *place) + 63) / 64 * 64;
        };
        take(keys, args.length * units(args.head_size));
        take(values, args.head_size * units(args.length));
        take(scores, larger(args.length, (args.head_size + LANES - 1) / LANES * LANES) * TILE);
        take(queries, units(args.head_size) * TILE * Format::PAIR);
        take(weights, units(args.length) * TILE * Format::PAIR);
        return end;
    }
};

// How bfloat16 is multiplied.
struct WidenedBFloat16 : Float32 {
    INLINE Input input(const bf16* x) { return to_float(*x); }
};
template <bool PAIRS>
struct EncoderFormat {
    typedef BFloat16 Type;
};
template <>
struct EncoderFormat<false> {
    typedef WidenedBFloat16 Type;
};
typedef EncoderFormat<BFloat16::STEPS == 1>::Type EncoderBFloat16;

INLINE void copy_unit(float* to, const float* from) { *to = *from; }
INLINE void copy_unit(float* to, const bf16* from) { *to = to_float(*from); }
INLINE void copy_unit(bf16* to, const bf16* from) { __builtin_memcpy(to, from, BFloat16::PAIR * sizeof *to); }

INLINE void store_weights(float* to, const f32v (&p)[1]) { store(to, p[0]); }
INLINE void store_weights(bf16* to, const f32v (&p)[2]) {
#if defined(__AVX512BF16__)
    // After rounding, the second elements of pairs follow all first ones.
    u32v order;
    for (std::uint32_t lane = 0; lane < LANES; ++lane) order[lane] = lane | (LANES + lane) << 16;
    __m512i rounded = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(p[1]), bit_cast<__m512>(p[0])));
    u32v pairs = bit_cast<u32v>(_mm512_maskz_permutexvar_epi16(0xffffffffu, bit_cast<__m512i>(order), rounded));
#else
    u32v pairs = __builtin_convertvector(round_to_bf16(p[0]), u32v) |
                   __builtin_convertvector(round_to_bf16(p[1]), u32v) << 16;
#endif
    __builtin_memcpy(to, &pairs, sizeof pairs);
}

// Stored: the dtype of queries, keys and values in memory.
template <class Format, class Stored>
struct EncoderAttention {
    typedef typename Format::Element Element;
    static constexpr long PAIR = Format::PAIR;

    const EncoderAttentionArgs& args;
    const EncoderScratch<Format> own;
    const long width = args.heads * args.head_size, token_units = EncoderScratch<Format>::units(args.length);
    const Stored* qkv = nullptr;  // of the current head
    Stored* y = nullptr;

    EncoderAttention(const EncoderAttentionArgs& all, long thread) : args(all), own(all, thread) {}

    // The queries `first <= query < last` of a head.
    void attend(long image, long head, long first, long last) {
        qkv = static_cast<const Stored*>(args.qkv) + image * args.length * 3 * width + head * args.head_size;
        // Query `args.first` has the first row of the output.
        y = static_cast<Stored*>(args.y) + (image * (args.last - args.first) - args.first) * width + head * args.head_size;
        rearrange_keys();
        rearrange_values();
        for (; first < last; first += TILE) {
            long queries = smaller(TILE, last - first);
            rearrange_queries(first, queries);
            f32v highest[VECTORS], totals[VECTORS];
            score(highest);
            weigh(highest, totals);
            mix(totals);
            write(first, queries);
        }
    }

    // Rows are whole pages apart, which hardware does not prefetch.
    void prefetch(const Stored* row, long ahead) const {
        for (long i = 0; i < args.head_size; i += 64 / static_cast<long>(sizeof *row))
            __builtin_prefetch(row + ahead * 3 * width + i);
    }

    void rearrange_keys() {
        long units = args.head_size / PAIR;
        for (long block = 0; block < num_blocks(args.length, Format::BLOCK); ++block) {
            long first = block_start(args.length, block, Format::BLOCK), count = block_start(args.length, block + 1, Format::BLOCK) - first;
            auto* to = own.keys + first * units;
            for (long row = 0; row < count; ++row) {
                const Stored* from = qkv + (first + row) * 3 * width + width;
                prefetch(from, Format::BLOCK);
                for (long unit = 0; unit < units; ++unit) to[unit * count + row] = Format::input(from + unit * PAIR);
            }
        }
    }

    void rearrange_values() {
        for (long unit = 0; unit < token_units; ++unit) {
            const Stored* from = qkv + unit * PAIR * 3 * width + 2 * width;
            bool whole = (unit + 1) * PAIR <= args.length;
            for (long i = 0; i < PAIR; ++i) prefetch(from + i * 3 * width, Format::BLOCK);
            for (long block = 0; block < num_blocks(args.head_size, Format::BLOCK); ++block) {
                long first = block_start(args.head_size, block, Format::BLOCK), count = block_start(args.head_size, block + 1, Format::BLOCK) - first;
                auto* to = own.values + first * token_units + unit * count;
                for (long row = 0; row < count; ++row) {
                    Stored pair[PAIR] = {from[first + row]};
                    if (PAIR > 1 && whole) pair[PAIR - 1] = from[first + row + (PAIR - 1) * 3 * width];
                    to[row] = Format::input(pair);
                }
            }
        }
    }

    void rearrange_queries(long first, long queries) {
        long units = args.head_size / PAIR;
        for (long lane = 0; lane < TILE; ++lane) {
            // Lanes without a query repeat the last one.
            const Stored* from = qkv + (first + smaller(lane, queries - 1)) * 3 * width;
            prefetch(from, TILE);
            Element* to = own.queries + (lane / PANEL * units * PANEL + lane % PANEL) * PAIR;
            for (long unit = 0; unit < units; ++unit) copy_unit(to + unit * PANEL * PAIR, from + unit * PAIR);
        }
    }

    void score(f32v (&highest)[VECTORS]) {
        for (f32v& most : highest) most = broadcast(-__builtin_inff());
        long units = args.head_size / PAIR;
        for (long block = 0; block < num_blocks(args.length, Format::BLOCK); ++block) {
            long first = block_start(args.length, block, Format::BLOCK);
            with_rows<Format::BLOCK>(block_start(args.length, block + 1, Format::BLOCK) - first, [&](auto rows) {
                constexpr int ROWS = decltype(rows)::value;
                f32v sums[ROWS][VECTORS];
                multiply_tile<Format>(own.keys + first * units, own.queries, PANEL * PAIR * units, units, sums);
                for (long row = 0; row < ROWS; ++row)
                    for (int vector = 0; vector < VECTORS; ++vector) {
                        highest[vector] = sums[row][vector] > highest[vector] ? sums[row][vector] : highest[vector];
                        store(own.scores + (first + row) * TILE + vector * LANES, sums[row][vector]);
                    }
            });
        }
    }

    void weigh(const f32v (&highest)[VECTORS], f32v (&totals)[VECTORS]) {
        // Weights that are rounded to bfloat16 need no more precision.
        constexpr bool COARSE = PAIR > 1;
        float scale = args.scale * LOG2_E;
        f32v most[VECTORS];
        for (int vector = 0; vector < VECTORS; ++vector) {
            most[vector] = highest[vector] * scale;
            totals[vector] = f32v{};
        }
        for (long unit = 0; unit < token_units; ++unit)
            for (int vector = 0; vector < VECTORS; ++vector) {
                const float* scores = own.scores + unit * PAIR * TILE + vector * LANES;
                f32v p[PAIR] = {power_of_two<COARSE>(load(scores) * scale - most[vector])};
                if (PAIR > 1 && unit * PAIR + 1 < args.length)
                    p[PAIR - 1] = power_of_two<COARSE>(load(scores + (PAIR - 1) * TILE) * scale - most[vector]);
                for (long i = 0; i < PAIR; ++i) totals[vector] += p[i];
                store_weights(own.weights + unit * PANEL * PAIR + vector_start<Format>(vector, PANEL * PAIR * token_units), p);
            }
    }

    void mix(const f32v (&totals)[VECTORS]) {
        f32v shares[VECTORS];
        for (int vector = 0; vector < VECTORS; ++vector) shares[vector] = 1.0f / totals[vector];
        for (long block = 0; block < num_blocks(args.head_size, Format::BLOCK); ++block) {
            long first = block_start(args.head_size, block, Format::BLOCK);
            with_rows<Format::BLOCK>(block_start(args.head_size, block + 1, Format::BLOCK) - first, [&](auto rows) {
                constexpr int ROWS = decltype(rows)::value;
                f32v sums[ROWS][VECTORS];
                multiply_tile<Format>(own.values + first * token_units, own.weights, PANEL * PAIR * token_units, token_units, sums);
                for (long row = 0; row < ROWS; ++row)
                    for (int vector = 0; vector < VECTORS; ++vector)
                        store(own.scores + (first + row) * TILE + vector * LANES, sums[row][vector] * shares[vector]);
            });
        }
    }

    void write(long first, long queries) {
        for (long query = 0; query < queries; ++query)
            for (long i = 0; i < args.head_size; i += LANES) {
                f32v features;
                for (int lane = 0; lane < LANES; ++lane) features[lane] = own.scores[(i + lane) * TILE + query];
                store_some(y + (first + query) * width + i, features, smaller(LANES, args.head_size - i));
            }
    }
};

// Attention: `EncoderAttention` or `TiledEncoder`. Each part of a head has a multiple of `block` queries.
template <class Attention>
void attend_encoder(const EncoderAttentionArgs& args, long block) {
    // A head is one item, unless there are more threads than heads.
    long heads = args.images * args.heads, blocks = (args.last - args.first + block - 1) / block;
    long parts = smaller(blocks, (args.threads + heads - 1) / heads), items = heads * parts;
    each_in_turn(args.threads, items, [&](long item, int thread) {
        long head = item / parts, part = item % parts;
        long first = args.first + blocks * part / parts * block;
        long last = smaller(args.last, args.first + blocks * (part + 1) / parts * block);
        Attention(args, thread).attend(head / args.heads, head % args.heads, first, last);
    });
}

void encoder_attention(const EncoderAttentionArgs& args) {
    if (args.dtype == FLOAT32) return attend_encoder<EncoderAttention<Float32, float>>(args, TILE);
#if defined(AMX)
    if (is_tiled(args)) return attend_encoder<TiledEncoder>(args, TILED_BLOCK_ROWS);
#endif
    attend_encoder<EncoderAttention<EncoderBFloat16, bf16>>(args, TILE);
}

long encoder_attention_scratch(const EncoderAttentionArgs& args) {
    if (args.dtype == FLOAT32) return args.threads * EncoderScratch<Float32>::bytes(args);
#if defined(AMX)
    if (is_tiled(args)) return args.threads * EncoderTiles::bytes(args);
#endif
    return args.threads * EncoderScratch<EncoderBFloat16>::bytes(args);
}

}  // namespace
