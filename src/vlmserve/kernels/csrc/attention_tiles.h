// Attention of many rows by matrix tiles (amx.h).
//
// A block of up to 32 query rows meets a chunk of up to 256 tokens: scores, then weights in place of the scores, then values.
// Operands are B tiles. Keys are [head_size / 32][16 pairs][16 tokens][2], which is a key tile of the paged cache if heads are
// multiples of 32. Values are [columns / 16][16 pairs of tokens][16][2].
//
// Weights are rounded, and so are their sums: rounding a row's only large weight then changes nothing. Weights times the scales
// of 8-bit values are rounded again, which their sums do not see.
//
// Weights of a row are relative to a reference: its highest score so far, rounded up to an integer. So totals rarely need to be
// scaled, and by powers of two.
#pragma once

#include "formats.h"
#include "tile_blocks.h"

#if defined(AMX)

namespace {

// Rows of a block, tokens of a value tile, and elements of a key tile.
constexpr long TILED_BLOCK_ROWS = 2 * TILE_ROWS, TILED_STEP = TILE_BYTES / 2;
constexpr long TILED_CHUNK = 256, TILED_STEPS = TILED_CHUNK / TILED_STEP;
constexpr long TILE_ELEMENTS = TILE_ROWS * TILED_STEP;
// Floats between rows of scores. Rows at multiples of 1024 bytes would share cache lines.
constexpr long SCORE_ROW = TILED_CHUNK + LANES;
// The reference score of a row that saw nothing.
constexpr float NO_SCORE = -3.0e38f;

INLINE long tiled_units(long head_size) { return (head_size + TILED_STEP - 1) / TILED_STEP; }
INLINE long tiled_columns(long head_size) { return (head_size + TILE_ROWS - 1) / TILE_ROWS; }

// Keys and values of a chunk.
struct TiledChunk {
    const bf16* keys[2 * TILED_STEPS];  // tiles of 16 tokens
    const bf16* values[TILED_STEPS];    // tiles of 32 tokens
    long steps;
};

// A block of rows. Rows of the last tile without a query have anything.
struct TiledBlock {
    const bf16* query;  // [row tiles][units][16][32]
    float* totals;      // [rows][columns]
    float* sums;        // [rows][LANES]
    float* highest;     // [rows]: references
    long rows;
};

// One thread's scores. Weights replace them from the start of a row.
struct TiledScores {
    float rows[TILED_BLOCK_ROWS][SCORE_ROW];
};

// The tiles of a row's query, 32 elements each, with zeros after `size`.
INLINE void tile_query(const bf16* query, long size, long row, bf16* to) {
    const long units = tiled_units(size);
    to += row / TILE_ROWS * units * TILE_ELEMENTS + row % TILE_ROWS * TILED_STEP;
    for (long unit = 0; unit < units; ++unit, to += TILE_ELEMENTS) {
        const long count = smaller(TILED_STEP, size - unit * TILED_STEP);
        if (count < TILED_STEP) __builtin_memset(to, 0, TILE_BYTES);
        __builtin_memcpy(to, query + unit * TILED_STEP, static_cast<std::size_t>(count) * sizeof *to);
    }
}

template <int ROWS>
INLINE void score_step(const bf16* query, long units, const bf16* keys, const bf16* more_keys, float* scores) {
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
    for (long unit = 0; unit < units; ++unit) {
        load_tile<4>(query + unit * TILE_ELEMENTS, TILE_BYTES);
        load_tile<6>(keys + unit * TILE_ELEMENTS, TILE_BYTES);
        load_tile<7>(more_keys + unit * TILE_ELEMENTS, TILE_BYTES);
        if constexpr (ROWS > 1) load_tile<5>(query + (units + unit) * TILE_ELEMENTS, TILE_BYTES);
        multiply_block<ROWS, 2>();
    }
    constexpr long STRIDE = SCORE_ROW * static_cast<long>(sizeof(float));
    store_tile<0>(scores, STRIDE);
    store_tile<1>(scores + TILE_ROWS, STRIDE);
    if constexpr (ROWS > 1) {
        store_tile<2>(scores + TILE_ROWS * SCORE_ROW, STRIDE);
        store_tile<3>(scores + TILE_ROWS * SCORE_ROW + TILE_ROWS, STRIDE);
    }
}

// totals[:, columns of one or two tiles] = weights values, or += if it CONTINUES.
template <bool CONTINUES, int ROWS, int COLUMNS>
INLINE void add_tiled_values(const TiledScores& scores, const TiledChunk& chunk, long column, float* totals, long stride) {
    constexpr long WEIGHT_STRIDE = SCORE_ROW * static_cast<long>(sizeof(float));
    const float* weights = scores.rows[0];
    float* more = totals + TILE_ROWS * stride;
    stride *= static_cast<long>(sizeof(float));
    if constexpr (CONTINUES) {
        load_tile<0>(totals, stride);
        if constexpr (COLUMNS > 1) load_tile<1>(totals + TILE_ROWS, stride);
        if constexpr (ROWS > 1) load_tile<2>(more, stride);
        if constexpr (ROWS > 1 && COLUMNS > 1) load_tile<3>(more + TILE_ROWS, stride);
    } else {
        clear_tile<0>();
        clear_tile<1>();
        clear_tile<2>();
        clear_tile<3>();
    }
    for (long step = 0; step < chunk.steps; ++step) {
        const bf16* values = chunk.values[step] + column * TILE_ELEMENTS;
        load_tile<4>(weights + step * TILE_ROWS, WEIGHT_STRIDE);
        load_tile<6>(values, TILE_BYTES);
        if constexpr (COLUMNS > 1) load_tile<7>(values + TILE_ELEMENTS, TILE_BYTES);
        if constexpr (ROWS > 1) load_tile<5>(weights + TILE_ROWS * SCORE_ROW + step * TILE_ROWS, WEIGHT_STRIDE);
        multiply_block<ROWS, COLUMNS>();
    }
    store_tile<0>(totals, stride);
    if constexpr (COLUMNS > 1) store_tile<1>(totals + TILE_ROWS, stride);
    if constexpr (ROWS > 1) store_tile<2>(more, stride);
    if constexpr (ROWS > 1 && COLUMNS > 1) store_tile<3>(more + TILE_ROWS, stride);
}

INLINE f32v rounded_to_bf16(f32v x) { return bit_cast<f32v>(__builtin_convertvector(round_to_bf16(x), u32v) << 16); }

// 2^x for x <= 0, to a relative error of 1e-4, for weights that are rounded to bfloat16. 0 below -125; NaN stays NaN.
INLINE f32v tiled_power(f32v x) {
    constexpr float MAGIC = 12582912.0f, LEAST = -125.0f;
    f32v shifted = x + MAGIC, r = x - (shifted - MAGIC);
    f32v p = broadcast(5.517167e-2f) * r + 2.4261112e-1f;
    p = p * r + 6.9326099e-1f;
    p = p * r + 9.9992807e-1f;
    return choose(x < LEAST, f32v{}, bit_cast<f32v>(bit_cast<u32v>(p) + (bit_cast<u32v>(shifted) << 23)));
}

// Vectors of scores that a row sees whole. Others have tokens that it does not see.
struct WholeVectors {
    long first, last;
};

// Converts a row's scores of `steps` steps to weights. finish(i, score): vector i as a score in base 2, divided by `scale`;
// may be the score itself where a row sees all tokens, unless FINISHES. convert(i, exponents): stores the weights of vector i,
// and returns what is added to their sum. Returns the factor of earlier totals.
template <bool FINISHES, class Finish, class Convert>
INLINE float weigh_tiled(float* scores, float* row_sums, float& highest, long steps, WholeVectors whole, float scale, Finish finish,
                         Convert convert) {
    f32v most = broadcast(-__builtin_inff());
    auto finish_vectors = [&](long from, long to) __attribute__((always_inline)) {
        for (long i = from; i < to; ++i) {
            f32v score = finish(i, load(scores + i * LANES));
            store(scores + i * LANES, score);
            most = choose(score > most, score, most);
        }
    };
    if constexpr (FINISHES) {
        finish_vectors(0, 2 * steps);
    } else {
        finish_vectors(0, whole.first);
        for (long i = whole.first; i < whole.last; ++i) {
            f32v score = load(scores + i * LANES);
            most = choose(score > most, score, most);
        }
        finish_vectors(whole.last, 2 * steps);
    }
    float reference = __builtin_ceilf(largest(most) * scale), before = highest;
    if (before > reference) reference = before;
    float decay = before == reference ? 1.0f : power_of_two(before - reference);
    f32v sums = load(row_sums) * decay;
#pragma GCC unroll 2
    for (long i = 0; i < 2 * steps; ++i) sums += convert(i, load(scores + i * LANES) * scale - reference);
    store(row_sums, sums);
    highest = reference;
    return decay;
}

// A block's rows with a chunk. weigh(row): converts a row's scores to weights, and returns the factor of earlier totals.
// CONTINUES: adds to the totals.
template <bool CONTINUES, int ROWS, class WeighRow>
INLINE void meet_tiles(const TiledBlock& block, const TiledChunk& chunk, long units, long columns, TiledScores& scores, WeighRow weigh) {
    const long stride = columns * TILE_ROWS;
    for (long step = 0; step < chunk.steps; ++step)
        score_step<ROWS>(block.query, units, chunk.keys[2 * step], chunk.keys[2 * step + 1], scores.rows[0] + step * TILED_STEP);
    for (long row = 0; row < block.rows; ++row) {
        float decay = weigh(row);
        if (CONTINUES && decay != 1.0f)
            for (float* total = block.totals + row * stride; total < block.totals + (row + 1) * stride; total += LANES)
                store(total, load(total) * decay);
    }
    long column = 0;
    for (; column + 1 < columns; column += 2)
        add_tiled_values<CONTINUES, ROWS, 2>(scores, chunk, column, block.totals + column * TILE_ROWS, stride);
    if (column < columns) add_tiled_values<CONTINUES, ROWS, 1>(scores, chunk, column, block.totals + column * TILE_ROWS, stride);
}

template <bool CONTINUES, class WeighRow>
INLINE void meet_tiles(const TiledBlock& block, const TiledChunk& chunk, long units, long columns, TiledScores& scores, WeighRow weigh) {
    if (block.rows > TILE_ROWS)
        meet_tiles<CONTINUES, 2>(block, chunk, units, columns, scores, weigh);
    else
        meet_tiles<CONTINUES, 1>(block, chunk, units, columns, scores, weigh);
}

}  // namespace

#endif
