// Products with packed weights, for any number of rows.
//
// A packed weight is a row of tiles of 32 output features: in float32 [out / 32][in][32], in bfloat16
// [out / 32][in / 2][32][2], where the two inputs of a pair lie side by side as the dot product instruction wants them.
// A tile is read from its beginning to its end, which memory does fastest, and each vector of it meets a broadcast input
// of every row. A tile of a gated weight has 16 gates and then the ups for the same features.
// Rows are rearranged alike, [rows / block][in / pair][block], so that what is broadcast lies side by side.
#pragma once

#include "table.h"
#include "vector.h"

namespace {

constexpr long LANES = 16;
constexpr long TILE = 2 * LANES;

#if defined(__AVX512F__)
constexpr int BLOCK = 12;  // 24 sums, of 32 registers
#elif defined(__AVX2__)
constexpr int BLOCK = 3;  // 6 sums of two registers each, of 16
#else
constexpr int BLOCK = 4;
#endif

// Inputs of the rows that stay in a second-level cache while the tiles pass by.
constexpr long CACHED_BYTES = 256 * 1024;

// How far ahead of its use a weight is asked for: what a core reads while memory answers.
constexpr long PREFETCH_BYTES = 3072;

struct Float32 {
    typedef float Element;
    typedef float Input;
    typedef f32x16 Weights;
    static constexpr long PAIR = 1;
    INLINE Input input(const Element* x) { return *x; }
    INLINE Weights weights(const Element* packed) { return load(packed); }
    INLINE void multiply(f32x16& sum, Input x, Weights w) { sum += x * w; }
};

struct BFloat16 {
    typedef bf16 Element;
    static constexpr long PAIR = 2;
#if defined(__AVX512BF16__)
    typedef std::uint32_t Input;
    typedef __m512i Weights;
    INLINE Input input(const Element* x) {
        Input pair;
        __builtin_memcpy(&pair, x, sizeof pair);
        return pair;
    }
    INLINE Weights weights(const Element* packed) { return _mm512_loadu_si512(packed); }
    INLINE void multiply(f32x16& sum, Input x, Weights w) {
        __m512i pair = _mm512_set1_epi32(static_cast<int>(x));
        sum = bit_cast<f32x16>(
            _mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(pair), bit_cast<__m512bh>(w)));
    }
#else
    struct Input {
        float even, odd;
    };
    struct Weights {
        f32x16 even, odd;
    };
    INLINE Input input(const Element* x) { return {to_float(x[0]), to_float(x[1])}; }
    INLINE Weights weights(const Element* packed) {
        u32x16 pairs;
        __builtin_memcpy(&pairs, packed, sizeof pairs);
        return {bit_cast<f32x16>(pairs << 16), bit_cast<f32x16>(pairs & 0xffff0000u)};
    }
    INLINE void multiply(f32x16& sum, Input x, Weights w) { sum += x.even * w.even + x.odd * w.odd; }
#endif
};

INLINE long features_of_tile(bool gated) { return gated ? LANES : TILE; }
INLINE long num_tiles(long out, bool gated) {
    long features = gated ? out / 2 : out, each = features_of_tile(gated);
    return (features + each - 1) / each;
}

// Rows are cut into blocks of nearly equal size.
INLINE long num_blocks(long rows, int most = BLOCK) { return (rows + most - 1) / most; }
INLINE long block_start(long rows, long block, int most = BLOCK) { return rows * block / num_blocks(rows, most); }

template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls `work` with a number of rows, 1 to MOST, as a constant.
template <int MOST, class Work>
INLINE void with_rows(long rows, Work work) {
    if constexpr (MOST > 1)
        if (rows < MOST) return with_rows<MOST - 1>(rows, work);
    work(Count<MOST>{});
}

template <class Format>
void rearrange_rows(const LinearArgs& args, typename Format::Input* to, long block) {
    const auto* x = static_cast<const typename Format::Element*>(args.x);
    long first = block_start(args.rows, block), count = block_start(args.rows, block + 1) - first;
    long units = args.in / Format::PAIR;
    to += first * units;
    for (long row = 0; row < count; ++row) {
        const auto* from = x + (first + row) * args.x_stride;
        for (long unit = 0; unit < units; ++unit) to[unit * count + row] = Format::input(from + unit * Format::PAIR);
    }
}

template <class Format, int ROWS>
INLINE void multiply_block(const typename Format::Input* x, const typename Format::Element* tile, long in,
                           f32x16 (&sums)[ROWS][2]) {
    for (int row = 0; row < ROWS; ++row) sums[row][0] = sums[row][1] = f32x16{};
    for (long unit = 0; unit < in / Format::PAIR; ++unit) {
        const auto* place = tile + unit * Format::PAIR * TILE;
        for (long line = 0; line < TILE * static_cast<long>(sizeof *place) * Format::PAIR; line += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(place) + PREFETCH_BYTES + line);
        typename Format::Weights first = Format::weights(place);
        typename Format::Weights second = Format::weights(place + LANES * Format::PAIR);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            Format::multiply(sums[row][0], x[unit * ROWS + row], first);
            Format::multiply(sums[row][1], x[unit * ROWS + row], second);
        }
    }
}

template <class Out, class Element>
INLINE void finish(const LinearArgs& args, long row, long column, long columns, f32x16 value) {
    if (columns <= 0) return;
    columns = smaller(columns, LANES);
    long place = row * args.y_stride + column;
    if (args.residual) value += load_some(static_cast<const Element*>(args.residual) + place, columns);
    store_some(static_cast<Out*>(args.y) + place, value, columns);
}

// What follows the product: bias, activation, gates, residual.
template <class Out, class Element, int ROWS>
INLINE void finish_block(const LinearArgs& args, long row, long tile, const f32x16 (&sums)[ROWS][2]) {
    if (args.gated) {
        long column = tile * LANES, columns = args.out / 2 - column;
        for (int i = 0; i < ROWS; ++i)
            finish<Out, Element>(args, row + i, column, columns, activate(args.activation, sums[i][0]) * sums[i][1]);
        return;
    }
    for (int half = 0; half < 2; ++half) {
        long column = tile * TILE + half * LANES, columns = args.out - column;
        f32x16 bias{};
        if (args.bias && columns > 0)
            bias = load_some(static_cast<const Element*>(args.bias) + column, smaller(columns, LANES));
        for (int i = 0; i < ROWS; ++i)
            finish<Out, Element>(args, row + i, column, columns, activate(args.activation, sums[i][half] + bias));
    }
}

template <class Format, class Out, int ROWS>
void run_block(const LinearArgs& args, const typename Format::Input* x, long row, long tile) {
    typedef typename Format::Element Element;
    f32x16 sums[ROWS][2];
    multiply_block<Format, ROWS>(x, static_cast<const Element*>(args.weight) + tile * TILE * args.in, args.in, sums);
    finish_block<Out, Element>(args, row, tile, sums);
}

// A product, by the team of threads that calls it: `prepare(block)` for each block of rows (of at most MOST), then
// `multiply(rows, row, tile)` for each tile with each block, `rows` being a `Count`. row_bytes: what a prepared row takes.
template <int MOST, class Prepare, class Multiply>
INLINE void each_tile(const LinearArgs& args, long row_bytes, Prepare prepare, Multiply multiply) {
    long blocks = num_blocks(args.rows, MOST), tiles = num_tiles(args.out, args.gated);
    long cached_blocks = larger(1, CACHED_BYTES / (row_bytes * MOST));
#pragma omp for schedule(static)
    for (long block = 0; block < blocks; ++block) prepare(block);
    // Every thread has its own tiles, so that each weight is read by one core.
    for (long first = 0; first < blocks; first += cached_blocks) {
        long last = smaller(blocks, first + cached_blocks);
#pragma omp for schedule(static) nowait
        for (long tile = 0; tile < tiles; ++tile)
            for (long block = first; block < last; ++block) {
                long row = block_start(args.rows, block, MOST), end = block_start(args.rows, block + 1, MOST);
                with_rows<MOST>(end - row, [&](auto rows) { multiply(rows, row, tile); });
            }
    }
#pragma omp barrier
}

template <class Format, class Out>
void multiply(const LinearArgs& args) {
    auto* inputs = static_cast<typename Format::Input*>(args.scratch);
    long units = args.in / Format::PAIR;
    each_tile<BLOCK>(
        args, units * static_cast<long>(sizeof(typename Format::Input)),
        [&](long block) { rearrange_rows<Format>(args, inputs, block); },
        [&](auto rows, long row, long tile) {
            run_block<Format, Out, decltype(rows)::value>(args, inputs + row * units, row, tile);
        });
}

void linear_plain(const LinearArgs& args) {
    if (args.dtype == FLOAT32)
        multiply<Float32, float>(args);
    else if (args.float_output)
        multiply<BFloat16, float>(args);
    else
        multiply<BFloat16, bf16>(args);
}

long plain_scratch(const LinearArgs& args) {
    return args.dtype == FLOAT32 ? args.rows * args.in * static_cast<long>(sizeof(Float32::Input))
                                 : args.rows * (args.in / 2) * static_cast<long>(sizeof(BFloat16::Input));
}

template <class Format>
void pack_tiles(const typename Format::Element* weight, typename Format::Element* packed, long out, long in, bool gated) {
    long tiles = num_tiles(out, gated), features = gated ? out / 2 : out, each = features_of_tile(gated);
    constexpr long UNIT = Format::PAIR * static_cast<long>(sizeof(typename Format::Element));
#pragma omp parallel for schedule(static)
    for (long tile = 0; tile < tiles; ++tile) {
        auto* to = packed + tile * TILE * in;
        const typename Format::Element* rows[TILE];
        for (long lane = 0; lane < TILE; ++lane) {
            long feature = tile * each + lane % each;
            rows[lane] = feature < features ? weight + (feature + lane / each * features) * in : nullptr;
        }
        for (long column = 0; column < in; column += Format::PAIR)
            for (long lane = 0; lane < TILE; ++lane, to += Format::PAIR)
                if (rows[lane])
                    __builtin_memcpy(to, rows[lane] + column, UNIT);
                else
                    __builtin_memset(to, 0, UNIT);
    }
}

void pack(const void* weight, void* packed, long out, long in, int dtype, int gated) {
    if (dtype == FLOAT32)
        pack_tiles<Float32>(static_cast<const float*>(weight), static_cast<float*>(packed), out, in, gated);
    else
        pack_tiles<BFloat16>(static_cast<const bf16*>(weight), static_cast<bf16*>(packed), out, in, gated);
}

template <class Format>
void gather_rows(const typename Format::Element* packed, const std::int64_t* ids, typename Format::Element* y, long count,
                 long in) {
#pragma omp parallel for schedule(static) if (count > 64)
    for (long i = 0; i < count; ++i) {
        const auto* from = packed + ids[i] / TILE * TILE * in + ids[i] % TILE * Format::PAIR;
        for (long column = 0; column < in; ++column)
            y[i * in + column] = from[column / Format::PAIR * TILE * Format::PAIR + column % Format::PAIR];
    }
}

}  // namespace
