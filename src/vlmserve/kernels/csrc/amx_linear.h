// Matmuls of bfloat16 with matrix tiles, for any number of rows.
//
// Rows are copied in blocks of up to 16: [in / 32][rows][32]. Two blocks meet the two panels of a weight's tile in four sums.
// A tile of a shorter block also has rows after it, and the sums of those are ignored. The number of rows changes neither the
// order of a row's additions nor, because each product needs a new tile of weights, its time.
#pragma once

#include "amx.h"
#include "linear.h"

#if defined(AMX)

namespace {

// Inputs of a tile, and of the weights that stay in the first-level cache for all rows.
constexpr long TILE_INPUTS = 32, CHUNK_INPUTS = 256;
// Bytes after prepared rows that tiles may read.
constexpr long TILE_OVERREAD = TILE_ROWS * TILE_BYTES;

INLINE long tile_padded(long in) { return (in + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS; }

// Weights of a chunk: panels of whole tiles, `panel_bytes` apart.
struct TileWeights {
    const char* panels;
    long panel_bytes;
};

// Multiplies BLOCKS blocks of rows by the two panels of a tile. from: sums to add to, or null; to: the sums.
template <int BLOCKS, bool PREFETCHES>
INLINE void multiply_tiles(const char* const (&rows)[BLOCKS], const long (&steps)[BLOCKS], TileWeights weights, long count,
                           bool continues, float* sums) {
    constexpr long ROW = TILE * static_cast<long>(sizeof(float)), BLOCK = TILE_ROWS * TILE;
    if (continues) {
        load_tile<0>(sums, ROW);
        load_tile<1>(sums + PANEL, ROW);
        if constexpr (BLOCKS == 2) {
            load_tile<2>(sums + BLOCK, ROW);
            load_tile<3>(sums + BLOCK + PANEL, ROW);
        }
    } else {
        clear_tile<0>();
        clear_tile<1>();
        if constexpr (BLOCKS == 2) {
            clear_tile<2>();
            clear_tile<3>();
        }
    }
    const char* first = rows[0];
    const char* second = rows[BLOCKS - 1];
    const char* panel = weights.panels;
    for (long i = 0; i < count; ++i, panel += TILE_ROWS * TILE_BYTES, first += steps[0], second += steps[BLOCKS - 1]) {
        if constexpr (PREFETCHES)
            for (long line = 0; line < TILE_ROWS * TILE_BYTES; line += 64) {
                __builtin_prefetch(panel + PREFETCH_BYTES + line, 0, 2);
                __builtin_prefetch(panel + weights.panel_bytes + PREFETCH_BYTES + line, 0, 2);
            }
        load_tile<4>(first, TILE_BYTES);
        load_tile<6>(panel, TILE_BYTES);
        multiply_bf16_tiles<0, 4, 6>();
        load_tile<7>(panel + weights.panel_bytes, TILE_BYTES);
        multiply_bf16_tiles<1, 4, 7>();
        if constexpr (BLOCKS == 2) {
            load_tile<5>(second, TILE_BYTES);
            multiply_bf16_tiles<2, 5, 6>();
            multiply_bf16_tiles<3, 5, 7>();
        }
    }
    store_tile<0>(sums, ROW);
    store_tile<1>(sums + PANEL, ROW);
    if constexpr (BLOCKS == 2) {
        store_tile<2>(sums + BLOCK, ROW);
        store_tile<3>(sums + BLOCK + PANEL, ROW);
    }
}

struct TileProduct {
    static constexpr int BLOCK = TILE_ROWS;
    static constexpr long ROWS = CACHED_ROWS_OF_EXPANDED;

    static long row_bytes(const LinearArgs& args) { return tile_padded(args.in) * 2; }

    static void prepare(const LinearArgs& args, long block) {
        const auto* x = static_cast<const bf16*>(args.x);
        long first = block_start(args.rows, block, BLOCK), count = block_start(args.rows, block + 1, BLOCK) - first;
        long rest = args.in % TILE_INPUTS;
        for (long row = 0; row < count; ++row) {
            const auto* from = reinterpret_cast<const char*>(x + source_row(args, first + row) * args.x_stride);
            char* to = static_cast<char*>(args.scratch) + first * row_bytes(args) + row * TILE_BYTES;
            for (long i = 0; i < args.in / TILE_INPUTS; ++i) __builtin_memcpy(to + i * count * TILE_BYTES, from + i * TILE_BYTES, TILE_BYTES);
            if (!rest) continue;
            char padded[TILE_BYTES] = {};
            __builtin_memcpy(padded, from + (args.in - rest) * 2, static_cast<std::size_t>(rest * 2));
            __builtin_memcpy(to + args.in / TILE_INPUTS * count * TILE_BYTES, padded, TILE_BYTES);
        }
    }

    static void multiply(const LinearArgs& args, long tile, long first, long last) {
        alignas(64) float kept[ROWS][TILE];
        const Tiles configured;
        const long whole = args.in / TILE_INPUTS * TILE_INPUTS, panel_bytes = PANEL * args.in * 2;
        const char* weights = static_cast<const char*>(args.weight) + tile * TILE * args.in * 2;
        // With one pair of blocks, sums stay in tiles.
        const long chunk = last - first > 2 ? CHUNK_INPUTS : whole;
        long share = 0, shares = (last - first + 1) / 2 * (chunk ? (whole + chunk - 1) / chunk : 0);
        for (long start = 0; start < whole; start += chunk) {
            const TileWeights part = {weights + start * PANEL * 2, panel_bytes};
            each_pair(args, first, last, [&](long block, auto blocks) {
                prefetch_factors(args, tile, share++, shares);
                multiply_blocks(args, block, blocks, part, start, smaller(chunk, whole - start), block == first, kept[(block - first) * BLOCK]);
            });
        }
        if (args.in > whole) {
            alignas(64) char padded[2][TILE_ROWS * TILE_BYTES] = {};
            for (long i = 0; i < 2; ++i)
                __builtin_memcpy(padded[i], weights + i * panel_bytes + whole * PANEL * 2, static_cast<std::size_t>((args.in - whole) * PANEL * 2));
            each_pair(args, first, last, [&](long block, auto blocks) {
                multiply_blocks(args, block, blocks, {padded[0], sizeof padded[0]}, whole, TILE_INPUTS, false, kept[(block - first) * BLOCK]);
            });
        }
        for (long block = first; block < last; ++block)
            finish_rows(args, block_start(args.rows, block, BLOCK), block_start(args.rows, block + 1, BLOCK), tile, kept + (block - first) * BLOCK);
    }

private:
    template <class Work>
    INLINE void each_pair(const LinearArgs&, long first, long last, Work work) {
        for (; first + 1 < last; first += 2) work(first, Count<2>{});
        if (first < last) work(first, Count<1>{});
    }

    // Adds inputs `start` to `start + count` of one or two blocks.
    template <class Blocks>
    INLINE void multiply_blocks(const LinearArgs& args, long block, Blocks, TileWeights weights, long start, long count, bool prefetches,
                                float* kept) {
        constexpr int BLOCKS = Blocks::value;
        const char* rows[BLOCKS];
        long steps[BLOCKS];
        for (long i = 0; i < BLOCKS; ++i) {
            long row = block_start(args.rows, block + i, BLOCK);
            steps[i] = (block_start(args.rows, block + i + 1, BLOCK) - row) * TILE_BYTES;
            rows[i] = static_cast<const char*>(args.scratch) + row * row_bytes(args) + start / TILE_INPUTS * steps[i];
        }
        if (prefetches)
            multiply_tiles<BLOCKS, true>(rows, steps, weights, count / TILE_INPUTS, start > 0, kept);
        else
            multiply_tiles<BLOCKS, false>(rows, steps, weights, count / TILE_INPUTS, start > 0, kept);
    }
};

}  // namespace

#endif
