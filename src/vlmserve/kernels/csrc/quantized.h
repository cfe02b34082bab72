// Products with weights of 8 or 4 bits, for any number of rows, and the choice between them and plain ones.
//
// Where instructions multiply small integers, inputs become integers as well, of `input_bits`. A row becomes 16-bit integers
// by a scale of its own, or bytes: beside weights of 4 bits each group by a scale of its own, beside weights of 8 bits the
// row, where an instruction adds the products of four bytes up.
#pragma once

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define INTEGER_INPUTS
#include "quantized_dot.h"
#elif defined(__AVX2__)
#define INTEGER_INPUTS
#include "quantized_madd.h"
#else
#include "quantized_float.h"
#endif

namespace {

// Rows, prepared for a weight of 8 bits, and where they are in the scratch memory of a call.
struct Int8Rows {
    static constexpr int BLOCK = WIDE_BLOCK;
    long in, padded;
    Quad* quads;
    float* scales;
    std::int32_t* sums;

    explicit Int8Rows(const LinearArgs& args) : in(args.in), padded(padded_in(args)) {
        quads = static_cast<Quad*>(args.scratch);
        scales = reinterpret_cast<float*>(quads + args.rows * (padded / 4));
        sums = reinterpret_cast<std::int32_t*>(scales + args.rows);
    }

    long row_bytes() const { return padded / 4 * static_cast<long>(sizeof(Quad)); }
    long bytes(long rows) const { return rows * (row_bytes() + 4 * (1 + num_sums(padded))); }

    template <class T>
    void prepare(const T* x, long first, long place, long count) const {
        split_row(x, in, padded, quads + first * (padded / 4), scales + first, sums + first * num_sums(padded), place, count);
    }

    template <int ROWS>
    static void multiply(const Int8Rows& rows, const u8* weight, long row, long tile, f32v (&sums)[ROWS][VECTORS]) {
        multiply_int8(rows.quads + row * (rows.padded / 4), rows.scales + row, rows.sums + row * num_sums(rows.padded),
                      weight + tile * tile_bytes(rows.padded, 8, 0), rows.padded, sums);
    }
};

#if defined(DOTS_OF_BYTES)
// Likewise with inputs of 8 bits.
struct ByteRows {
    static constexpr int BLOCK = NARROW_BLOCK;
    long in, padded;
    Four* fours;
    float* scales;
    std::int32_t* sums;

    explicit ByteRows(const LinearArgs& args) : in(args.in), padded(padded_in(args)) {
        fours = static_cast<Four*>(args.scratch);
        scales = reinterpret_cast<float*>(fours + args.rows * (padded / 4));
        sums = reinterpret_cast<std::int32_t*>(scales + args.rows);
    }

    long row_bytes() const { return padded / 4 * static_cast<long>(sizeof(Four)); }
    long bytes(long rows) const { return rows * (row_bytes() + 8); }

    template <class T>
    void prepare(const T* x, long first, long place, long count) const {
        narrow_row(x, in, padded, fours + first * (padded / 4), scales + first, sums + first, place, count);
    }

    template <int ROWS>
    static void multiply(const ByteRows& rows, const u8* weight, long row, long tile, f32v (&sums)[ROWS][VECTORS]) {
        multiply_bytes(rows.fours + row * (rows.padded / 4), rows.scales + row, rows.sums + row,
                       weight + tile * tile_bytes(rows.padded, 8, 0), rows.padded, sums);
    }
};
#else
typedef Int8Rows ByteRows;
#endif

// Likewise for one of 4 bits.
struct Int4Rows {
    static constexpr int BLOCK = NARROW_BLOCK;
    long in, padded, group;
    Four* fours;
    GroupScale* scales;

    explicit Int4Rows(const LinearArgs& args) : in(args.in), padded(padded_in(args)), group(args.group) {
        fours = static_cast<Four*>(args.scratch);
        scales = reinterpret_cast<GroupScale*>(fours + args.rows * (padded / 4));
    }

    long groups() const { return padded / group; }
    long row_bytes() const { return padded / 4 * static_cast<long>(sizeof(Four)); }
    long bytes(long rows) const { return rows * (row_bytes() + groups() * static_cast<long>(sizeof(GroupScale))); }

    template <class T>
    void prepare(const T* x, long first, long place, long count) const {
        round_row(x, in, padded, group, fours + first * (padded / 4), scales + first * groups(), place, count);
    }

    template <int ROWS>
    static void multiply(const Int4Rows& rows, const u8* weight, long row, long tile, f32v (&sums)[ROWS][VECTORS]) {
        multiply_int4(rows.fours + row * (rows.padded / 4), rows.scales + row * rows.groups(),
                      weight + tile * tile_bytes(rows.padded, 4, rows.group), rows.padded, rows.group, sums);
    }
};

#if defined(INTEGER_INPUTS)
// Likewise with inputs of 16 bits.
struct Int4WideRows {
    static constexpr int BLOCK = WIDE_BLOCK;
    long in, padded, group;
    Quad* quads;
    float *scales, *group_sums;
    std::int32_t* sums;

    explicit Int4WideRows(const LinearArgs& args) : in(args.in), padded(padded_in(args)), group(args.group) {
        quads = static_cast<Quad*>(args.scratch);
        scales = reinterpret_cast<float*>(quads + args.rows * (padded / 4));
        group_sums = scales + args.rows;
        sums = reinterpret_cast<std::int32_t*>(group_sums + args.rows * groups());
    }

    long groups() const { return padded / group; }
    long row_bytes() const { return padded / 4 * static_cast<long>(sizeof(Quad)); }
    long bytes(long rows) const { return rows * (row_bytes() + 4 * (1 + groups() + num_sums(padded))); }

    template <class T>
    void prepare(const T* x, long first, long place, long count) const {
        float factor = split_row(x, in, padded, quads + first * (padded / 4), scales + first,
                                 sums + first * num_sums(padded), place, count);
        add_groups(x, in, padded, group, factor, group_sums + first * groups(), place, count);
    }

    template <int ROWS>
    static void multiply(const Int4WideRows& rows, const u8* weight, long row, long tile, f32v (&sums)[ROWS][VECTORS]) {
        multiply_int4_wide(rows.quads + row * (rows.padded / 4), rows.scales + row, rows.group_sums + row * rows.groups(),
                           weight + tile * tile_bytes(rows.padded, 4, rows.group), rows.padded, rows.group, sums);
    }
};
#else
typedef Int4Rows Int4WideRows;
#endif

template <class Rows, class T, class Out>
void multiply_quantized(const LinearArgs& args) {
    constexpr int BLOCK_ROWS = Rows::BLOCK;
    Rows rows(args);
    each_tile<BLOCK_ROWS>(
        args, rows.row_bytes(),
        [&](long block) {
            long first = block_start(args.rows, block, BLOCK_ROWS);
            long count = block_start(args.rows, block + 1, BLOCK_ROWS) - first;
            for (long place = 0; place < count; ++place)
                rows.prepare(static_cast<const T*>(args.x) + (first + place) * args.x_stride, first, place, count);
        },
        [&](long tile, long first, long last) {
            alignas(64) float kept[CACHED_ROWS][TILE];
            long first_row = block_start(args.rows, first, BLOCK_ROWS);
            for (long block = first; block < last; ++block) {
                long row = block_start(args.rows, block, BLOCK_ROWS);
                with_rows<BLOCK_ROWS>(block_start(args.rows, block + 1, BLOCK_ROWS) - row, [&](auto count) {
                    f32v sums[decltype(count)::value][VECTORS];
                    Rows::multiply(rows, static_cast<const u8*>(args.weight), row, tile, sums);
                    args.adapters ? keep(kept + (row - first_row), sums) : finish_block<Out, T>(args, row, tile, sums);
                });
            }
            if (args.adapters) finish_kept<Out, T>(args, first_row, block_start(args.rows, last, BLOCK_ROWS), tile, kept);
        });
}

template <class Rows>
void linear_of(const LinearArgs& args) {
    if (args.dtype == FLOAT32)
        multiply_quantized<Rows, float, float>(args);
    else if (args.float_output)
        multiply_quantized<Rows, bf16, float>(args);
    else
        multiply_quantized<Rows, bf16, bf16>(args);
}

void linear_quantized(const LinearArgs& args) {
    if (args.weight_bits == 8)
        args.input_bits == 8 ? linear_of<ByteRows>(args) : linear_of<Int8Rows>(args);
    else
        args.input_bits == 8 ? linear_of<Int4Rows>(args) : linear_of<Int4WideRows>(args);
}

long quantized_scratch(const LinearArgs& args) {
    if (args.weight_bits == 8)
        return args.input_bits == 8 ? ByteRows(args).bytes(args.rows) : Int8Rows(args).bytes(args.rows);
    return args.input_bits == 8 ? Int4Rows(args).bytes(args.rows) : Int4WideRows(args).bytes(args.rows);
}

long weight_scratch(const LinearArgs& args) {
    return cache_lines(args.weight_bits ? quantized_scratch(args) : plain_scratch(args));
}

// What a product needs in `scratch` where its rows are sorted already.
long product_scratch(const LinearArgs& args) {
    long shrunk = args.adapters ? args.rows * shrunk_stride(args) : 0;
    return weight_scratch(args) + cache_lines(shrunk * static_cast<long>(sizeof(float)));
}

void multiply_sorted(LinearArgs args) {
    args.shrunk = reinterpret_cast<float*>(static_cast<char*>(args.scratch) + weight_scratch(args));
    args.weight_bits ? linear_quantized(args) : linear_plain(args);
}

// A product by itself.
void linear(const LinearArgs& args) {
    LinearArgs own = args;
    AdaptedRows adapted{};
    if (args.adapters)
        adapted = sort_rows(args.row_slots, args.slot_stride, args.rows, static_cast<char*>(args.scratch) + product_scratch(args));
    own.adapted = &adapted;
    multiply_sorted(own);
}

long linear_scratch(const LinearArgs& args) { return product_scratch(args) + (args.adapters ? sorted_bytes(args.rows) : 0); }

}  // namespace
