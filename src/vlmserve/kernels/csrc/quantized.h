// Matmuls with 8-bit and 4-bit weights for any number of rows, and the choice between these and plain ones.
//
// If instructions multiply small integers, inputs become integers of `input_bits`. A row becomes 16-bit integers with one
// scale, or bytes with a scale per group of inputs. For 8-bit weights, bytes need an instruction that adds the products of four
// bytes.
#pragma once

#include "plain.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define INTEGER_INPUTS
#include "quantized_dot.h"
#include "amx_quantized.h"
#elif defined(__AVX2__)
#define INTEGER_INPUTS
#include "quantized_chunks.h"
#else
#include "quantized_float.h"
#endif
#if defined(INTEGER_INPUTS)
#include "superblocks.h"
#endif

namespace {

// Rows prepared for an 8-bit weight, and their place in a call's scratch.
struct Int8Rows {
    static constexpr int BLOCK = WIDE_BLOCK;
    long in, padded;
    Quad* quads;
    float* scales;
    std::int32_t* sums;

    explicit Int8Rows(const LinearArgs& args) : in(args.in), padded(WeightForm(args).padded(args.in)) {
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
                      weight + tile * WeightForm(8, 0, false).tile_bytes(rows.padded), rows.padded, sums);
    }
};

#if defined(DOTS_OF_BYTES)
// The same with 8-bit inputs.
struct ByteRows {
    static constexpr int BLOCK = NARROW_BLOCK;
    long in, padded;
    Four* fours;
    GroupScale* scales;

    explicit ByteRows(const LinearArgs& args) : in(args.in), padded(WeightForm(args).padded(args.in)) {
        fours = static_cast<Four*>(args.scratch);
        scales = reinterpret_cast<GroupScale*>(fours + args.rows * (padded / 4));
    }

    long groups() const { return (padded + INPUT_GROUP - 1) / INPUT_GROUP; }
    long row_bytes() const { return padded / 4 * static_cast<long>(sizeof(Four)); }
    long bytes(long rows) const { return rows * (row_bytes() + groups() * static_cast<long>(sizeof(GroupScale))); }

    template <class T>
    void prepare(const T* x, long first, long place, long count) const {
        round_row(x, in, padded, INPUT_GROUP, fours + first * (padded / 4), scales + first * groups(), place, count);
    }

    template <int ROWS>
    static void multiply(const ByteRows& rows, const u8* weight, long row, long tile, f32v (&sums)[ROWS][VECTORS]) {
        multiply_bytes(rows.fours + row * (rows.padded / 4), rows.scales + row * rows.groups(),
                       weight + tile * WeightForm(8, 0, false).tile_bytes(rows.padded), rows.padded, sums);
    }
};
#else
typedef Int8Rows ByteRows;
#endif

// The same for weights in groups, with 8-bit inputs.
template <int BITS, bool IS_CODED = false>
struct GroupRows {
    static constexpr int BLOCK = NARROW_BLOCK;
    WeightForm form;
    long in, padded;
    Four* fours;
    GroupScale* scales;

    explicit GroupRows(const LinearArgs& args) : form(args), in(args.in), padded(form.padded(args.in)) {
        fours = static_cast<Four*>(args.scratch);
        scales = reinterpret_cast<GroupScale*>(fours + args.rows * (padded / 4));
    }

    long groups() const { return padded / form.group; }
    long row_bytes() const { return padded / 4 * static_cast<long>(sizeof(Four)); }
    long bytes(long rows) const { return rows * (row_bytes() + groups() * static_cast<long>(sizeof(GroupScale))); }

    template <class T>
    void prepare(const T* x, long first, long place, long count) const {
        round_row(x, in, padded, form.group, fours + first * (padded / 4), scales + first * groups(), place, count);
    }

    template <int ROWS>
    static void multiply(const GroupRows& rows, const u8* weight, long row, long tile, f32v (&sums)[ROWS][VECTORS]) {
        multiply_groups<BITS, IS_CODED>(rows.fours + row * (rows.padded / 4), rows.scales + row * rows.groups(),
                              weight + tile * rows.form.tile_bytes(rows.padded), rows.padded, rows.form, sums);
    }

#if defined(UNPACKS_GROUPS)
    bool unpacks() const { return has_chunks(form.group); }

    static void multiply_many(const GroupRows& rows, const LinearArgs& args, long tile, long first, long last,
                              float (*sums)[TILE]) {
        const u8* from = static_cast<const u8*>(args.weight) + tile * rows.form.tile_bytes(rows.padded);
        multiply_chunks<NarrowChunk>(rows.fours, rows.scales, from, rows.padded, rows.form, args.rows, first, last,
                                     sums);
    }
#endif
};

#if defined(INTEGER_INPUTS)
// The same with 16-bit inputs.
template <int BITS, bool IS_CODED = false>
struct WideGroupRows {
    static constexpr int BLOCK = WIDE_BLOCK;
    WeightForm form;
    long in, padded;
    Quad* quads;
    GroupSum* group_sums;
    float* scales;
    std::int32_t* sums;
    bool needs_sums = true;

    explicit WideGroupRows(const LinearArgs& args) : form(args), in(args.in), padded(form.padded(args.in)) {
        quads = static_cast<Quad*>(args.scratch);
        group_sums = reinterpret_cast<GroupSum*>(quads + args.rows * (padded / 4));
        scales = reinterpret_cast<float*>(group_sums + args.rows * groups());
        sums = reinterpret_cast<std::int32_t*>(scales + args.rows);
#if defined(UNPACKS_GROUPS)
        // Unpacked weights without minimums are relative to zero.
        needs_sums = form.minimums || args.rows < MANY_ROWS || !unpacks();
#endif
    }

    long groups() const { return padded / form.group; }
    long row_bytes() const { return padded / 4 * static_cast<long>(sizeof(Quad)); }
    long bytes(long rows) const {
        return rows * (row_bytes() + groups() * static_cast<long>(sizeof(GroupSum)) + 4 * (1 + num_sums(padded)));
    }

    template <class T>
    void prepare(const T* x, long first, long place, long count) const {
        float factor = split_row(x, in, padded, quads + first * (padded / 4), scales + first,
                                 sums + first * num_sums(padded), place, count);
        if (!needs_sums) return;
        add_groups(x, in, padded, form.group, factor, group_sums + first * groups(), place, count);
    }

    template <int ROWS>
    static void multiply(const WideGroupRows& rows, const u8* weight, long row, long tile, f32v (&sums)[ROWS][VECTORS]) {
        multiply_wide<BITS, IS_CODED>(rows.quads + row * (rows.padded / 4), rows.scales + row, rows.group_sums + row * rows.groups(),
                            weight + tile * rows.form.tile_bytes(rows.padded), rows.padded, rows.form, sums);
    }

#if defined(UNPACKS_GROUPS)
    bool unpacks() const { return has_chunks(form.group); }

    static void multiply_many(const WideGroupRows& rows, const LinearArgs& args, long tile, long first, long last,
                              float (*sums)[TILE]) {
        const u8* from = static_cast<const u8*>(args.weight) + tile * rows.form.tile_bytes(rows.padded);
        multiply_chunks<WideChunk<BITS, IS_CODED>>(rows.quads, rows.group_sums, from, rows.padded, rows.form, args.rows, first,
                                                   last, sums);
        const long start = block_start(args.rows, first, MANY_BLOCK);
        for (long row = start; row < block_start(args.rows, last, MANY_BLOCK); ++row)
            for (int i = 0; i < VECTORS; ++i) {
                float* place = sums[row - start] + i * LANES;
                store(place, load(place) * rows.scales[row]);
            }
    }
#endif
};
#else
template <int BITS, bool IS_CODED = false>
using WideGroupRows = GroupRows<BITS, IS_CODED>;
#endif

// Prepares the rows of a block.
template <class Rows, int BLOCK>
void prepare_block(const LinearArgs& args, long block) {
    const Rows rows(args);
    long first = block_start(args.rows, block, BLOCK), count = block_start(args.rows, block + 1, BLOCK) - first;
    for (long place = 0; place < count; ++place) {
        long start = source_row(args, first + place) * args.x_stride;
        if (args.dtype == FLOAT32)
            rows.prepare(static_cast<const float*>(args.x) + start, first, place, count);
        else
            rows.prepare(static_cast<const bf16*>(args.x) + start, first, place, count);
    }
}

// Matmuls with such weights.
template <class Rows>
struct QuantizedProduct {
    static constexpr int BLOCK = Rows::BLOCK;
    static constexpr long ROWS = CACHED_ROWS;

    static long row_bytes(const LinearArgs& args) { return Rows(args).row_bytes(); }

    static void prepare(const LinearArgs& args, long block) { prepare_block<Rows, BLOCK>(args, block); }

    static void multiply(const LinearArgs& args, long tile, long first, long last) {
        const Rows rows(args);
        alignas(64) float kept[CACHED_ROWS][TILE];
        long first_row = block_start(args.rows, first, BLOCK), row = first_row;
        for (long block = first, end; block < last; ++block, row = end) {
            end = block_start(args.rows, block + 1, BLOCK);
            prefetch_factors(args, tile, block - first, last - first);
            with_rows<BLOCK>(end - row, [&](auto count) {
                f32v sums[decltype(count)::value][VECTORS];
                Rows::multiply(rows, static_cast<const u8*>(args.weight), row, tile, sums);
                keep(kept + (row - first_row), sums);
            });
        }
        finish_rows(args, first_row, row, tile, kept);
    }
};

// The same for many rows: weights of a tile are unpacked once.
template <class Rows>
struct UnpackedProduct {
    static constexpr int BLOCK = MANY_BLOCK;
    static constexpr long ROWS = CACHED_ROWS;

    static long row_bytes(const LinearArgs& args) { return Rows(args).row_bytes(); }

    static void prepare(const LinearArgs& args, long block) { prepare_block<Rows, BLOCK>(args, block); }

    static void multiply(const LinearArgs& args, long tile, long first, long last) {
        alignas(64) float kept[CACHED_ROWS][TILE];
        prefetch_factors(args, tile, 0, 1);
        Rows::multiply_many(Rows(args), args, tile, first, last, kept);
        finish_rows(args, block_start(args.rows, first, BLOCK), block_start(args.rows, last, BLOCK), tile, kept);
    }
};

// For 8-bit weights in groups.
#if defined(DOTS_OF_BYTES)
typedef GroupRows<8> ByteGroupRows;
#else
typedef WideGroupRows<8> ByteGroupRows;
#endif

// Calls `work` with the weight's kind of rows, for few rows if there are two.
template <class Work>
auto with_few(const LinearArgs& args, Work work) {
#if defined(INTEGER_INPUTS)
    if (args.weight_bits == SUPERBLOCKS) return work(SuperblockRows(args));
#endif
    if (args.weight_bits == CODED_GROUPS) return work(WideGroupRows<4, true>(args));
    if (args.weight_bits == 4) return args.input_bits == 8 ? work(GroupRows<4>(args)) : work(WideGroupRows<4>(args));
    if (args.group) return args.input_bits == 8 ? work(ByteGroupRows(args)) : work(WideGroupRows<8>(args));
    return args.input_bits == 8 ? work(ByteRows(args)) : work(Int8Rows(args));
}

#if defined(AMX)
// Whether tiles multiply a weight's inputs.
INLINE bool has_tiled_rows(const LinearArgs& args) {
    if (args.weight_bits == SUPERBLOCKS) return false;
    const long group = args.group ? args.group : INPUT_GROUP;
    return step_of(group) > 0 && group <= TILED_GROUP;
}

// Maximum inputs of a group of 4-bit weights whose sums with 16-bit inputs are exact in float32.
constexpr long EXACT_GROUP = 32;

// Calls `work` with the weight's kind of rows.
template <class Work>
auto with_tiled(const LinearArgs& args, Work work) {
    const bool has_pairs = args.group % TILE_INPUTS == 0;
    if (args.weight_bits == CODED_GROUPS) return work(TiledGroupRows<4, true, true, false>(args));
    if (args.weight_bits == 4 && args.input_bits == 8)
        return has_pairs ? work(TiledGroupRows<4, false, false, true>(args)) : work(TiledGroupRows<4, false, false, false>(args));
    if (args.weight_bits == 4)
        return args.group == EXACT_GROUP ? work(TiledGroupRows<4, false, true, true>(args)) : work(TiledGroupRows<4, false, true, false>(args));
    if (args.input_bits == 8) return work(TiledGroupRows<8, false, false, false>(args));
    return args.group ? work(TiledGroupRows<8, false, true, false>(args)) : work(TiledInt8Rows(args));
}
#endif

// Whether there is a matmul that unpacks weights.
template <class Rows>
constexpr auto can_unpack(int) -> decltype(&Rows::unpacks, true) {
    return true;
}
template <class Rows>
constexpr bool can_unpack(long) {
    return false;
}

// The kind of a matmul.
Product choose_product(const LinearArgs& args) {
    if (!args.weight_bits) return choose_plain(args);
#if defined(AMX)
    if (args.rows >= TILED_ROWS && has_tiled_rows(args))
        return with_tiled(args, [&](auto rows) { return product_of(args, TiledProduct<decltype(rows)>()); });
#endif
    return with_few(args, [&](auto rows) {
        typedef decltype(rows) Rows;
        if constexpr (can_unpack<Rows>(0))
            if (args.rows >= MANY_ROWS && rows.unpacks()) return product_of(args, UnpackedProduct<Rows>());
        return product_of(args, QuantizedProduct<Rows>());
    });
}

// Bytes of prepared rows, proportional to their number.
long quantized_scratch(const LinearArgs& args) {
    auto bytes = [&](auto rows) { return rows.bytes(args.rows); };
#if defined(AMX)
    if (has_tiled_rows(args)) return larger(with_few(args, bytes), with_tiled(args, bytes));
#endif
    return with_few(args, bytes);
}

// Bytes of prepared rows, proportional to their number.
long prepared_bytes(const LinearArgs& args) { return args.weight_bits ? quantized_scratch(args) : plain_scratch(args); }

long weight_scratch(const LinearArgs& args) { return cache_lines(prepared_bytes(args)) + OVERREAD; }

// Bytes of a weight packed by `pack` or `pack_quantized`.
long packed_bytes(const LinearArgs& args) {
#if defined(INTEGER_INPUTS)
    if (args.weight_bits == SUPERBLOCKS) return TileTable(args.weight).offset(num_tiles(args.out, args.gated));
#endif
    WeightForm form(args);
    long element = args.dtype == FLOAT32 ? 4 : 2, plain = TILE * args.in * element;
    return num_tiles(args.out, args.gated) * (args.weight_bits ? form.tile_bytes(form.padded(args.in)) : plain);
}

// Scratch bytes of a matmul with sorted rows.
long product_scratch(const LinearArgs& args) {
    long shrunk = args.adapters ? args.rows * shrunk_stride(args) : 0;
    return weight_scratch(args) + cache_lines(shrunk * static_cast<long>(sizeof(float)));
}

void multiply_sorted(LinearArgs args) {
    args.shrunk = reinterpret_cast<float*>(static_cast<char*>(args.scratch) + weight_scratch(args));
    each_tile(args, choose_product(args));
}

// A single matmul.
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
