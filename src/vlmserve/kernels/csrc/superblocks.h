// Matmuls with superblock weights. Inputs become 8-bit integers with one scale per superblock, as in llama.cpp.
#pragma once

#include "superblocks_layout.h"

namespace {

constexpr long GROUP_SUMS = SUPERBLOCK / 16;

// A row's inputs of one superblock: their scale, and the sums of each 16 and each 32 after rounding. starts: `centered` sums of
// each 16.
struct SuperblockInputs {
    float scale;
    InputSums<GROUP_SUMS> sums_of_16;
    InputSums<GROUP_SUMS / 2> sums_of_32;
    std::int32_t starts[GROUP_SUMS];
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
        SuperblockInputs& to = inputs[start / SUPERBLOCK * count + place];
        for (long group = 0; group < GROUP_SUMS; ++group) {
            i32v total{};
            for (long i = start + group * 16; i < start + group * 16 + 16; i += STEP) {
                i32v value = round_to_integers(load(x + i) * factor);
                total += value;
                store_fours(fours + i / 4 * count + place, value, LANES / 4, count);
            }
            sums[group] = sum(total);
            to.starts[group] = centered<MOST_OFFSET>(total);
        }
        for (long i = 0; i < GROUP_SUMS / 2; ++i) wide[i] = sums[2 * i] + sums[2 * i + 1];
        to.scale = most == most ? most / 127 : most;
        to.sums_of_16.set(sums);
        to.sums_of_32.set(wide);
    }
}

// The sums that a group starts with.
template <class Kind>
INLINE Partial start_of(const SuperblockInputs& inputs, int group) {
    if constexpr (!Kind::CENTERED) return Partial{};
    return start_from(inputs.starts[group]) >> Kind::START_SHIFT;
}

// Subtracts a superblock's minimums.
template <class Kind>
INLINE void subtract_minimums(f32v& total, const Spread<Kind::SIGNED, Kind::GROUPS / 4>& minimums,
                              const SuperblockInputs& inputs, f32v dmin) {
    i32v less = multiply_sums(minimums, sums_of<Kind::GROUP>(inputs));
    total -= __builtin_convertvector(less, f32v) * (dmin * inputs.scale);
}

// What unsigned codes have too much.
template <class Kind>
INLINE i32v first_dots(const Spread<Kind::SIGNED, Kind::GROUPS / 4>& scales, const SuperblockInputs& inputs) {
    if constexpr (!Kind::CODED || OFFSET == 0) return i32v{};
    return -OFFSET * multiply_sums(scales, sums_of<Kind::GROUP>(inputs));
}

// Adds the matmul of ROWS rows and some vectors of a tile's superblock, from vector `first` on, to `totals`.
template <class Kind, int ROWS, int WIDTH>
INLINE void add_superblock(const Four* x, const SuperblockInputs* inputs, const u8* from, int first, f32v (&totals)[ROWS][WIDTH]) {
    constexpr int WORDS = Kind::GROUPS / 4, QUADS = quads_at_once<Kind>();
    Factor factors[Kind::GROUPS][WIDTH];
    i32v dots[ROWS][WIDTH];
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
        const Spread<Kind::SIGNED, WORDS> spread(Kind::MINIMUMS ? minimums : scales);
        for (int row = 0; row < ROWS; ++row) {
            if constexpr (Kind::MINIMUMS)
                subtract_minimums<Kind>(totals[row][i], spread, inputs[row], load(parameters + TILE + i * LANES));
            dots[row][i] = first_dots<Kind>(spread, inputs[row]);
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
            const long group = (number * UNIT + quad * 4) / Kind::GROUP;
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; ++i) {
                    if (begins) partial[row][i] = start_of<Kind>(inputs[row], group);
                    partial[row][i] = add_quad<Kind::CODED>(partial[row][i], w[i], x[quad * ROWS + row]);
                    if (ROWS > 1) add_at_once(partial[row][i]);
                    if (ends) dots[row][i] = add_scaled(dots[row][i], partial[row][i], factors[group][i]);
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

// A tile's superblock, unpacked for many rows.
template <class Kind>
struct UnpackedSuperblock {
    static constexpr int WORDS = Kind::GROUPS / 4, WIDTH = MANY_WIDTH, PARTS = VECTORS / WIDTH;
    struct Part {
        u8v weights[SUPERBLOCK / 4][WIDTH];
        Factor factors[Kind::GROUPS][WIDTH];
        Spread<Kind::SIGNED, WORDS> spread[WIDTH];
        f32v d[WIDTH], dmin[WIDTH];
    } parts[PARTS];

    INLINE void unpack(Part& to, const u8* from, int vector) {
        const f16* parameters = reinterpret_cast<const f16*>(from);
        for (int i = 0; i < WIDTH; ++i) {
            u32v scales[WORDS], minimums[WORDS];
            long lane = (vector + i) * LANES;
            Kind::unpack(from + Kind::SCALES_AT + lane * 4, from + F16_BYTES + lane * 2, scales, minimums);
#pragma GCC unroll 16
            for (int group = 0; group < Kind::GROUPS; ++group)
                to.factors[group][i] = factor_of<Kind::SIGNED>(scales[group / 4], group % 4);
            to.spread[i] = Spread<Kind::SIGNED, WORDS>(Kind::MINIMUMS ? minimums : scales);
            to.d[i] = load(parameters + lane);
            if (Kind::MINIMUMS) to.dmin[i] = load(parameters + TILE + lane);
        }
        const u8* unit = from + Kind::PARAMETER_BYTES + vector * LANES * 4;
        for (long number = 0; number < SUPERBLOCK / UNIT; ++number, unit += Kind::UNIT_BYTES)
#pragma GCC unroll 8
            for (int quad = 0; quad < UNIT / 4; ++quad)
                for (int i = 0; i < WIDTH; ++i)
                    to.weights[number * UNIT / 4 + quad][i] = Kind::weights(unit + i * LANES * 4, quad);
    }

    explicit UnpackedSuperblock(const u8* from) {
        for (long line = 0; line < Kind::BYTES; line += 64) __builtin_prefetch(from + Kind::BYTES + line, 0, 2);
        for (int part = 0; part < PARTS; ++part) unpack(parts[part], from, part * WIDTH);
    }
};

// The same as `add_superblock` for many rows, with the sums in memory.
template <class Kind, int ROWS>
__attribute__((noinline)) void add_unpacked(const Four* x, const SuperblockInputs* inputs, const UnpackedSuperblock<Kind>& unpacked,
                                            float (*sums)[TILE]) {
    constexpr int WIDTH = MANY_WIDTH, QUADS = quads_at_once<Kind>();
    for (int number = 0; number < UnpackedSuperblock<Kind>::PARTS; ++number) {
        const auto& part = unpacked.parts[number];
        i32v dots[ROWS][WIDTH];
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < WIDTH; ++i) dots[row][i] = first_dots<Kind>(part.spread[i], inputs[row]);
        const Four* from = x;
#pragma GCC unroll 1
        for (int start = 0; start < SUPERBLOCK / 4; start += QUADS) {
            const int group = start * 4 / Kind::GROUP;
            Partial partial[ROWS][WIDTH];
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; ++i) partial[row][i] = start_of<Kind>(inputs[row], group);
#pragma GCC unroll 8
            for (int quad = 0; quad < QUADS; ++quad, from += ROWS) {
                read_in_turn();
                u8v w[WIDTH];
                for (int i = 0; i < WIDTH; ++i) w[i] = part.weights[start + quad][i];
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                    for (int i = 0; i < WIDTH; ++i) {
                        partial[row][i] = add_quad<Kind::CODED>(partial[row][i], w[i], from[row]);
                        add_at_once(partial[row][i]);
                    }
            }
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; ++i) dots[row][i] = add_scaled(dots[row][i], partial[row][i], part.factors[group][i]);
        }
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < WIDTH; ++i) {
                float* place = sums[row] + (number * WIDTH + i) * LANES;
                f32v total = load(place);
                if constexpr (Kind::MINIMUMS) subtract_minimums<Kind>(total, part.spread[i], inputs[row], part.dmin[i]);
                total += __builtin_convertvector(dots[row][i], f32v) * (part.d[i] * inputs[row].scale);
                store(place, total);
            }
    }
}

// Rows prepared for superblock weights, in a call's scratch.
struct SuperblockRows {
    static constexpr int BLOCK = NARROW_BLOCK;
    static constexpr bool UNPACKS = true;
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

    static bool unpacks() { return true; }

    // A tile with blocks `first` to `last`, with sums in memory.
    static void multiply_many(const SuperblockRows& rows, const LinearArgs& args, long tile, long first, long last,
                              float (*sums)[TILE]) {
        with_kind(rows.table.kind(tile), [&](auto of) {
            typedef decltype(of) Kind;
            const long superblocks = rows.in / SUPERBLOCK, first_row = block_start(args.rows, first, MANY_BLOCK);
            __builtin_memset(sums, 0, static_cast<std::size_t>(block_start(args.rows, last, MANY_BLOCK) - first_row) * sizeof *sums);
            for (long number = 0; number < superblocks; ++number) {
                const UnpackedSuperblock<Kind> unpacked(rows.table.at(tile) + number * Kind::BYTES);
                each_block(args.rows, first, last, [&](auto of_block, long row) {
                    constexpr int ROWS = decltype(of_block)::value;
                    add_unpacked<Kind, ROWS>(rows.fours + row * (rows.in / 4) + number * SUPERBLOCK / 4 * ROWS,
                                             rows.inputs + row * superblocks + number * ROWS, unpacked, sums + (row - first_row));
                });
            }
        });
    }
};

}  // namespace
