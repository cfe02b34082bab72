// Matmuls of the delta rule's chunks by matrix tiles (amx.h).
//
// A state is float32, so operands are split: x = high + low, both bfloat16. A matmul is high high + high low + low high, with
// float32 sums. Its error is about 2^-17 of the terms.
#pragma once

#include "delta_chunk.h"
#include "tile_blocks.h"

#if defined(AMX)

namespace {

constexpr long DELTA_STEP = TILE_BYTES / 2;                  // elements or rows of a tile that are summed
constexpr long DELTA_TILE = TILE_ROWS * DELTA_STEP;          // elements of a tile
constexpr long DELTA_COLUMNS = 2 * TILE_ROWS;                // columns of a panel
constexpr long ROW_TILES = CHUNK_ROWS / TILE_ROWS, ROW_UNITS = CHUNK_ROWS / DELTA_STEP;
// Splitting keys and states takes longer than it saves with fewer rows.
constexpr long TILED_DELTA_ROWS = 32;
static_assert(BLOCK_ROWS == TILE_ROWS && LANES == TILE_ROWS, "a block of rows is a tile");

// A layer of float32 is computed in float32.
INLINE bool is_tiled(const DeltaArgs& args, long rows) { return args.dtype == BFLOAT16 && rows >= TILED_DELTA_ROWS; }

INLINE long key_units(const DeltaArgs& args) { return (args.key_size + DELTA_STEP - 1) / DELTA_STEP; }

// Tiles of a split matrix: those of `low` follow those of `high`.
struct SplitTiles {
    bf16* high;
    long low, step;  // elements between parts, and between tiles of different rows (of B: columns)

    bf16* at(long tile, long unit) const { return high + tile * step + unit * DELTA_TILE; }
};

struct SplitVector {
    u16v high, low;
};

INLINE SplitVector split(f32v x) {
    const u16v high = round_to_bf16(x);
    return {high, round_to_bf16(x - bit_cast<f32v>(__builtin_convertvector(high, u32v) << 16))};
}

// 16 numbers as half a row of an A tile.
INLINE void store_split(const SplitTiles& tiles, bf16* to, f32v x) {
    const SplitVector parts = split(x);
    __builtin_memcpy(to, &parts.high, sizeof parts.high);
    __builtin_memcpy(to + tiles.low, &parts.low, sizeof parts.low);
}

INLINE u32v joined(u16v first, u16v second) {
    return __builtin_convertvector(first, u32v) | __builtin_convertvector(second, u32v) << 16;
}

// Pairs of two rows as a row of a B tile.
INLINE void store_split_pairs(const SplitTiles& tiles, bf16* to, f32v first, f32v second) {
    const SplitVector a = split(first), b = split(second);
    const u32v high = joined(a.high, b.high), low = joined(a.low, b.low);
    __builtin_memcpy(to, &high, sizeof high);
    __builtin_memcpy(to + tiles.low, &low, sizeof low);
}

// Transposes 16 rows of 16 pairs, of both parts: an A tile and the B tile of the transposed matrix.
INLINE void transpose_tiles(const SplitTiles& tiles, const bf16* from, bf16* to) {
    for (long part = 0; part <= tiles.low; part += tiles.low) {
        u32v rows[TILE_ROWS];
        __builtin_memcpy(rows, from + part, sizeof rows);
        transpose(rows);
        __builtin_memcpy(to + part, rows, sizeof rows);
    }
}

// The sums in tile registers += a b, from row tile `row` and column tile `column` on.
template <int ROWS, int COLUMNS>
INLINE void add_split(const SplitTiles& a, long row, const SplitTiles& b, long column, long units) {
    for (int part = 0; part < 3; ++part) {
        const bf16 *x = a.at(row, 0) + (part == 2 ? a.low : 0), *y = b.at(column, 0) + (part == 1 ? b.low : 0);
        for (long unit = 0; unit < units; ++unit, x += DELTA_TILE, y += DELTA_TILE) {
            load_tile<4>(x, TILE_BYTES);
            load_tile<6>(y, TILE_BYTES);
            if constexpr (COLUMNS > 1) load_tile<7>(y + b.step, TILE_BYTES);
            if constexpr (ROWS > 1) load_tile<5>(x + a.step, TILE_BYTES);
            multiply_block<ROWS, COLUMNS>();
        }
    }
}

// sums = a b, or sums += a b if KEEPS. sums: float32 rows, `stride` elements apart.
template <bool KEEPS, int ROWS, int COLUMNS>
INLINE void multiply_split(const SplitTiles& a, long row, const SplitTiles& b, long column, long units, float* sums, long stride) {
    float* more = sums + TILE_ROWS * stride;
    const long bytes = stride * static_cast<long>(sizeof(float));
    if constexpr (KEEPS) {
        load_tile<0>(sums, bytes);
        if constexpr (COLUMNS > 1) load_tile<1>(sums + TILE_ROWS, bytes);
        if constexpr (ROWS > 1) load_tile<2>(more, bytes);
        if constexpr (ROWS > 1 && COLUMNS > 1) load_tile<3>(more + TILE_ROWS, bytes);
    } else {
        clear_tile<0>();
        clear_tile<1>();
        clear_tile<2>();
        clear_tile<3>();
    }
    add_split<ROWS, COLUMNS>(a, row, b, column, units);
    store_tile<0>(sums, bytes);
    if constexpr (COLUMNS > 1) store_tile<1>(sums + TILE_ROWS, bytes);
    if constexpr (ROWS > 1) store_tile<2>(more, bytes);
    if constexpr (ROWS > 1 && COLUMNS > 1) store_tile<3>(more + TILE_ROWS, bytes);
}

// The same for one or two row tiles, with one or two column tiles.
template <bool KEEPS>
INLINE void multiply_some(const SplitTiles& a, long row, long rows, const SplitTiles& b, long column, long columns, long units,
                          float* sums, long stride) {
    if (rows > 1 && columns > 1) return multiply_split<KEEPS, 2, 2>(a, row, b, column, units, sums, stride);
    if (rows > 1) return multiply_split<KEEPS, 2, 1>(a, row, b, column, units, sums, stride);
    if (columns > 1) return multiply_split<KEEPS, 1, 2>(a, row, b, column, units, sums, stride);
    multiply_split<KEEPS, 1, 1>(a, row, b, column, units, sums, stride);
}

// A thread's tiles. A: rows of queries and keys; keys as rows of features; system and scores. B: columns of keys, state, updates.
struct DeltaTiles {
    SplitTiles query, key, features, system, seen, columns, state, updates;
    float *known, *results;  // [rows][DELTA_COLUMNS]

    long floats = 0;

    // memory: null to compute the size.
    DeltaTiles(const DeltaArgs& args, float* memory) {
        auto take = [&](long count) {
            float* taken = memory ? memory + floats : nullptr;
            floats += count;
            return taken;
        };
        // Two parts of two bytes take as much memory as a float.
        auto take_tiles = [&](long tiles, long units) {
            return SplitTiles{reinterpret_cast<bf16*>(take(tiles * units * DELTA_TILE)), tiles * units * DELTA_TILE, units * DELTA_TILE};
        };
        query = take_tiles(ROW_TILES, key_units(args));
        key = take_tiles(ROW_TILES, key_units(args));
        columns = take_tiles(ROW_TILES, key_units(args));
        features = take_tiles(args.key_size / TILE_ROWS, ROW_UNITS);
        system = take_tiles(ROW_TILES, ROW_UNITS);
        seen = take_tiles(ROW_TILES, ROW_UNITS);
        state = take_tiles(DELTA_COLUMNS / TILE_ROWS, key_units(args));
        updates = take_tiles(DELTA_COLUMNS / TILE_ROWS, ROW_UNITS);
        known = take(CHUNK_ROWS * DELTA_COLUMNS);
        results = take(CHUNK_ROWS * DELTA_COLUMNS);
    }
};

// A chunk of one key head, `padded` rows: a multiple of 16.
class TiledDelta {
public:
    TiledDelta(const DeltaArgs& args, const DeltaShape& shape, const DeltaScratch& own, const DeltaTiles& tiles, long padded)
        : args_(args), shape_(shape), own_(own), tiles_(tiles), tiles_of_rows_(padded / TILE_ROWS), units_(key_units(args)) {}

    // K K^T and Q K^T up to the diagonal.
    void multiply_keys() const {
        const Tiles configured;
        tile_rows(own_.query, tiles_.query);
        tile_rows(own_.key, tiles_.key);
        tile_features();
        for (long tile = 0; tile < tiles_of_rows_; ++tile)
            for (long unit = 0; unit < units_; ++unit)
                transpose_tiles(tiles_.key, tiles_.key.at(tile, unit), tiles_.columns.at(tile, unit));
        for (long row = 0; row < tiles_of_rows_; row += 2)
            for (long column = 0; column <= row; column += 2) {
                const long rows = smaller(2, tiles_of_rows_ - row), columns = smaller(2, tiles_of_rows_ - column);
                const long place = row * TILE_ROWS * SCORE_STRIDE + column * TILE_ROWS;
                multiply_some<false>(tiles_.key, row, rows, tiles_.columns, column, columns, units_, own_.keys + place, SCORE_STRIDE);
                multiply_some<false>(tiles_.query, row, rows, tiles_.columns, column, columns, units_, own_.scores + place, SCORE_STRIDE);
            }
    }

    // Results instead of values, and the state after the first `reached` rows, with what `weigh_keys` computed.
    void run(long reached, const float* source, float* target) const {
        const Tiles configured;
        tile_weights();
        for (long column = 0; column < args_.value_size; column += DELTA_COLUMNS)
            run_panel(reached, source ? source + column : nullptr, target + column, own_.value + column,
                      smaller(DELTA_COLUMNS, args_.value_size - column));
    }

private:
    const DeltaArgs& args_;
    const DeltaShape& shape_;
    const DeltaScratch& own_;
    const DeltaTiles tiles_;
    const long tiles_of_rows_, units_;

    // Of the system, what is below blocks on the diagonal.
    void tile_weights() const {
        for (long row = 0; row < tiles_of_rows_ * TILE_ROWS; ++row)
            for (long column = 0; column < CHUNK_ROWS; column += LANES) {
                const long start = row / TILE_ROWS * TILE_ROWS, place = row * SCORE_STRIDE + column;
                const long to = row % TILE_ROWS * DELTA_STEP + column % DELTA_STEP;
                store_split(tiles_.system, tiles_.system.at(row / TILE_ROWS, column / DELTA_STEP) + to,
                            column < start ? load(own_.system + place) : f32v{});
                store_split(tiles_.seen, tiles_.seen.at(row / TILE_ROWS, column / DELTA_STEP) + to,
                            column <= start ? load(own_.seen + place) : f32v{});
            }
    }

    // Up to DELTA_COLUMNS columns of values.
    void run_panel(long reached, const float* source, float* target, float* values, long columns) const {
        const long count = columns / TILE_ROWS, stride = DELTA_COLUMNS;
        tile_state(source, columns);
        for (long row = 0; row < tiles_of_rows_; row += 2) {
            const long rows = smaller(2, tiles_of_rows_ - row);
            multiply_some<false>(tiles_.key, row, rows, tiles_.state, 0, count, units_, tiles_.known + row * TILE_ROWS * stride, stride);
            multiply_some<false>(tiles_.query, row, rows, tiles_.state, 0, count, units_, tiles_.results + row * TILE_ROWS * stride, stride);
        }
        __builtin_memset(tiles_.updates.high, 0, static_cast<std::size_t>(2 * tiles_.updates.low) * sizeof(bf16));
        for (long tile = 0; tile < tiles_of_rows_; ++tile) solve(tile, values, columns);
        for (long row = 0; row < tiles_of_rows_ * TILE_ROWS; ++row) scale_row(tiles_.results + row * stride, columns, own_.grown[row]);
        for (long row = 0; row < tiles_of_rows_; row += 2)
            multiply_some<true>(tiles_.seen, row, smaller(2, tiles_of_rows_ - row), tiles_.updates, 0, count, row / 2 + 1,
                                tiles_.results + row * TILE_ROWS * stride, stride);
        for (long row = 0; row < tiles_of_rows_ * TILE_ROWS; ++row) {
            for (long i = 0; i < columns; i += LANES) store(values + row * shape_.value_stride + i, load(tiles_.results + row * stride + i));
            scale_row(tiles_.known + row * stride, columns, row < reached ? own_.to_end[row] : 0.0f);
        }
        tile_updates(0, tiles_of_rows_ * TILE_ROWS, columns);
        for (long row = 0; row < args_.key_size; ++row)
            for (long i = 0; i < columns; i += LANES) {
                const long place = row * args_.value_size + i;
                store(target + place, source ? load(source + place) * own_.grown[reached - 1] : f32v{});
            }
        const long of_features = args_.key_size / TILE_ROWS;
        for (long row = 0; row < of_features; row += 2)
            multiply_some<true>(tiles_.features, row, smaller(2, of_features - row), tiles_.updates, 0, count, (tiles_of_rows_ + 1) / 2,
                                target + row * TILE_ROWS * args_.value_size, args_.value_size);
    }

    void tile_rows(const float* rows, const SplitTiles& to) const {
        for (long row = 0; row < tiles_of_rows_ * TILE_ROWS; ++row)
            for (long i = 0; i < units_ * DELTA_STEP; i += LANES)
                store_split(to, to.at(row / TILE_ROWS, i / DELTA_STEP) + row % TILE_ROWS * DELTA_STEP + i % DELTA_STEP,
                            i < args_.key_size ? load(rows + row * shape_.key_stride + i) : f32v{});
    }

    // Keys as rows of features, with zeros for the rows that the last unit does not have.
    void tile_features() const {
        for (long tile = 0; tile < args_.key_size / TILE_ROWS; ++tile)
            for (long unit = 0; unit < (tiles_of_rows_ + 1) / 2; ++unit) {
                bf16* to = tiles_.features.at(tile, unit);
                for (long pair = 0; pair < TILE_ROWS; ++pair) {
                    const long row = unit * DELTA_STEP + 2 * pair;
                    const bool exists = row < tiles_of_rows_ * TILE_ROWS;
                    const float* from = own_.key + row * shape_.key_stride + tile * TILE_ROWS;
                    store_split_pairs(tiles_.features, to + pair * DELTA_STEP, exists ? load(from) : f32v{},
                                      exists ? load(from + shape_.key_stride) : f32v{});
                }
                transpose_tiles(tiles_.features, to, to);
            }
    }

    void tile_state(const float* source, long columns) const {
        for (long row = 0; row < units_ * DELTA_STEP; row += 2)
            for (long i = 0; i < columns; i += LANES) {
                const bool exists = source && row < args_.key_size;
                const float* from = source + row * args_.value_size + i;
                store_split_pairs(tiles_.state, tiles_.state.at(i / TILE_ROWS, row / DELTA_STEP) + row % DELTA_STEP / 2 * DELTA_STEP,
                                  exists ? load(from) : f32v{}, exists ? load(from + args_.value_size) : f32v{});
            }
    }

    // Updates of rows `first` to `last`, which are in `known`.
    void tile_updates(long first, long last, long columns) const {
        for (long row = first; row < last; row += 2)
            for (long i = 0; i < columns; i += LANES) {
                const float* from = tiles_.known + row * DELTA_COLUMNS + i;
                store_split_pairs(tiles_.updates, tiles_.updates.at(i / TILE_ROWS, row / DELTA_STEP) + row % DELTA_STEP / 2 * DELTA_STEP,
                                  load(from), load(from + DELTA_COLUMNS));
            }
    }

    // Replaces keys times state by updates, for the rows of a tile.
    void solve(long tile, const float* values, long columns) const {
        const long first = tile * TILE_ROWS;
        float* known = tiles_.known + first * DELTA_COLUMNS;
        for (long row = 0; row < TILE_ROWS; ++row)
            for (long i = 0; i < columns; i += LANES) {
                const f32v value = load(values + (first + row) * shape_.value_stride + i);
                float* place = known + row * DELTA_COLUMNS + i;
                store(place, (value - own_.grown[first + row] * load(place)) * own_.beta[first + row]);
            }
        if (tile)
            multiply_some<true>(tiles_.system, tile, 1, tiles_.updates, 0, columns / TILE_ROWS, (tile + 1) / 2, known, DELTA_COLUMNS);
        const float* system = own_.system + first * SCORE_STRIDE + first;
        for (long i = 0; i < columns; i += LANES) {
            f32v sums[TILE_ROWS];
            for (long row = 0; row < TILE_ROWS; ++row) sums[row] = load(known + row * DELTA_COLUMNS + i);
#pragma GCC unroll 16
            for (int row = 1; row < TILE_ROWS; ++row)
#pragma GCC unroll 16
                for (int other = 0; other < row; ++other) sums[row] += system[row * SCORE_STRIDE + other] * sums[other];
            for (long row = 0; row < TILE_ROWS; ++row) store(known + row * DELTA_COLUMNS + i, sums[row]);
        }
        tile_updates(first, first + TILE_ROWS, columns);
    }
};

}  // namespace

#endif
