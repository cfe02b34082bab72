// Chunks of the delta rule (delta.h) in float32.
#pragma once

#include "formats.h"
#include "states.h"
#include "threads.h"

namespace {

constexpr long CHUNK_ROWS = 64;
// Rows of a block, whose sums with a panel stay in registers.
constexpr int BLOCK_ROWS = LANES == 16 ? 16 : REGISTERS == 32 || LANES == 8 ? 6 : 2;
constexpr long PADDED_ROWS = (CHUNK_ROWS + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
// Elements between rows of a chunk's matrices. Rows at multiples of 512 bytes would share cache lines.
constexpr long PADDING = 16, SCORE_STRIDE = (CHUNK_ROWS + BLOCK_ROWS + PANEL) / PANEL * PANEL;
// Rows of a state that are read in parallel.
constexpr int STATE_ROWS = 4;
constexpr float NORM_EPS = 1e-6f;
// Above this, softplus(x) is x.
constexpr float LINEAR_SOFTPLUS = 20;

struct DeltaShape {
    long group, keys, values, channels, width, draft_width, key_stride, value_stride, state;

    explicit DeltaShape(const DeltaArgs& args)
        : group(args.value_heads / args.key_heads),
          keys(args.key_heads * args.key_size),
          values(args.value_heads * args.value_size),
          channels(2 * keys + values),
          width(channels + values),
          draft_width(channels + 2 * args.value_heads),
          key_stride(args.key_size + PADDING),
          value_stride(args.value_size + PADDING),
          state(args.key_size * args.value_size) {}
};

// A thread's memory.
struct DeltaScratch {
    float *query, *key;    // [rows][key_stride]
    float* value;          // [rows][value_stride], replaced by results
    float* columns;        // keys in panels of 16 rows, [panels][key_size][16]
    float *keys, *scores;  // K K^T and Q K^T, [rows][SCORE_STRIDE]
    float *system, *seen;  // -A and Q K^T D
    float* panel;          // of a state, [key_size][16]; for a single row, sums of two products with a state
    float* updates;        // U of a panel, [rows][16]
    float *total, *grown, *to_end, *beta;  // [rows]: log decay since the start, its exponential, decay until the end
    float* rest;                           // the memory after these

    long floats = 0;

    // chunks: whether a segment has more than one row. memory: null to compute the size.
    DeltaScratch(const DeltaArgs& args, float* memory, bool chunks) {
        DeltaShape shape(args);
        const long rows = chunks ? PADDED_ROWS : 1, scores = chunks ? rows * SCORE_STRIDE : 0;
        auto take = [&](long count) {
            float* taken = memory ? memory + floats : nullptr;
            floats += count;
            return taken;
        };
        query = take(rows * shape.key_stride);
        key = take(rows * shape.key_stride);
        value = take(rows * shape.value_stride);
        updates = take(rows * PANEL);
        keys = take(scores);
        this->scores = take(scores);
        system = take(scores);
        seen = take(scores);
        columns = take(chunks ? SCORE_STRIDE * args.key_size : 0);
        panel = take(larger(chunks ? PANEL * args.key_size : 0, 2 * args.value_size));
        const long vectors = (rows + PANEL - 1) / PANEL * PANEL;
        total = take(vectors);
        grown = take(vectors);
        to_end = take(vectors);
        beta = take(vectors);
        rest = memory ? memory + floats : nullptr;
    }
};

// power: e^x.
INLINE float softplus(float x, float power) { return x > LINEAR_SOFTPLUS ? x : __builtin_log1pf(power); }

// Prefetches a row of the next chunk. Rows are on separate pages, where hardware does not prefetch.
template <class T>
INLINE void prefetch_row(const T* row, long size) {
    for (long i = 0; i < size; i += 64 / static_cast<long>(sizeof(T))) __builtin_prefetch(row + i, 0, 2);
}

// Convolution and SiLU of `size` channels of a segment's rows `first <= row < last`. weight: [kernel][channels].
template <class T>
void convolve(const Inputs<T>& inputs, const float* weight, long first, long last, long size, float* to, long stride) {
    const T* taps[MAX_KERNEL];
    auto each_column = [&](auto count) __attribute__((always_inline)) {
        constexpr int KNOWN = decltype(count)::value;
        for (long column = 0; column < size; column += LANES) {
            f32v sum{};
#pragma GCC unroll 4
            for (long tap = 0; tap < (KNOWN ? KNOWN : inputs.kernel); ++tap)
                if (KNOWN || taps[tap]) sum += load(taps[tap] + column) * load(weight + tap * inputs.channels + column);
            store(to + column, activate(SILU, sum));
        }
    };
    for (long row = first; row < last; ++row, to += stride) {
        find_taps(inputs, row, taps);
        prefetch_row(inputs.rows + (row + CHUNK_ROWS) * inputs.stride, size);
        if (inputs.kernel == 4 && taps[0])
            each_column(Count<4>{});
        else
            each_column(Count<0>{});
    }
}

// count: a multiple of 16.
INLINE float dot(const float* a, const float* b, long count) {
    f32v sums[4] = {};
    for (long i = 0; i < count; i += PANEL)
#pragma GCC unroll 4
        for (int vector = 0; vector < PANEL_VECTORS; ++vector) sums[vector] += load(a + i + vector * LANES) * load(b + i + vector * LANES);
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

INLINE void scale_row(float* row, long count, float factor) {
    for (long i = 0; i < count; i += LANES) store(row + i, load(row + i) * factor);
}

// sums += a b for `count` rows of a panel b. Elements of a are `row_step` apart between rows, `step` between columns.
INLINE void add_products(f32v (&sums)[BLOCK_ROWS][PANEL_VECTORS], const float* a, long row_step, long step, const float* panel,
                         long count) {
    for (long i = 0; i < count; ++i, a += step, panel += PANEL) {
        f32v b[PANEL_VECTORS];
#pragma GCC unroll 4
        for (int vector = 0; vector < PANEL_VECTORS; ++vector) b[vector] = load(panel + vector * LANES);
#pragma GCC unroll 16
        for (int row = 0; row < BLOCK_ROWS; ++row)
#pragma GCC unroll 4
            for (int vector = 0; vector < PANEL_VECTORS; ++vector) sums[row][vector] += a[row * row_step] * b[vector];
    }
}

INLINE void store_block(const f32v (&sums)[BLOCK_ROWS][PANEL_VECTORS], float* to, long stride) {
    for (int row = 0; row < BLOCK_ROWS; ++row)
        for (int vector = 0; vector < PANEL_VECTORS; ++vector) store(to + row * stride + vector * LANES, sums[row][vector]);
}

// K K^T and Q K^T of a chunk, in panels up to the diagonal.
void multiply_keys(const DeltaArgs& args, const DeltaShape& shape, const DeltaScratch& own, long rows) {
    for (long row = 0; row < rows; ++row)
        for (long i = 0; i < args.key_size; ++i)
            own.columns[(row / PANEL * args.key_size + i) * PANEL + row % PANEL] = own.key[row * shape.key_stride + i];
    for (long first = 0; first < rows; first += BLOCK_ROWS)
        for (long column = 0; column < first + BLOCK_ROWS; column += PANEL) {
            f32v keys[BLOCK_ROWS][PANEL_VECTORS] = {}, scores[BLOCK_ROWS][PANEL_VECTORS] = {};
            const float* panel = own.columns + column * args.key_size;
            add_products(keys, own.key + first * shape.key_stride, shape.key_stride, 1, panel, args.key_size);
            store_block(keys, own.keys + first * SCORE_STRIDE + column, SCORE_STRIDE);
            add_products(scores, own.query + first * shape.key_stride, shape.key_stride, 1, panel, args.key_size);
            store_block(scores, own.scores + first * SCORE_STRIDE + column, SCORE_STRIDE);
        }
}

// -A and Q K^T D, with zeros after what rows see, up to the end of their blocks.
void weigh_keys(const DeltaScratch& own, long padded) {
    for (long row = 0; row < padded; ++row)
        for (long column = 0; column < row / BLOCK_ROWS * BLOCK_ROWS + BLOCK_ROWS; column += LANES) {
            i32v place = lanes_from(column);
            auto number = static_cast<std::int32_t>(row);
            f32v decay = choose(place <= number, exponential(own.total[row] - load(own.total + column)), f32v{});
            long at = row * SCORE_STRIDE + column;
            store(own.seen + at, choose(place <= number, load(own.scores + at) * decay, f32v{}));
            store(own.system + at, choose(place < number, load(own.keys + at) * decay * -own.beta[row], f32v{}));
        }
}

// One panel of a chunk: updates, results instead of values, and the state after the first `reached` rows.
void run_panel(const DeltaArgs& args, const DeltaShape& shape, const DeltaScratch& own, long rows, long reached,
               const float* source, float* target, float* values) {
    for (long i = 0; i < args.key_size; ++i)
        for (int vector = 0; vector < PANEL_VECTORS; ++vector)
            store(own.panel + i * PANEL + vector * LANES, source ? load(source + i * args.value_size + vector * LANES) : f32v{});
    for (long first = 0; first < rows; first += BLOCK_ROWS) {
        f32v sums[BLOCK_ROWS][PANEL_VECTORS] = {};
        add_products(sums, own.key + first * shape.key_stride, shape.key_stride, 1, own.panel, args.key_size);
        for (int row = 0; row < BLOCK_ROWS; ++row)
            for (int vector = 0; vector < PANEL_VECTORS; ++vector) {
                f32v value = load(values + (first + row) * shape.value_stride + vector * LANES);
                sums[row][vector] = (value - own.grown[first + row] * sums[row][vector]) * own.beta[first + row];
            }
        const float* system = own.system + first * SCORE_STRIDE;
        add_products(sums, system, SCORE_STRIDE, 1, own.updates, first);
#pragma GCC unroll 16
        for (int row = 1; row < BLOCK_ROWS; ++row)
#pragma GCC unroll 16
            for (int other = 0; other < row; ++other)
                for (int vector = 0; vector < PANEL_VECTORS; ++vector)
                    sums[row][vector] += system[row * SCORE_STRIDE + first + other] * sums[other][vector];
        store_block(sums, own.updates + first * PANEL, PANEL);

        f32v results[BLOCK_ROWS][PANEL_VECTORS] = {};
        add_products(results, own.query + first * shape.key_stride, shape.key_stride, 1, own.panel, args.key_size);
        for (int row = 0; row < BLOCK_ROWS; ++row)
            for (int vector = 0; vector < PANEL_VECTORS; ++vector) results[row][vector] *= own.grown[first + row];
        add_products(results, own.seen + first * SCORE_STRIDE, SCORE_STRIDE, 1, own.updates, first + BLOCK_ROWS);
        store_block(results, values + first * shape.value_stride, shape.value_stride);
    }
    for (long row = 0; row < reached; ++row) scale_row(own.updates + row * PANEL, PANEL, own.to_end[row]);
    // The last block may recompute rows of the previous one.
    for (long block = 0; block < args.key_size; block += BLOCK_ROWS) {
        long first = smaller(block, args.key_size - BLOCK_ROWS);
        f32v sums[BLOCK_ROWS][PANEL_VECTORS];
        for (int row = 0; row < BLOCK_ROWS; ++row)
            for (int vector = 0; vector < PANEL_VECTORS; ++vector)
                sums[row][vector] = load(own.panel + (first + row) * PANEL + vector * LANES) * own.grown[reached - 1];
        add_products(sums, own.key + first, 1, shape.key_stride, own.updates, reached);
        store_block(sums, target + first * args.value_size, args.value_size);
    }
}

}  // namespace
