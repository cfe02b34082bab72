// Matmuls with packed weights, for any number of rows.
//
// A packed weight is a row of tiles of 32 output features, each with two panels of 16: [in][16] in float32, or [in / 2][16][2]
// in bfloat16, with pairs of inputs adjacent for the dot product instruction. Panels are read sequentially, which is fastest,
// and each vector meets a broadcast input of every row. A tile of a gated weight has a panel of gates, then the ups of the same
// features. Rows are packed alike, [rows / block][in / pair][block], so that broadcast inputs are adjacent.
#pragma once

#include "adapters.h"

namespace {

// Inputs of the rows that run through the tiles together, and their maximum number. Wide rows come from the third-level cache,
// which is fast enough for broadcast inputs; fewer rows would read all weights more often.
constexpr long CACHED_BYTES = 2 * 1024 * 1024;
constexpr long CACHED_ROWS = 96;
// The same for expanded weights. Expanding takes as long as multiplying four rows.
constexpr long CACHED_ROWS_OF_EXPANDED = 256;

// Bytes of the next weight that an idle thread prefetches.
constexpr long AHEAD_BYTES = 64 * 1024;

// Weights of a panel that stay in the first-level cache for many rows.
constexpr long CHUNK_BYTES = 16 * 1024;

INLINE long features_of_tile(bool gated) { return gated ? TILE / 2 : TILE; }
INLINE long num_tiles(long out, bool gated) {
    long features = gated ? out / 2 : out, each = features_of_tile(gated);
    return (features + each - 1) / each;
}

// Divides rows into blocks of nearly equal size.
INLINE long num_blocks(long rows, int most) { return (rows + most - 1) / most; }
INLINE long block_start(long rows, long block, int most) { return rows * block / num_blocks(rows, most); }

INLINE long source_row(const LinearArgs& args, long row) { return args.x_rows ? args.x_rows[row] : row; }

template <class Format>
void rearrange_rows(const LinearArgs& args, typename Format::Input* to, long block) {
    const auto* x = static_cast<const typename Format::Element*>(args.x);
    long first = block_start(args.rows, block, Format::BLOCK), count = block_start(args.rows, block + 1, Format::BLOCK) - first;
    long units = args.in / Format::PAIR;
    to += first * units;
    for (long row = 0; row < count; ++row) {
        const auto* from = x + source_row(args, first + row) * args.x_stride;
        for (long unit = 0; unit < units; ++unit) to[unit * count + row] = Format::input(from + unit * Format::PAIR);
    }
}

// Start of vector `vector` of a tile whose panels are `panel_size` elements apart.
template <class Format>
INLINE long vector_start(int vector, long panel_size) {
    return vector / PANEL_VECTORS * panel_size + vector % PANEL_VECTORS * LANES * Format::PAIR;
}

// Adds the matmul of ROWS rows and WIDTH vectors of a tile, from `weights` on, to `sums`.
template <class Format, int ROWS, int WIDTH>
INLINE void multiply_vectors(const typename Format::Input* x, const typename Format::Element* weights, long panel_size,
                             long units, f32v (&sums)[ROWS][WIDTH]) {
    constexpr long LINE = 64 / static_cast<long>(sizeof *weights), VECTOR = LANES * Format::PAIR;
    for (long unit = 0; unit < units; ++unit, weights += Format::PAIR * PANEL, x += ROWS) {
        for (int i = 0; i < WIDTH; ++i)
            if (i % PANEL_VECTORS * VECTOR % LINE == 0)
                // To the second-level cache, because few lines from memory can be in flight to the first.
                __builtin_prefetch(reinterpret_cast<const char*>(weights + vector_start<Format>(i, panel_size)) + PREFETCH_BYTES, 0, 2);
#pragma GCC unroll 2
        for (int step = 0; step < Format::STEPS; ++step) {
            typename Format::Weights w[WIDTH];
#pragma GCC unroll 8
            for (int i = 0; i < WIDTH; ++i) w[i] = Format::weights(weights + vector_start<Format>(i, panel_size), step);
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; ++i) Format::multiply(sums[row][i], x[row], w[i], step);
        }
    }
}

// Multiplies a block of rows by a tile, as many vectors at once as fit into registers.
template <class Format, int ROWS>
INLINE void multiply_tile(const typename Format::Input* x, const typename Format::Element* weights, long panel_size,
                          long units, f32v (&sums)[ROWS][VECTORS]) {
    constexpr int WIDTH = vectors_with<Format>(ROWS);
    for (int first = 0; first < VECTORS; first += WIDTH) {
        f32v part[ROWS][WIDTH] = {};
        multiply_vectors<Format, ROWS, WIDTH>(x, weights + vector_start<Format>(first, panel_size), panel_size, units, part);
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < WIDTH; ++i) sums[row][first + i] = part[row][i];
    }
}

template <class Out, class Element>
INLINE void finish(const LinearArgs& args, long row, long column, long columns, f32v value) {
    if (columns <= 0) return;
    columns = smaller(columns, LANES);
    long place = row * args.y_stride + column;
    if (args.residual) value += load_some(static_cast<const Element*>(args.residual) + place, columns);
    store_some(static_cast<Out*>(args.y) + place, value, columns);
}

// Rows to finish at once, so that their sums stay in the first-level cache.
constexpr long FINISHED_ROWS = 32;

// Activations of sums in memory, in one loop per kind, so that constants stay in registers.
INLINE void activate_kept(int kind, float (*kept)[TILE], long rows, int vectors) {
    auto each = [&](auto kind) __attribute__((always_inline)) {
        for (long row = 0; row < rows; ++row)
            for (int vector = 0; vector < vectors; ++vector) {
                float* place = kept[row] + vector * LANES;
                store(place, activate(decltype(kind)::value, load(place)));
            }
    };
    switch (kind) {
        case SILU: return each(Count<SILU>{});
        case GELU: return each(Count<GELU>{});
        case GELU_TANH: return each(Count<GELU_TANH>{});
        case QUICK_GELU: return each(Count<QUICK_GELU>{});
        case RELU: return each(Count<RELU>{});
    }
}

// Applies adapters, bias, activation, gates and residual to the sums of rows `first` to `last`.
template <class Out, class Element>
void finish_kept(const LinearArgs& args, long first, long last, long tile, float (*kept)[TILE]) {
    if (args.adapters) adapt_tile<typename FormatOf<Element>::Type>(args, first, last, tile, kept);
    long features = features_of_tile(args.gated), start = tile * features, columns = (args.gated ? args.out / 2 : args.out) - start;
    int vectors = static_cast<int>(features / LANES);
    for (; first < last; first += FINISHED_ROWS, kept += FINISHED_ROWS) {
        long rows = smaller(FINISHED_ROWS, last - first);
        for (long half = 0; args.bias && half < TILE / features; ++half)
            for (long place = 0; place < features && columns > place; place += LANES) {
                f32v bias = load_some(static_cast<const Element*>(args.bias) + half * (args.out / 2) + start + place,
                                      smaller(columns - place, LANES));
                for (long row = 0; row < rows; ++row) {
                    float* sum = kept[row] + half * features + place;
                    store(sum, load(sum) + bias);
                }
            }
        activate_kept(args.activation, kept, rows, vectors);
        for (long row = 0; row < rows; ++row)
            for (int vector = 0; vector < vectors; ++vector) {
                f32v value = load(kept[row] + vector * LANES);
                if (args.gated) value *= load(kept[row] + TILE / 2 + vector * LANES);
                finish<Out, Element>(args, first + row, start + vector * LANES, columns - vector * LANES, value);
            }
    }
}

void finish_rows(const LinearArgs& args, long first, long last, long tile, float (*kept)[TILE]) {
    if (args.dtype == FLOAT32) return finish_kept<float, float>(args, first, last, tile, kept);
    args.float_output ? finish_kept<float, bf16>(args, first, last, tile, kept) : finish_kept<bf16, bf16>(args, first, last, tile, kept);
}

template <int ROWS>
INLINE void keep(float (*kept)[TILE], const f32v (&sums)[ROWS][VECTORS]) {
    for (int row = 0; row < ROWS; ++row)
        for (int vector = 0; vector < VECTORS; ++vector) store(kept[row] + vector * LANES, sums[row][vector]);
}

// Cost of preparing one input (rounding, interleaving rows), in weight elements read.
constexpr long PREPARED_INPUT = 8;

long packed_bytes(const LinearArgs& args);

// What threads read of the next matmul: the start of their shares of `down`, if rows have adapters, and of the weight.
INLINE Ahead ahead_of(const LinearArgs& args) {
    auto span = [&](const void* from, long bytes) -> Ahead::Span {
        long share = bytes / args.threads;
        return {static_cast<const char*>(from), share, smaller(share, AHEAD_BYTES)};
    };
    Ahead ahead;
    if (!args.next) return ahead;
    if (args.next->adapters && args.adapted->count == 1) {
        const Adapter* adapter = adapter_of(args.next->adapters, args.adapted->groups[0]);
        if (adapter) ahead.spans[0] = span(adapter->down, adapter->rank * args.next->in * (args.dtype == FLOAT32 ? 4 : 2));
    }
    ahead.spans[1] = span(args.next->weight, packed_bytes(*args.next));
    return ahead;
}

// The functions of a kind of matmul. A kind does not depend on types that only inputs or outputs have, so that few are compiled.
struct Product {
    int block;             // maximum rows of a block
    long rows, row_bytes;  // maximum rows that run through the tiles together; bytes of a prepared row
    void (*prepare)(const LinearArgs&, long block);
    void (*multiply)(const LinearArgs&, long tile, long first, long last);  // a tile with a range of blocks

    // Blocks of rows that run through the tiles together.
    long cached_blocks() const { return larger(1, smaller(CACHED_BYTES / (row_bytes * block), rows / block)); }
};

template <class Kind>
INLINE Product product_of(const LinearArgs& args, Kind) {
    return {Kind::BLOCK, Kind::ROWS, Kind::row_bytes(args), Kind::prepare, Kind::multiply};
}

// Prepares all blocks of rows, then multiplies them by each tile.
void each_tile(const LinearArgs& args, const Product& product) {
    long blocks = num_blocks(args.rows, product.block), tiles = num_tiles(args.out, args.gated), cached = product.cached_blocks();
    long items = num_items(args), shrinking = items * 2 * args.in * PANEL / SPLITS;
    each_range(args.threads, blocks + items, (blocks * args.in * product.block * PREPARED_INPUT + shrinking) / (blocks + items),
               [&](long from, long to, int) {
                   for (long i = from; i < smaller(to, blocks); ++i) product.prepare(args, i);
                   if (to > blocks) shrink_items(args, larger(from - blocks, 0), to - blocks);
               });
    if (args.adapters) finish_shrinking(args);
    for (long first = 0; first < blocks; first += cached) {
        long last = smaller(blocks, first + cached);
        auto work = [&](long from, long to, int) {
            for (long tile = from; tile < to; ++tile) product.multiply(args, tile, first, last);
        };
        each_range(args.threads, tiles, args.in * TILE, work, last == blocks ? ahead_of(args) : Ahead{});
    }
}

// One block of rows with a tile. kept: gets the sums.
template <class Format>
INLINE void run_block(const LinearArgs& args, const typename Format::Input* inputs, long tile, long block, float (*kept)[TILE]) {
    typedef typename Format::Element Element;
    long row = block_start(args.rows, block, Format::BLOCK), units = args.in / Format::PAIR;
    with_rows<Format::BLOCK>(block_start(args.rows, block + 1, Format::BLOCK) - row, [&](auto rows) {
        f32v sums[decltype(rows)::value][VECTORS];
        const auto* weights = static_cast<const Element*>(args.weight) + tile * TILE * args.in;
        prefetch_factors(args, tile, 0, 1);
        multiply_tile<Format>(inputs + row * units, weights, PANEL * args.in, units, sums);
        keep(kept, sums);
    });
}

// A chunk of a tile's weights in place, from a vector and a unit of the inputs on.
template <class Format>
struct Chunk {
    typedef Format Multiplied;
    typedef typename Format::Element Element;
    static constexpr int WIDTH = vectors_with<Format>(Format::BLOCK);
    static constexpr long UNITS = CHUNK_BYTES / (Format::PAIR * PANEL * static_cast<long>(sizeof(Element))), ROWS = CACHED_ROWS;
    const Element* weights;
    long panel_size;

    INLINE void take(Chunk& chunk, const Element* tile, long in, int vector, long unit, long) {
        chunk.panel_size = PANEL * in;
        chunk.weights = tile + vector_start<Format>(vector, chunk.panel_size) + unit * Format::PAIR * PANEL;
    }
};

// The same for bfloat16 weights expanded to float32 for all blocks of rows: more rows fit into registers.
struct ExpandedChunk {
    typedef Float32 Multiplied;
    static constexpr int WIDTH = vectors_with<Float32>(Float32::BLOCK), PANELS = (WIDTH + PANEL_VECTORS - 1) / PANEL_VECTORS;
    static constexpr long UNITS = CHUNK_BYTES / (PANEL * static_cast<long>(sizeof(float))), ROWS = CACHED_ROWS_OF_EXPANDED;
    alignas(64) float values[PANELS][UNITS * PANEL];
    const float* weights;
    static constexpr long panel_size = UNITS * PANEL;

    INLINE void take(ExpandedChunk& chunk, const bf16* tile, long in, int vector, long unit, long units) {
        chunk.weights = chunk.values[0];
        for (int i = 0; i < WIDTH; ++i) {
            const bf16* from = tile + vector_start<BFloat16>(vector + i, PANEL * in) + unit * PANEL;
            float* to = chunk.values[0] + vector_start<Float32>(i, panel_size);
            for (long pair = 0; pair < units / 2; ++pair, from += 2 * PANEL, to += 2 * PANEL) {
                __builtin_prefetch(reinterpret_cast<const char*>(from) + PREFETCH_BYTES);
                for (int step = 0; step < 2; ++step) store(to + step * PANEL, half_of_pairs(from, step));
            }
        }
    }
};

// Several blocks of rows with a tile, one chunk of the inputs at a time. Not inlined, so that a test can read its loops.
template <class Format, class Chunk>
__attribute__((noinline)) void run_blocks(const LinearArgs& args, const typename Format::Input* inputs, long tile, long first,
                                          long last, float (*kept)[TILE]) {
    typedef typename Format::Element Element;
    constexpr int WIDTH = Chunk::WIDTH;
    Chunk chunk;
    const auto* weights = static_cast<const Element*>(args.weight) + tile * TILE * args.in;
    long units = args.in / Format::PAIR, first_row = block_start(args.rows, first, Format::BLOCK);
    long share = 0, shares = VECTORS / WIDTH * ((units + Chunk::UNITS - 1) / Chunk::UNITS) * (last - first);
    auto each_block = [&](auto work) __attribute__((always_inline)) {
        for (long block = first; block < last; ++block) {
            long row = block_start(args.rows, block, Format::BLOCK);
            with_rows<Format::BLOCK>(block_start(args.rows, block + 1, Format::BLOCK) - row, [&](auto rows) { work(rows, row, kept + (row - first_row)); });
        }
    };
    for (int vector = 0; vector < VECTORS; vector += WIDTH)
        for (long unit = 0; unit < units; unit += Chunk::UNITS) {
            long count = smaller(Chunk::UNITS, units - unit);
            Chunk::take(chunk, weights, args.in, vector, unit, count);
            each_block([&](auto rows, long row, float(*own)[TILE]) {
                constexpr int ROWS = decltype(rows)::value;
                prefetch_factors(args, tile, share++, shares);
                f32v sums[ROWS][WIDTH];
                for (int i = 0; i < ROWS; ++i)
                    for (int j = 0; j < WIDTH; ++j) sums[i][j] = unit ? load(own[i] + (vector + j) * LANES) : f32v{};
                multiply_vectors<typename Chunk::Multiplied, ROWS, WIDTH>(inputs + row * units + unit * ROWS, chunk.weights,
                                                                          chunk.panel_size, count, sums);
                for (int i = 0; i < ROWS; ++i)
                    for (int j = 0; j < WIDTH; ++j) store(own[i] + (vector + j) * LANES, sums[i][j]);
            });
        }
}

// Matmuls with plain weights.
template <class Format>
struct PlainProduct {
    typedef typename Format::Input Input;
    static constexpr int BLOCK = Format::BLOCK;
    static constexpr long ROWS = Format::EXPANDED ? CACHED_ROWS_OF_EXPANDED : CACHED_ROWS;

    static long row_bytes(const LinearArgs& args) { return args.in / Format::PAIR * static_cast<long>(sizeof(Input)); }

    static void prepare(const LinearArgs& args, long block) {
        rearrange_rows<Format>(args, static_cast<Input*>(args.scratch), block);
    }

    static void multiply(const LinearArgs& args, long tile, long first, long last) {
        alignas(64) float kept[ROWS][TILE];
        const auto* inputs = static_cast<const Input*>(args.scratch);
        if constexpr (Format::EXPANDED)
            run_blocks<Format, ExpandedChunk>(args, inputs, tile, first, last, kept);
        else if (last - first == 1)
            run_block<Format>(args, inputs, tile, first, kept);
        else
            run_blocks<Format, Chunk<Format>>(args, inputs, tile, first, last, kept);
        finish_rows(args, block_start(args.rows, first, BLOCK), block_start(args.rows, last, BLOCK), tile, kept);
    }
};

template <class Format>
void pack_tiles(const typename Format::Element* weight, typename Format::Element* packed, long out, long in, bool gated,
                int threads) {
    long tiles = num_tiles(out, gated), features = gated ? out / 2 : out, each = features_of_tile(gated);
    constexpr long UNIT = Format::PAIR * static_cast<long>(sizeof(typename Format::Element));
    auto pack_tile = [&](long tile) {
        auto* to = packed + tile * TILE * in;
        const typename Format::Element* rows[TILE];
        for (long lane = 0; lane < TILE; ++lane) {
            long feature = tile * each + lane % each;
            rows[lane] = feature < features ? weight + (feature + lane / each * features) * in : nullptr;
        }
        for (long panel = 0; panel < TILE; panel += PANEL)
            for (long column = 0; column < in; column += Format::PAIR)
                for (long lane = panel; lane < panel + PANEL; ++lane, to += Format::PAIR)
                    if (rows[lane])
                        __builtin_memcpy(to, rows[lane] + column, UNIT);
                    else
                        __builtin_memset(to, 0, UNIT);
    };
    each_range(threads, tiles, in * TILE, [&](long first, long last, int) {
        for (long tile = first; tile < last; ++tile) pack_tile(tile);
    });
}

void pack(const void* weight, void* packed, long out, long in, int dtype, int gated, int threads) {
    if (dtype == FLOAT32)
        pack_tiles<Float32>(static_cast<const float*>(weight), static_cast<float*>(packed), out, in, gated, threads);
    else
        pack_tiles<BFloat16>(static_cast<const bf16*>(weight), static_cast<bf16*>(packed), out, in, gated, threads);
}

template <class Format>
void gather_rows(const typename Format::Element* packed, const std::int64_t* ids, typename Format::Element* y, long count,
                 long in, int threads) {
    each_range(threads, count, in, [&](long first, long last, int) {
        for (long i = first; i < last; ++i) {
            const auto* from = packed + ids[i] / PANEL * PANEL * in + ids[i] % PANEL * Format::PAIR;
            for (long column = 0; column < in; ++column)
                y[i * in + column] = from[column / Format::PAIR * PANEL * Format::PAIR + column % Format::PAIR];
        }
    });
}

}  // namespace
