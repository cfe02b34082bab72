// Few rows of bfloat16 queries where matrix tiles compute many rows: the same operations by vectors, so that a row's result is
// the same to the last bit.
//
// A tile product adds 32 products to each sum. Fused multiply-adds that start at zero add those of even elements, and others
// those of odd elements. Then both results are added, and their sum is added to the sum. Only denormals differ: tile products
// flush them to zero.
#pragma once

#include "attention_chunk.h"
#include "attention_tiles.h"

#if defined(AMX)

namespace {

static_assert(TOKENS == TILE_ROWS && LANES == TOKENS && TILED_CHUNK == CHUNK, "a vector has the scores of a tile");

// Pairs of a tile product.
constexpr long TILED_PAIRS = TILED_STEP / 2;

struct FewRows {
    typedef bf16 Element, Stored;
    typedef FewRows Storage, Met;
    struct Input {
        float values[2];
    };
    static constexpr bool QUANTIZED = false, EXPANDED = false, TILED = true;
    static constexpr long PAIR = 2;
    static constexpr int BLOCK = 4;

    INLINE float arrange(const bf16* query, long size, Input* to, long stride) {
        for (long unit = 0; unit < size / PAIR; ++unit) to[unit * stride] = {{to_float(query[2 * unit]), to_float(query[2 * unit + 1])}};
        return 1.0f;
    }
};

// Converts a row's scores with `count` tiles, in `steps` steps, to weights. keep(i, weights): stores those of tile i.
template <class Format, class Keep>
INLINE void weigh_row(const AttentionArgs& args, long sequence, long position, float* scores, float* sums, float& highest,
                      const Tile<Format>* tiles, long count, long steps, Keep keep) {
    const long oldest = first_visible(args, sequence, position);
    auto hide = [&](long i, f32v score) __attribute__((always_inline)) {
        const Tile<Format>& tile = tiles[smaller(i, count - 1)];
        const long end = i < count ? smaller(tile.tokens, position + 1 - tile.start) : 0, start = oldest - tile.start;
        if (start <= 0 && end >= TOKENS) return score;
        const i32v token = lanes_from(0);
        const i32v seen = (token < static_cast<std::int32_t>(larger(end, 0))) & (token >= static_cast<std::int32_t>(smaller(start, TOKENS)));
        return choose(seen, score, broadcast(-__builtin_inff()));
    };
    WholeVectors whole{2 * steps, 2 * steps};
    if (args.block_size % TOKENS == 0) {
        const long start = tiles[0].start;
        whole.first = smaller(2 * steps, larger(0, oldest - start + TOKENS - 1) / TOKENS);
        whole.last = larger(whole.first, smaller(smaller(2 * steps, count), larger(0, position + 1 - start) / TOKENS));
    }
    const float scale = args.soft_cap > 0 ? args.scale / args.soft_cap : args.scale * LOG2_E;
    auto finish = [&](long i, f32v score) __attribute__((always_inline)) {
        score *= scale;
        if constexpr (Format::QUANTIZED) score *= load(tiles[smaller(i, count - 1)].scales + KEY_SCALES);
        if (args.soft_cap > 0) score = hyperbolic_tangent(score) * (args.soft_cap * LOG2_E);
        return hide(i, score);
    };
    auto convert = [&](long i, f32v exponents) __attribute__((always_inline)) {
        const f32v p = rounded_to_bf16(tiled_power(exponents));
        // The scale of a token with weight 0 may be anything.
        if constexpr (Format::QUANTIZED)
            keep(i, choose(p == 0.0f, p, p * load(tiles[smaller(i, count - 1)].scales + VALUE_SCALES)));
        else
            keep(i, p);
        return p;
    };
    if (Format::QUANTIZED || args.soft_cap > 0 || scale <= 0)
        weigh_tiled<true>(scores, sums, highest, steps, whole, 1.0f, finish, convert);
    else
        weigh_tiled<false>(scores, sums, highest, steps, whole, scale, hide, convert);
}

// Scores of ROWS rows with WIDE tiles, from tile `first` on.
template <int ROWS, int WIDE>
INLINE void score_as_tiles(const Meeting<FewRows>& with, long first, float (*scores)[CHUNK]) {
    const bf16 *keys[WIDE], *values[WIDE];
    for (int i = 0; i < WIDE; ++i) {
        // Past the end, recompute the last tile and ignore its scores.
        const auto& tile = with.tiles[smaller(first + i, with.num_tiles - 1)];
        keys[i] = tile.keys;
        values[i] = tile.values;
    }
    f32v sums[ROWS][WIDE] = {};
    const long units = with.args.head_size / 2;
    for (long start = 0; start < units; start += TILED_PAIRS) {
        f32v even[ROWS][WIDE] = {}, odd[ROWS][WIDE] = {};
        for (long unit = start; unit < smaller(units, start + TILED_PAIRS); ++unit) {
#pragma GCC unroll 4
            for (int i = 0; i < WIDE; ++i) {
                const bf16* pairs = keys[i] + unit * TILED_STEP;
                prefetch(values[i] + unit * TILED_STEP);
                const f32v w0 = half_of_pairs(pairs, 0), w1 = half_of_pairs(pairs, 1);
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; ++row) {
                    const auto& x = with.query[unit * ROWS + row].values;
                    even[row][i] += x[0] * w0;
                    odd[row][i] += x[1] * w1;
                }
            }
        }
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < WIDE; ++i) sums[row][i] += even[row][i] + odd[row][i];
    }
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < WIDE; ++i) store(&scores[row][(first + i) * TOKENS], sums[row][i]);
}

// totals[:, column ...] = weights @ WIDTH vectors of the values' columns. seen_of_last: tokens of the last tile that a row sees.
template <int ROWS, int WIDTH>
INLINE void add_values_as_tiles(const Meeting<FewRows>& with, const float (*weights)[CHUNK], long column, long seen_of_last) {
    const long stride = with.at.columns;
    f32v totals[ROWS][WIDTH] = {};
    for (long step = 0; step < with.num_tiles; step += 2) {
        f32v even[ROWS][WIDTH] = {}, odd[ROWS][WIDTH] = {};
        for (long t = step; t < smaller(step + 2, with.num_tiles); ++t) {
            const Tile<FewRows>& tile = with.tiles[t];
            const long seen = t + 1 < with.num_tiles ? tile.tokens : seen_of_last;
            const auto* values = tile.values + column * 2;
            const auto* later = with.later[smaller(t, with.num_later - 1)].keys + column * 2;
            for (long token = 0; token < seen; token += 2) {
#pragma GCC unroll 4
                for (int i = 0; i < WIDTH; ++i) {
                    const auto* pairs = values + token * stride + i * TILED_STEP;
                    prefetch(later + token * stride + i * TILED_STEP);
                    f32v v0 = half_of_pairs(pairs, 0), v1 = half_of_pairs(pairs, 1);
                    // Tokens past a sequence's end may be NaN, and 0 * NaN is not 0.
                    if (token + 1 == seen) v1 = f32v{};
#pragma GCC unroll 4
                    for (int row = 0; row < ROWS; ++row) {
                        const float* weight = weights[row] + t * TOKENS + token;
                        even[row][i] += weight[0] * v0;
                        odd[row][i] += weight[1] * v1;
                    }
                }
            }
        }
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < WIDTH; ++i) totals[row][i] += even[row][i] + odd[row][i];
    }
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < WIDTH; ++i) store(with.totals + row * stride + column + i * LANES, totals[row][i]);
}

template <int ROWS>
void meet(const Meeting<FewRows>& with) {
    constexpr int WIDE = ROWS <= 2 ? 4 : 2;
    alignas(64) float scores[ROWS][CHUNK];
    alignas(64) float weights[ROWS][CHUNK];
    const long steps = (with.num_tiles + 1) / 2;
    for (long first = 0; first < with.num_tiles; first += WIDE) score_as_tiles<ROWS, WIDE>(with, first, scores);
    for (long row = 0; row < ROWS; ++row) {
        auto keep = [&](long i, f32v weight) __attribute__((always_inline)) { store(weights[row] + i * LANES, weight); };
        weigh_row(with.args, with.sequence, with.before + (with.first_row + row) / with.at.group, scores[row],
                  with.sums + row * LANES, with.highest[row], with.tiles, with.num_tiles, steps, keep);
    }
    const auto& last = with.tiles[with.num_tiles - 1];
    const long newest = with.before + (with.first_row + ROWS - 1) / with.at.group;
    const long seen = smaller(last.tokens, newest + 1 - last.start);
    long column = 0;
    for (; column + WIDE * LANES <= with.at.columns; column += WIDE * LANES)
        add_values_as_tiles<ROWS, WIDE>(with, weights, column, seen);
    for (; column < with.at.columns; column += LANES) add_values_as_tiles<ROWS, 1>(with, weights, column, seen);
}

}  // namespace

#endif
