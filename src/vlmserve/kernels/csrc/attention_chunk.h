// Query rows against a chunk of tiles: scores, weights, and weighted values added to the rows' totals.
#pragma once

#include "attention_formats.h"
#include "attention_rows.h"
#include "linear.h"

namespace {

constexpr long CHUNK = CHUNK_TILES * TOKENS;

// Stores weights as `Format::Input`s: pairs of bfloat16 if the processor multiplies such pairs, else floats.
INLINE void store_probabilities(float* to, f32v p) { store(to, p); }
INLINE void store_probabilities(std::uint32_t* to, f32v p) { store(reinterpret_cast<bf16*>(to), p); }
template <class Pair>
INLINE void store_probabilities(Pair* to, f32v p) {
    store(to->values, p);
}

template <class Format>
struct Tile {
    const typename Format::Stored *keys, *values;
    const float* scales;  // of a quantized tile
    long start, tokens;   // the position of its first token, and its number of tokens
};

// Into the second level, because the first level is needed sooner for other data.
template <class Element>
INLINE void prefetch(const Element* from) {
    __builtin_prefetch(from, 0, 2);
}

template <class Format>
INLINE void find_tiles(const AttentionArgs& args, const Geometry& at, const Item& item, long kv_head, long first, long end,
                       Tile<Format>* tiles) {
    typedef typename Format::Stored Stored;
    const std::int32_t* table = args.block_tables + item.sequence * args.table_stride;
    for (long i = 0; first + i < end; ++i) {
        // A tile before the item's first, in the same step, has no tokens.
        long missing = larger(0, item.low - first - i), index = first + i + missing;
        long block = at.tiles_per_block == 1 ? index : index / at.tiles_per_block;
        long part = index - block * at.tiles_per_block;
        long tile = (table[block] * args.kv_heads + kv_head) * at.tiles_per_block + part;
        tiles[i].keys = static_cast<const Stored*>(args.keys) + tile * at.key_tile;
        tiles[i].values = static_cast<const Stored*>(args.values) + tile * at.value_tile;
        tiles[i].start = block * args.block_size + part * TOKENS - missing * TOKENS;
        tiles[i].tokens = missing ? 0 : smaller(TOKENS, args.block_size - part * TOKENS);
        if constexpr (Format::QUANTIZED) {
            tiles[i].scales = args.scales + tile * TILE_SCALES;
            prefetch(tiles[i].scales);
            prefetch(tiles[i].scales + VALUE_SCALES);
        }
    }
}

// A block of rows, and the tiles of a chunk that any row can see.
template <class Format>
struct Meeting {
    const AttentionArgs& args;
    const Geometry& at;
    const typename Format::Input* query;      // [units][rows]
    const Tile<Format>* tiles;
    long num_tiles;
    const Tile<Format>* later;  // tiles of the next chunk, to prefetch
    long num_later;
    long sequence, before, first_row;  // `before`: tokens before the sequence's first row; `first_row`: of this block
    float *totals, *sums, *highest;
    const float* query_scales;
};

// Scores of ROWS rows with WIDE tiles, from tile `first` on.
template <class Format, int ROWS, int WIDE>
INLINE void score_tiles(const Meeting<Format>& with, long first, float (*scores)[CHUNK]) {
    constexpr long STEP = TOKENS * Format::PAIR;
    constexpr int WIDTH = WIDE * TOKEN_VECTORS;
    constexpr long LINE = 64 / static_cast<long>(sizeof(typename Format::Stored));
    const typename Format::Stored *keys[WIDE], *values[WIDE];
    for (int i = 0; i < WIDE; ++i) {
        // Past the end, recompute the last tile and ignore its scores.
        const auto& tile = with.tiles[smaller(first + i, with.num_tiles - 1)];
        keys[i] = tile.keys;
        values[i] = tile.values;
    }
    typename Format::Sum sums[ROWS][WIDTH];
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < WIDTH; ++i) sums[row][i] = typename Format::Sum{};
    for (long unit = 0; unit < with.args.head_size / Format::PAIR; ++unit) {
        if (STEP >= LINE || unit * STEP % LINE == 0)
#pragma GCC unroll 4
            for (int i = 0; i < WIDE; ++i) prefetch(values[i] + unit * STEP);
#pragma GCC unroll 2
        for (int step = 0; step < Format::STEPS; ++step) {
            typename Format::Weights w[WIDTH];
#pragma GCC unroll 8
            for (int i = 0; i < WIDTH; ++i)
                w[i] = Format::weights(keys[i / TOKEN_VECTORS] + unit * STEP + i % TOKEN_VECTORS * LANES * Format::PAIR, step);
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; ++i) Format::multiply(sums[row][i], with.query[unit * ROWS + row], w[i], step);
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < WIDTH; ++i) store(&scores[row][first * TOKENS + i * LANES], as_floats(sums[row][i]));
}

// Multiplies a tile's weights by the values' scales, as 16-bit integers. Returns the factor to undo: a power of two, so that
// rounding rarely depends on the rest of the tile.
template <class Format>
INLINE float scale_weights(const Tile<Format>& tile, float* weights, typename Format::Input* to) {
    for (int part = 0; part < TOKEN_VECTORS; ++part) {
        f32v p = load(weights + part * LANES);
        // The scale of a token with weight 0 may be anything.
        store(weights + part * LANES, choose(p == 0.0f, p, p * load(tile.scales + VALUE_SCALES + part * LANES)));
    }
    float most = largest_size(weights, TOKENS);
    // The largest weight gets between 2^13 and 2^14.
    constexpr std::uint32_t BITS = 13u << 23, ONE = 127u << 23;
    std::uint32_t exponent = most > 0x1p-100f ? bit_cast<std::uint32_t>(most) & 0x7f800000u : 0u;
    float factor = exponent ? bit_cast<float>(2 * ONE + BITS - exponent) : 0.0f;
    for (int part = 0; part < TOKEN_VECTORS; ++part)
        Format::store_integers(to + part * LANES / 2, load(weights + part * LANES) * factor);
    return most == most ? bit_cast<float>(exponent ? exponent - BITS : 0u) : most;
}

// Converts one row's scores to weights, with the running maximum and sum. Returns the factor of earlier totals. value_scales:
// for quantized tiles, factors of the weighted sums.
template <class Format>
INLINE float weigh(const Meeting<Format>& with, long row, float* scores, typename Format::Input* probabilities,
                   float* value_scales) {
    const AttentionArgs& args = with.args;
    long position = with.before + (with.first_row + row) / with.at.group;
    long oldest = first_visible(args, with.sequence, position);
    float scale = args.soft_cap > 0 ? args.scale / args.soft_cap : args.scale * LOG2_E;
    if (Format::QUANTIZED) scale *= with.query_scales[row];
    f32v most = broadcast(LOWEST);
    for (long i = 0; i < with.num_tiles; ++i) {
        const auto& tile = with.tiles[i];
        long end = larger(smaller(tile.tokens, position + 1 - tile.start), 0), start = smaller(oldest - tile.start, TOKENS);
        for (int part = 0; part < TOKEN_VECTORS; ++part) {
            float* place = scores + i * TOKENS + part * LANES;
            f32v score = load(place) * scale;
            if constexpr (Format::QUANTIZED) score *= load(tile.scales + KEY_SCALES + part * LANES);
            if (args.soft_cap > 0) score = hyperbolic_tangent(score) * (args.soft_cap * LOG2_E);
            if (start > 0 || end < TOKENS) {
                i32v token = lanes_from(part * LANES);
                i32v seen = (token < static_cast<std::int32_t>(end)) & (token >= static_cast<std::int32_t>(start));
                score = choose(seen, score, broadcast(-__builtin_inff()));
            }
            store(place, score);
            most = choose(score > most, score, most);
        }
    }
    float highest = largest(most), before = with.highest[row];
    if (before > highest) highest = before;
    float decay = power_of_two(before - highest);
    f32v sums = load(with.sums + row * LANES) * decay;
    for (long i = 0; i < with.num_tiles * TOKEN_VECTORS; ++i) {
        f32v p = power_of_two(load(scores + i * LANES) - highest);
        sums += p;
        if constexpr (Format::QUANTIZED)
            store(scores + i * LANES, p);
        else
            store_probabilities(probabilities + i * (LANES / Format::PAIR), p);
    }
    if constexpr (Format::QUANTIZED)
        for (long i = 0; i < with.num_tiles; ++i)
            value_scales[i] = scale_weights(with.tiles[i], scores + i * TOKENS, probabilities + i * TOKENS / 2);
    store(with.sums + row * LANES, sums);
    with.highest[row] = highest;
    return decay;
}

// Factors of a block's rows: decays[rows] of earlier totals, and scales of quantized tiles.
struct Factors {
    const float* decays;
    const float (*value_scales)[CHUNK_TILES];
};

// totals[:, column ...] = totals * decays + probabilities @ WIDTH vectors of the values' columns.
template <class Format, int ROWS, int WIDTH>
INLINE void add_values(const Meeting<Format>& with, const typename Format::Input (*probabilities)[CHUNK / Format::PAIR],
                       const Factors& factors, long column, long seen_of_last) {
    typedef typename Format::Stored Stored;
    constexpr long PAIR = Format::PAIR, UNITS = TOKENS / PAIR;
    const long stride = with.at.columns;
    auto place_of = [&](int row, int i) __attribute__((always_inline)) { return with.totals + row * stride + column + i * LANES; };
    // Over all tiles; for quantized tiles one at a time, because scales differ.
    typename Format::Sum totals[ROWS][WIDTH];
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < WIDTH; ++i) {
            f32v before = load(place_of(row, i)) * factors.decays[row];
            if constexpr (Format::QUANTIZED)
                store(place_of(row, i), before);
            else
                totals[row][i] = before;
        }
    auto add = [&](const Stored* values, long place, auto half) __attribute__((always_inline)) {
        // Tokens past a sequence's end may be NaN, and 0 * NaN is not 0.
        constexpr bool HALF = decltype(half)::value;
#pragma GCC unroll 2
        for (int step = 0; step < (HALF ? 1 : Format::STEPS); ++step) {
            typename Format::Weights w[WIDTH];
#pragma GCC unroll 8
            for (int i = 0; i < WIDTH; ++i) {
                const auto* from = values + i * LANES * PAIR;
                w[i] = HALF ? Format::first_of_pair(from) : Format::weights(from, step);
            }
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; ++i) Format::multiply(totals[row][i], probabilities[row][place], w[i], step);
        }
    };
    for (long t = 0; t < with.num_tiles; ++t) {
        const auto& tile = with.tiles[t];
        const auto* values = tile.values + column * PAIR;
        const auto* later = with.later[smaller(t, with.num_later - 1)].keys + column * PAIR;
        long seen = t + 1 < with.num_tiles ? tile.tokens : seen_of_last, units = seen / PAIR;
        if constexpr (Format::QUANTIZED)
            for (int row = 0; row < ROWS; ++row)
                for (int i = 0; i < WIDTH; ++i) totals[row][i] = i32v{};
        for (long unit = 0; unit < units; ++unit) {
            for (long line = 0; line < WIDTH * LANES * PAIR; line += 64 / static_cast<long>(sizeof *values))
                prefetch(later + unit * stride * PAIR + line);
            add(values + unit * stride * PAIR, t * UNITS + unit, Count<0>{});
        }
        if (PAIR > 1 && seen % PAIR) add(values + units * stride * PAIR, t * UNITS + units, Count<1>{});
        if constexpr (Format::QUANTIZED)
            for (int row = 0; row < ROWS; ++row)
                for (int i = 0; i < WIDTH; ++i)
                    store(place_of(row, i), load(place_of(row, i)) + as_floats(totals[row][i]) * factors.value_scales[row][t]);
    }
    if constexpr (!Format::QUANTIZED)
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < WIDTH; ++i) store(place_of(row, i), totals[row][i]);
}

// Tiles, or as many vectors of columns, to compute at once with some rows.
constexpr int tiles_with(int rows, int steps) {
    int tiles = 4;
    while (tiles > 1 && !sums_fit(rows, tiles * TOKEN_VECTORS, SUMS, 1, steps)) tiles /= 2;
    return tiles;
}

template <int ROWS, class Format>
void meet(const Meeting<Format>& with) {
    constexpr int WIDE = tiles_with(ROWS, Format::STEPS), WIDTH = WIDE * TOKEN_VECTORS;
    alignas(64) float scores[ROWS][CHUNK];
    alignas(64) typename Format::Input probabilities[ROWS][CHUNK / Format::PAIR];
    float decays[ROWS], value_scales[ROWS][CHUNK_TILES];
    Factors factors{decays, value_scales};
    for (long first = 0; first < with.num_tiles; first += WIDE) score_tiles<Format, ROWS, WIDE>(with, first, scores);
    for (long row = 0; row < ROWS; ++row)
        decays[row] = weigh(with, row, scores[row], probabilities[row], value_scales[row]);

    const auto& last = with.tiles[with.num_tiles - 1];
    long newest = with.before + (with.first_row + ROWS - 1) / with.at.group;
    long seen = smaller(last.tokens, newest + 1 - last.start), column = 0;
    for (; column + WIDTH * LANES <= with.at.columns; column += WIDTH * LANES)
        add_values<Format, ROWS, WIDTH>(with, probabilities, factors, column, seen);
    for (; column < with.at.columns; column += TOKENS)
        add_values<Format, ROWS, TOKEN_VECTORS>(with, probabilities, factors, column, seen);
}

}  // namespace
