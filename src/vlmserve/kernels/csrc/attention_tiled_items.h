// Items of paged attention with many rows, by matrix tiles.
#pragma once

#include "attention_few_rows.h"

#if defined(AMX)

namespace {

// One thread's part of the scratch.
struct TiledWorkspace {
    bf16* query;   // blocks of 32 rows
    bf16* keys;    // [tiles][units][16][16][2], if a tile of the cache is no B tile
    bf16* values;  // [steps][columns][16][16][2]
    float* results;  // see `Results`
    TiledScores* scores;

    TiledWorkspace(const AttentionArgs& args, char* memory) { lay_out(args, memory); }
    static long bytes(const AttentionArgs& args) { return TiledWorkspace().lay_out(args, nullptr); }

private:
    TiledWorkspace() = default;

    // Places the arrays in `memory`, unless it is null. Returns their bytes.
    long lay_out(const AttentionArgs& args, char* memory) {
        long end = 0;
        auto take = [&](auto*& place, long count) {
            place = memory ? reinterpret_cast<decltype(+place)>(memory + end) : nullptr;
            end += cache_lines(count * static_cast<long>(sizeof *place));
        };
        const long size = tiled_units(args.head_size) * TILED_STEP, columns = tiled_columns(args.head_size) * TILE_ROWS;
        take(query, TILED_ITEM_ROWS * size);
        take(keys, TILED_CHUNK * size);
        take(values, TILED_CHUNK * columns);
        take(results, Results::floats(Geometry(args), TILED_ITEM_ROWS));
        take(scores, 1);
        return end;
    }
};

// 16 pairs of bfloat16. Bytes are converted exactly.
INLINE u32v load_pairs(const bf16* from) {
    u32v pairs;
    __builtin_memcpy(&pairs, from, sizeof pairs);
    return pairs;
}
INLINE u32v load_pairs(const signed char* from) {
    u16v bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    i32v wide = __builtin_convertvector(bytes, i32v);
    // An integer of 8 bits has no more bits as a float than the upper half of it.
    u32v first = bit_cast<u32v>(__builtin_convertvector((wide << 24) >> 24, f32v));
    u32v second = bit_cast<u32v>(__builtin_convertvector((wide << 16) >> 24, f32v));
    return first >> 16 | (second & 0xffff0000u);
}

INLINE void store_pairs(bf16* to, u32v pairs) { __builtin_memcpy(to, &pairs, sizeof pairs); }

// A key tile as B tiles, with zeros after the head's elements.
template <class Stored>
INLINE const bf16* tile_keys(const Stored* keys, long head_size, bf16* to) {
    if constexpr (sizeof(Stored) == sizeof(bf16))
        if (head_size % TILED_STEP == 0) return keys;
    for (long pair = 0; pair < tiled_units(head_size) * TILE_ROWS; ++pair)
        store_pairs(to + pair * TILED_STEP, pair < head_size / 2 ? load_pairs(keys + pair * TILED_STEP) : u32v{});
    return to;
}

// A value tile as the first or second half of B tiles, with zeros after the first `tokens`, which may be NaN.
template <class Stored>
INLINE void tile_values(const Stored* values, long columns, long tokens, bf16* to) {
    for (long pair = 0; pair < TOKENS / 2; ++pair, to += TILED_STEP) {
        const u32v mask = u32v{} + (2 * pair + 1 < tokens ? 0xffffffffu : 2 * pair < tokens ? 0xffffu : 0u);
        for (long column = 0; column < columns; ++column)
            store_pairs(to + column * TILE_ELEMENTS, load_pairs(values + (pair * columns + column) * TILED_STEP) & mask);
    }
}

// Rows of an item against tiles of the cache.
template <class Format>
struct TiledItem {
    typedef typename Format::Stored Stored;

    const AttentionArgs& args;
    const Geometry& at;
    const Item& item;
    const TiledWorkspace& own;
    const Results results{at, TILED_ITEM_ROWS, own.results};
    const long units = tiled_units(args.head_size), columns = tiled_columns(args.head_size);
    const long before = position_of(args, at, item.sequence, 0);

    void attend(float* partial) const {
        Chunks<bf16> chunks{args, at, item, results, partial};
        arrange_queries();
        chunks.begin();
        Tile<Format> tiles[CHUNK_TILES];
        for (long first = item.low / 2 * 2, end = 0; first < item.high; first = end) {
            end = item.end_of_chunk(first);
            find_tiles(args, at, item, item.kv_head, first, end, tiles);
            chunks.begin_chunk();
            attend_chunk(take_tiles(tiles, end - first), tiles, first, end - first);
            chunks.end_chunk();
        }
        chunks.end();
    }

private:
    void arrange_queries() const {
        bf16 buffer[MAX_HEAD_SIZE];
        for (long row = 0; row < item.rows; ++row) {
            const long all = item.first_row + row, token = args.query_starts[item.sequence] + all / at.group;
            const long head = item.kv_head * at.group + all % at.group;
            const bf16* query = static_cast<const bf16*>(args.query) + token * args.query_stride + head * args.head_size;
            tile_query(rotated(args, query, token, buffer), args.head_size, row, own.query);
        }
    }

    TiledChunk take_tiles(const Tile<Format>* tiles, long count) const {
        TiledChunk chunk;
        chunk.steps = (count + 1) / 2;
        for (long i = 0; i < 2 * chunk.steps; ++i) {
            // The last step may have one tile.
            const Tile<Format>& tile = tiles[smaller(i, count - 1)];
            const long tokens = i < count ? smaller(tile.tokens, args.context_lens[item.sequence] - tile.start) : 0;
            chunk.keys[i] = tile_keys(tile.keys, args.head_size, own.keys + i * units * TILE_ELEMENTS);
            bf16* values = own.values + i / 2 * columns * TILE_ELEMENTS;
            if (i % 2 == 0) chunk.values[i / 2] = values;
            tile_values(tile.values, columns, tokens, values + i % 2 * (TOKENS / 2) * TILED_STEP);
        }
        return chunk;
    }

    // tiles: `count` of the chunk, from tile `chunk_start` of the sequence on.
    void attend_chunk(const TiledChunk& chunk, const Tile<Format>* tiles, long chunk_start, long count) const {
        for (long first = 0; first < item.rows; first += TILED_BLOCK_ROWS) {
            const long rows = smaller(TILED_BLOCK_ROWS, item.rows - first);
            const long oldest = first_visible(args, item.sequence, before + (item.first_row + first) / at.group);
            const long newest = before + (item.first_row + first + rows - 1) / at.group;
            const long from = larger(0, at.tile_of(args, oldest) - chunk_start) / 2;
            const long to = smaller(count, at.tile_of(args, newest) + 1 - chunk_start);
            if (2 * from >= to) continue;
            TiledChunk seen;
            seen.steps = (to + 1) / 2 - from;
            for (long i = 0; i < seen.steps; ++i) seen.values[i] = chunk.values[from + i];
            for (long i = 0; i < 2 * seen.steps; ++i) seen.keys[i] = chunk.keys[2 * from + i];
            const TiledBlock block{own.query + first * units * TILED_STEP, results.totals + first * at.columns,
                                   results.sums + first * LANES, results.highest + first, rows};
            meet_tiles<false>(block, seen, units, columns, *own.scores, [&](long row) {
                auto* weights = reinterpret_cast<bf16*>(own.scores->rows[row]);
                auto keep = [&](long i, f32v weight) __attribute__((always_inline)) { store(weights + i * LANES, weight); };
                weigh_row(args, item.sequence, before + (item.first_row + first + row) / at.group, own.scores->rows[row],
                          block.sums + row * LANES, block.highest[row], tiles + 2 * from, count - 2 * from, seen.steps, keep);
                return 1.0f;
            });
        }
    }
};

// partial: where the chunks' results go; null: write the output.
template <class Format>
void attend_tiled_item(const AttentionArgs& args, const Geometry& at, const Item& item, char* memory, float* partial) {
    const TiledWorkspace own(args, memory);
    const Tiles configured;
    TiledItem<Format>{args, at, item, own}.attend(partial);
}

}  // namespace

#endif
