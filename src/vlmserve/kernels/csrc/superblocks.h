// Matmuls with superblock weights. Inputs become 8-bit integers with one scale per superblock, as in llama.cpp.
#pragma once

#include "superblocks_layout.h"

namespace {

constexpr long GROUP_SUMS = SUPERBLOCK / 16;

// A row's inputs of one superblock: their scale, and the sums of each 16 and each 32 after rounding.
struct SuperblockInputs {
    float scale;
    InputSums<GROUP_SUMS> sums_of_16;
    InputSums<GROUP_SUMS / 2> sums_of_32;
};

template <long GROUP>
INLINE const auto& sums_of(const SuperblockInputs& inputs) {
    if constexpr (GROUP == 16)
        return inputs.sums_of_16;
    else
        return inputs.sums_of_32;
}

// Rounds row `place` of a block of `count` rows with interleaved fours.
template <class T>
void round_superblocks(const T* x, long in, Four* fours, SuperblockInputs* inputs, long place, long count) {
    constexpr long STEP = LANES < 16 ? LANES : 16;
    static_assert(LANES <= 16, "a sum takes whole vectors");
    for (long start = 0; start < in; start += SUPERBLOCK) {
        float most = largest_size(x + start, SUPERBLOCK), factor = most > 0 ? 127 / most : 0.0f;
        std::int32_t sums[GROUP_SUMS], wide[GROUP_SUMS / 2];
        for (long group = 0; group < GROUP_SUMS; ++group) {
            i32v total{};
            for (long i = start + group * 16; i < start + group * 16 + 16; i += STEP) {
                i32v value = round_to_integers(load(x + i) * factor);
                total += value;
                store_fours(fours + i / 4 * count + place, value, LANES / 4, count);
            }
            sums[group] = sum(total);
        }
        for (long i = 0; i < GROUP_SUMS / 2; ++i) wide[i] = sums[2 * i] + sums[2 * i + 1];
        SuperblockInputs& to = inputs[start / SUPERBLOCK * count + place];
        to.scale = most == most ? most / 127 : most;
        to.sums_of_16.set(sums);
        to.sums_of_32.set(wide);
    }
}

// Adds the matmul of ROWS rows and some vectors of a tile's superblock, from vector `first` on, to `totals`.
template <class Kind, int ROWS, int WIDTH>
INLINE void add_superblock(const Four* x, const SuperblockInputs* inputs, const u8* from, int first, f32v (&totals)[ROWS][WIDTH]) {
    constexpr int WORDS = Kind::GROUPS / 4, MOST_QUADS = most_quads(Kind::MOST);
    constexpr int QUADS = Kind::QUADS_OF_GROUP < MOST_QUADS ? Kind::QUADS_OF_GROUP : MOST_QUADS;
    Factor factors[Kind::GROUPS][WIDTH];
    i32v dots[ROWS][WIDTH] = {};
    const f16* parameters = reinterpret_cast<const f16*>(from) + first * LANES;
    for (long line = 0; line < Kind::PARAMETER_BYTES && first == 0; line += 64) __builtin_prefetch(from + PREFETCH_BYTES + line);
#pragma GCC unroll 8
    for (int i = 0; i < WIDTH; ++i) {
        u32v scales[WORDS], minimums[WORDS];
        long lane = (first + i) * LANES;
        Kind::unpack(from + Kind::SCALES_AT + lane * 4, from + F16_BYTES + lane * 2, scales, minimums);
#pragma GCC unroll 16
        for (int group = 0; group < Kind::GROUPS; ++group)
            factors[group][i] = factor_of<Kind::SIGNED>(scales[group / 4], group % 4);
        for (int row = 0; row < ROWS; ++row) {
            const auto& sums = sums_of<Kind::GROUP>(inputs[row]);
            if constexpr (Kind::MINIMUMS) {
                f32v dmin = load(parameters + TILE + i * LANES);
                i32v less = multiply_sums<Kind::SIGNED>(minimums, sums);
                totals[row][i] -= __builtin_convertvector(less, f32v) * (dmin * inputs[row].scale);
            } else {
                dots[row][i] = -Kind::OFFSET * multiply_sums<Kind::SIGNED>(scales, sums);
            }
        }
    }
    const u8* unit = from + Kind::PARAMETER_BYTES + first * LANES * 4;
    for (long number = 0; number < SUPERBLOCK / UNIT; ++number, unit += Kind::UNIT_BYTES, x += UNIT / 4 * ROWS) {
        for (int word = 0; word < Kind::LOW + Kind::HIGH; ++word)
            for (long line = 0; line < WIDTH * LANES * 4; line += 64)
                __builtin_prefetch(unit + word * WORD_BYTES + PREFETCH_BYTES + line);
        Partial partial[ROWS][WIDTH];
#pragma GCC unroll 8
        for (int quad = 0; quad < UNIT / 4; ++quad) {
            if (ROWS > 1) read_in_turn();
            u8v w[WIDTH];
#pragma GCC unroll 8
            for (int i = 0; i < WIDTH; ++i) w[i] = Kind::weights(unit + i * LANES * 4, quad);
            const bool begins = quad % QUADS == 0, ends = (quad + 1) % QUADS == 0;
            const Factor(&scale)[WIDTH] = factors[(number * UNIT + quad * 4) / Kind::GROUP];
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; ++i) {
                    partial[row][i] = add_quad<Kind::CODED>(begins ? Partial{} : partial[row][i], w[i], x[quad * ROWS + row]);
                    if (ROWS > 1) add_at_once(partial[row][i]);
                    if (ends) dots[row][i] = add_scaled(dots[row][i], partial[row][i], scale[i]);
                }
        }
    }
    for (int i = 0; i < WIDTH; ++i) {
        f32v d = load(parameters + i * LANES);
        for (int row = 0; row < ROWS; ++row)
            totals[row][i] += __builtin_convertvector(dots[row][i], f32v) * (d * inputs[row].scale);
    }
}

// A separate function per kind, for all input and output types. A tile's superblock is read once for all vectors, because a
// whole tile would not stay in the first-level cache.
template <class Kind, int ROWS>
void multiply_superblocks(const Four* x, const SuperblockInputs* inputs, const u8* tile, long in, f32v (&sums)[ROWS][VECTORS]) {
    constexpr int WIDTH = vectors_with(ROWS, NARROW_SUMS, 2, 1), PARTS = VECTORS / WIDTH;
    f32v totals[PARTS][ROWS][WIDTH] = {};
    for (long number = 0; number < in / SUPERBLOCK; ++number)
        for (int part = 0; part < PARTS; ++part)
            add_superblock<Kind, ROWS, WIDTH>(x + number * SUPERBLOCK / 4 * ROWS, inputs + number * ROWS,
                                              tile + number * Kind::BYTES, part * WIDTH, totals[part]);
    for (int part = 0; part < PARTS; ++part)
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < WIDTH; ++i) sums[row][part * WIDTH + i] = totals[part][row][i];
}

// Rows prepared for superblock weights, in a call's scratch.
struct SuperblockRows {
    static constexpr int BLOCK = NARROW_BLOCK;
    long in;
    Four* fours;
    SuperblockInputs* inputs;
    TileTable table;

    explicit SuperblockRows(const LinearArgs& args) : in(args.in), table(args.weight) {
        fours = static_cast<Four*>(args.scratch);
        inputs = reinterpret_cast<SuperblockInputs*>(fours + args.rows * (in / 4));
    }

    long row_bytes() const { return in; }
    long bytes(long rows) const { return rows * (in + in / SUPERBLOCK * static_cast<long>(sizeof(SuperblockInputs))); }

    template <class T>
    void prepare(const T* x, long first, long place, long count) const {
        round_superblocks(x, in, fours + first * (in / 4), inputs + first * (in / SUPERBLOCK), place, count);
    }

    template <int ROWS>
    static void multiply(const SuperblockRows& rows, const u8*, long row, long tile, f32v (&sums)[ROWS][VECTORS]) {
        with_kind(rows.table.kind(tile), [&](auto of) {
            multiply_superblocks<decltype(of), ROWS>(rows.fours + row * (rows.in / 4), rows.inputs + row * (rows.in / SUPERBLOCK),
                                                     rows.table.at(tile), rows.in, sums);
        });
    }
};

}  // namespace
