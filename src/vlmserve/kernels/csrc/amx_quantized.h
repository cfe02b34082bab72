// Matmuls of bytes with matrix tiles, for many rows of inputs and low-bit weights.
//
// Sums of products are the integers that other instructions compute for few rows, and become floats in the same order, so a
// row's results are the same. Rows are prepared in blocks of up to 16: [steps][rows][step] bytes, where a step is the inputs of
// a tile. 16-bit inputs are two such planes, of high and of low bytes.
#pragma once

#include "amx_linear.h"
#include "quantized_dot.h"

#if defined(AMX)

namespace {

// Fewer rows are multiplied by other instructions.
constexpr long TILED_ROWS = 16;
// Maximum inputs of a group, whose weights have room in the first-level cache.
constexpr long TILED_GROUP = 512;
// Columns of a panel of sums, in bytes.
constexpr long SUM_BYTES = TILE * 4;

// Shapes of tiles with `step` inputs.
constexpr TileShapes shapes_of(int step) {
    TileShapes shapes;
    for (int i = 4; i < 6; ++i) shapes.row_bytes[i] = static_cast<std::uint16_t>(step);
    for (int i = 6; i < 8; ++i) shapes.rows[i] = static_cast<std::uint8_t>(step / 4);
    return shapes;
}

// The most inputs of a tile that divide a group; 0: none.
constexpr long step_of(long group) { return group % 64 == 0 ? 64 : group % 32 == 0 ? 32 : group % 16 == 0 ? 16 : 0; }

INLINE void configure_step(long step) {
    static constexpr TileShapes shapes[] = {shapes_of(16), shapes_of(32), shapes_of(64)};
    Tiles configured(shapes[step / 32]);
}

// Sums of 16 rows, or of a plane of them.
struct ByteSums {
    alignas(64) std::int32_t sums[TILE_ROWS][TILE];

    INLINE i32v of(const ByteSums& from, long row, int vector) {
        return bit_cast<i32v>(load(reinterpret_cast<const float*>(from.sums[row] + vector * LANES)));
    }
};

// Blocks of rows to multiply: where they begin, and bytes between their steps.
template <int BLOCKS>
struct TileRows {
    const char* begin[BLOCKS];
    long step_bytes[BLOCKS];
};

// Multiplies one or two blocks of rows by a tile's weights, [inputs / 4][32][4] bytes. SIGNED: the weights are.
template <int BLOCKS, bool SIGNED>
INLINE void multiply_bytes_of_tiles(const TileRows<BLOCKS>& rows, const u8* weights, long step, long count, bool continues, ByteSums* to) {
    if (continues) {
        load_tile<0>(to[0].sums, SUM_BYTES);
        load_tile<1>(to[0].sums[0] + PANEL, SUM_BYTES);
    } else {
        clear_tile<0>();
        clear_tile<1>();
    }
    if constexpr (BLOCKS == 2) {
        if (continues) {
            load_tile<2>(to[1].sums, SUM_BYTES);
            load_tile<3>(to[1].sums[0] + PANEL, SUM_BYTES);
        } else {
            clear_tile<2>();
            clear_tile<3>();
        }
    }
    const char *first = rows.begin[0], *second = rows.begin[BLOCKS - 1];
    for (long i = 0; i < count; ++i, first += rows.step_bytes[0], second += rows.step_bytes[BLOCKS - 1], weights += step * TILE) {
        load_tile<4>(first, step);
        load_tile<6>(weights, 4 * TILE);
        SIGNED ? multiply_s8_tiles<0, 4, 6>() : multiply_s8_u8_tiles<0, 4, 6>();
        load_tile<7>(weights + 4 * PANEL, 4 * TILE);
        SIGNED ? multiply_s8_tiles<1, 4, 7>() : multiply_s8_u8_tiles<1, 4, 7>();
        if constexpr (BLOCKS == 2) {
            load_tile<5>(second, step);
            SIGNED ? multiply_s8_tiles<2, 5, 6>() : multiply_s8_u8_tiles<2, 5, 6>();
            SIGNED ? multiply_s8_tiles<3, 5, 7>() : multiply_s8_u8_tiles<3, 5, 7>();
        }
    }
    store_tile<0>(to[0].sums, SUM_BYTES);
    store_tile<1>(to[0].sums[0] + PANEL, SUM_BYTES);
    if constexpr (BLOCKS == 2) {
        store_tile<2>(to[1].sums, SUM_BYTES);
        store_tile<3>(to[1].sums[0] + PANEL, SUM_BYTES);
    }
}

INLINE void store_bytes(u8* to, i32v value) {
    s8v bytes = __builtin_convertvector(value, s8v);
    __builtin_memcpy(to, &bytes, sizeof bytes);
}

// Where a block's prepared rows are.
struct TileBlock {
    long first, count;
};

INLINE TileBlock tile_block(const LinearArgs& args, long block) {
    long first = block_start(args.rows, block, TILE_ROWS);
    return {first, block_start(args.rows, block + 1, TILE_ROWS) - first};
}

// Planes of prepared inputs: of `size` bytes, `step` inputs to a tile.
struct BytePlanes {
    u8* bytes;
    long rows, padded, step, size;

    // Where a row's inputs from `i` on are, a multiple of 16.
    INLINE u8* at(const BytePlanes& planes, int plane, TileBlock block, long row, long i) {
        // A step is a power of two, and dividing by a variable takes longer than the rest.
        const long inside = i & (planes.step - 1);
        return planes.bytes + planes.size * ((plane * planes.rows + block.first) * planes.padded + (i - inside) * block.count +
                                             row * planes.step + inside);
    }
};

// Rows for 8-bit weights without groups, with 16-bit inputs.
struct TiledInt8Rows {
    static constexpr long STEP = 64, CHUNK = 512;
    long in, padded;
    BytePlanes planes;
    float* scales;
    std::int32_t* sums;

    explicit TiledInt8Rows(const LinearArgs& args) : in(args.in), padded((args.in + STEP - 1) / STEP * STEP) {
        planes = {static_cast<u8*>(args.scratch), args.rows, padded, STEP, 1};
        scales = reinterpret_cast<float*>(planes.bytes + 2 * args.rows * padded);
        sums = reinterpret_cast<std::int32_t*>(scales + args.rows);
    }

    long row_bytes() const { return 2 * padded; }
    long bytes(long rows) const { return rows * (row_bytes() + 12); }

    template <class T>
    void prepare(const T* x, TileBlock block, long row) const {
        const TiledInt8Rows& own = *this;
        long place = block.first + row;
        split_inputs(x, in, padded, scales + place, sums + 2 * place, sums + 2 * place + 1, [&](long i, i32v high, i32v low) __attribute__((always_inline)) {
            store_bytes(BytePlanes::at(own.planes, 0, block, row, i), high);
            store_bytes(BytePlanes::at(own.planes, 1, block, row, i), low);
        });
    }

    static void multiply(const TiledInt8Rows& rows, const LinearArgs& args, long tile, long first, long last, float (*kept)[TILE]) {
        const u8* weight = static_cast<const u8*>(args.weight) + tile * WeightForm(args).tile_bytes(WeightForm(args).padded(args.in));
        const u8* weights = weight + TILE * sizeof(float);
        const long whole = rows.in / STEP * STEP;
        ByteSums sums[CACHED_ROWS_OF_EXPANDED / TILE_ROWS][2];
        configure_step(STEP);
        auto add = [&](const u8* from, long start, long count) {
            for (long block = first; block < last; ++block) {
                const TileBlock at = tile_block(args, block);
                TileRows<2> both;
                for (int plane = 0; plane < 2; ++plane) {
                    both.begin[plane] = reinterpret_cast<const char*>(BytePlanes::at(rows.planes, plane, at, 0, start));
                    both.step_bytes[plane] = at.count * STEP;
                }
                multiply_bytes_of_tiles<2, false>(both, from, STEP, count / STEP, start > 0, sums[block - first]);
            }
        };
        for (long start = 0; start < whole; start += CHUNK) add(weights + start * TILE, start, smaller(CHUNK, whole - start));
        if (rows.in > whole) {
            alignas(64) u8 rest[STEP * TILE] = {};
            __builtin_memcpy(rest, weights + whole * TILE, static_cast<std::size_t>((WeightForm(args).padded(args.in) - whole) * TILE));
            add(rest, whole, STEP);
        }
        for (long block = first; block < last; ++block, kept += TILE_ROWS) {
            const TileBlock at = tile_block(args, block);
            for (int vector = 0; vector < VECTORS; ++vector) {
                f32v scale = load(reinterpret_cast<const float*>(weight) + vector * LANES);
                for (long row = 0; row < at.count; ++row) {
                    const std::int32_t* inputs = rows.sums + 2 * (at.first + row);
                    f32v upper = __builtin_convertvector(ByteSums::of(sums[block - first][0], row, vector) - OFFSET * inputs[0], f32v);
                    f32v lower = __builtin_convertvector(ByteSums::of(sums[block - first][1], row, vector) - OFFSET * inputs[1], f32v);
                    store(kept[row] + vector * LANES, (256.0f * upper + lower) * scale * rows.scales[at.first + row]);
                }
            }
        }
    }
};

// Rows for weights in groups; with 8-bit weights and inputs, also without. WIDE: 16-bit inputs. FLOATS: inputs and weights are
// integers in bfloat16, whose sums are exact in float32. Tiles then add both planes, and sums need no conversion.
template <int BITS, bool IS_CODED, bool WIDE, bool FLOATS>
struct TiledGroupRows {
    // Planes of inputs, tiles with the sums of a group, and groups in tiles at once.
    static constexpr int PLANES = WIDE ? 2 : 1, TILES = WIDE && !FLOATS ? 2 : 1, UNITS = 4 / TILES;
    static constexpr long SIZE = FLOATS ? 2 : 1, CHUNK = FLOATS ? TILED_GROUP / 2 : TILED_GROUP;
    // Bytes of a panel's weights in a chunk, if panels are apart.
    static constexpr long PANEL_BYTES = TILED_GROUP * PANEL * 2;
    WeightForm form;
    long in, group, padded, num_groups;
    BytePlanes planes;
    float *input_scales, *input_sums;  // for each block [groups][rows]
    float* scales;

    explicit TiledGroupRows(const LinearArgs& args)
        : form(args), in(args.in), group(form.group ? form.group : INPUT_GROUP), padded((in + group - 1) / group * group),
          num_groups(padded / group) {
        planes = {static_cast<u8*>(args.scratch), args.rows, padded, FLOATS ? TILE_INPUTS : step_of(group), SIZE};
        scales = reinterpret_cast<float*>(planes.bytes + PLANES * SIZE * args.rows * padded);
        input_sums = scales + args.rows;
        input_scales = input_sums + args.rows * num_groups;
    }

    long row_bytes() const { return PLANES * SIZE * padded; }
    long bytes(long rows) const { return rows * (row_bytes() + 4 + num_groups * 8); }

    // Stores inputs in the order of the weights.
    INLINE void put(const BytePlanes& planes, int plane, TileBlock block, long row, long i, i32v value) {
        u8* to = BytePlanes::at(planes, plane, block, row, i);
        if constexpr (FLOATS) {
            if (WIDE && plane == 0) value *= 256;
            const i32v order = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
            const __m512i ordered = _mm512_maskz_permutexvar_epi32(0xffff, bit_cast<__m512i>(order), bit_cast<__m512i>(value));
            ::store(reinterpret_cast<bf16*>(to), __builtin_convertvector(bit_cast<i32v>(ordered), f32v));
        } else {
            store_bytes(to, value);
        }
    }

    template <class T>
    void prepare(const T* x, TileBlock block, long row) const {
        const BytePlanes own = planes;
        const long place = block.first + row;
        float *to_scales = input_scales + block.first * num_groups + row, *to_sums = input_sums + block.first * num_groups + row;
        if constexpr (WIDE) {
            std::int32_t high_sum, low_sum;
            float factor = split_inputs(x, in, padded, scales + place, &high_sum, &low_sum, [&](long i, i32v high, i32v low) __attribute__((always_inline)) {
                put(own, 0, block, row, i, high);
                put(own, 1, block, row, i, low);
            });
            if (!form.minimums) return;
            for (long number = 0; number < num_groups; ++number) {
                GroupSum sum;
                add_groups(x + number * group, in - number * group, group, group, factor, &sum, 0, 1);
                to_sums[number * block.count] = sum.sum;
            }
        } else {
            round_inputs(
                x, in, padded, group,
                [&](long i, i32v value, long) __attribute__((always_inline)) { put(own, 0, block, row, i, value); },
                [&](long number, GroupScale scale) {
                    to_scales[number * block.count] = scale.scale;
                    to_sums[number * block.count] = scale.sum;
                });
        }
    }

    // Weights of some groups, and their parameters. Signed bytes are [inputs / 4][32][4], bfloat16 is [panel][inputs / 2][16][2].
    struct Chunk {
        alignas(64) u8 weights[TILED_GROUP * TILE * SIZE];
        alignas(64) float scales[TILED_GROUP / 16][TILE], minimums[TILED_GROUP / 16][TILE];
    };

    INLINE void store(u8* to, u8v value) { __builtin_memcpy(to, &value, sizeof value); }

    void expand(const u8* tile, long first, long last, Chunk& chunk) const {
        for (long number = first; number < last; ++number) {
            u8* to = chunk.weights + (number - first) * group * (FLOATS ? PANEL * 2 : TILE);
            if (!form.group) {
                const long stored = smaller(group, form.padded(in) - number * group) * TILE;
                const u8* from = tile + TILE * sizeof(float) + number * group * TILE;
                for (long i = 0; i < group * TILE; i += 4 * LANES)
                    store(to + i, i < stored ? load_bytes(from + i) ^ static_cast<u8>(128) : u8v{});
                for (int vector = 0; vector < VECTORS; ++vector) ::store(chunk.scales[number - first] + vector * LANES, broadcast(1));
                continue;
            }
            const u8* from = tile + number * form.group_bytes();
            for (int vector = 0; vector < VECTORS; ++vector) {
                ::store(chunk.scales[number - first] + vector * LANES, group_scales(from, vector));
                if (form.minimums) ::store(chunk.minimums[number - first] + vector * LANES, group_minimums(from, vector));
            }
            from += form.parameter_bytes();
            if constexpr (FLOATS)
                expand_to_floats(from, to);
            else
                expand_to_bytes(from, to);
        }
    }

    void expand_to_bytes(const u8* from, u8* to) const {
        if constexpr (BITS == 8) {
            for (long i = 0; i < group * TILE; i += 4 * LANES) store(to + i, load_bytes(from + i) ^ static_cast<u8>(128));
            return;
        }
        const u8 zero = form.minimums || IS_CODED ? 0 : MIDDLE_OF_4_BITS;
        for (long unit = 0; unit < group / 8; ++unit, from += 4 * TILE)
            for (int part = 0; part < 2; ++part, to += 4 * TILE)
                for (int i = 0; i < VECTORS; ++i) {
                    u8v values = nibbles(load_bytes(from + i * LANES * 4), part);
                    store(to + i * LANES * 4, IS_CODED ? decode<0>(values) : values - zero);
                }
    }

    // A table of 32 numbers is indexed by the lower 5 bits of 16. Pairs have inputs 0 and 2, 1 and 3, 4 and 6, 5 and 7 of each 8.
    void expand_to_floats(const u8* from, u8* to) const {
        const float zero = form.minimums ? 0 : MIDDLE_OF_4_BITS;
        alignas(64) bf16 values[2 * LANES];
        for (int half = 0; half < 2; ++half) ::store(values + half * LANES, __builtin_convertvector(lanes_from(0), f32v) - zero);
        const __m512i table = _mm512_load_si512(values);
        for (long unit = 0; unit < group / 8; ++unit, from += 4 * TILE, to += 4 * TILE_BYTES)
            for (int panel = 0; panel < 2; ++panel) {
                const __m512i codes = bit_cast<__m512i>(load_bytes(from + panel * LANES * 4));
                u8* rows = to + panel * PANEL_BYTES;
                store(rows, bit_cast<u8v>(look_up(codes, table)));
                store(rows + TILE_BYTES, bit_cast<u8v>(look_up(_mm512_srli_epi16(codes, 8), table)));
                store(rows + 2 * TILE_BYTES, bit_cast<u8v>(look_up(_mm512_srli_epi16(codes, 4), table)));
                store(rows + 3 * TILE_BYTES, bit_cast<u8v>(look_up(_mm512_srli_epi16(codes, 12), table)));
            }
    }

    INLINE __m512i look_up(__m512i places, __m512i table) { return _mm512_maskz_permutexvar_epi16(0xffffffffu, places, table); }

    // Sums of a block and a panel.
    struct PanelSums {
        alignas(64) std::int32_t sums[TILES][TILE_ROWS][PANEL];
    };

    // Multiplies a block by a panel of the weights of one or two groups, from tile `FIRST` of sums on. Products that add to the
    // same tile do not follow each other.
    template <int FIRST, int COUNT>
    INLINE void multiply_pair(const TiledGroupRows& own, TileBlock block, const u8* weights, long number) {
        constexpr int C = FIRST, D = COUNT == 2 ? FIRST + TILES : FIRST;
        const long step = own.planes.step, row = step * SIZE, row_of_weights = FLOATS ? TILE_BYTES : 4 * TILE;
        const long next = own.group * block.count * SIZE, next_weights = own.group * (FLOATS ? PANEL * 2 : TILE);
        const u8 *high = BytePlanes::at(own.planes, 0, block, 0, number * own.group), *low = high + own.planes.rows * own.padded * SIZE;
        clear_tile<C>();
        if constexpr (TILES == 2) clear_tile<C + 1>();
        if constexpr (COUNT == 2) clear_tile<D>();
        if constexpr (COUNT == 2 && TILES == 2) clear_tile<D + 1>();
        for (long i = 0; i < own.group; i += step, high += block.count * row, low += block.count * row, weights += step * (FLOATS ? PANEL * 2 : TILE)) {
            load_tile<4>(high, row);
            load_tile<6>(weights, row_of_weights);
            FLOATS ? multiply_bf16_tiles<C, 4, 6>() : multiply_s8_tiles<C, 4, 6>();
            if constexpr (COUNT == 2) {
                load_tile<5>(high + next, row);
                load_tile<7>(weights + next_weights, row_of_weights);
                FLOATS ? multiply_bf16_tiles<D, 5, 7>() : multiply_s8_tiles<D, 5, 7>();
            }
            if constexpr (WIDE) {
                load_tile<4>(low, row);
                FLOATS ? multiply_bf16_tiles<C, 4, 6>() : multiply_s8_tiles<C + TILES - 1, 4, 6>();
            }
            if constexpr (WIDE && COUNT == 2) {
                load_tile<5>(low + next, row);
                FLOATS ? multiply_bf16_tiles<D, 5, 7>() : multiply_s8_tiles<D + TILES - 1, 5, 7>();
            }
        }
    }

    template <int UNIT>
    INLINE void store_sums(PanelSums& to) {
        store_tile<UNIT * TILES>(to.sums[0], TILE_BYTES);
        if constexpr (TILES == 2) store_tile<UNIT * TILES + TILES - 1>(to.sums[TILES - 1], TILE_BYTES);
    }

    // The same for COUNT groups, so that a tile's sums are stored while others multiply.
    template <int COUNT>
    INLINE void multiply_groups(const TiledGroupRows& own, TileBlock block, const u8* weights, long number, PanelSums* to) {
        multiply_pair<0, (COUNT < 2 ? COUNT : 2)>(own, block, weights, number);
        if constexpr (COUNT > 2) multiply_pair<2, COUNT - 2>(own, block, weights + 2 * own.group * (FLOATS ? PANEL * 2 : TILE), number + 2);
        store_sums<0>(to[0]);
        if constexpr (COUNT > 1) store_sums<1>(to[1]);
        if constexpr (COUNT > 2) store_sums<2 % UNITS>(to[2]);
        if constexpr (COUNT > 3) store_sums<3 % UNITS>(to[3]);
    }

    INLINE f32v sum_of(const PanelSums& from, long row) {
        f32v first = load(reinterpret_cast<const float*>(from.sums[0][row]));
        if constexpr (FLOATS) return first;
        if constexpr (!WIDE) return __builtin_convertvector(bit_cast<i32v>(first), f32v);
        return __builtin_convertvector(bit_cast<i32v>(first) * 256 + bit_cast<i32v>(load(reinterpret_cast<const float*>(from.sums[TILES - 1][row]))), f32v);
    }

    // Adds the matmul of a block with groups `from` to `to` of a panel to `kept`. Totals stay in registers.
    template <bool MINIMUMS>
    void add_groups_of(const Chunk& chunk, long from, long to, TileBlock block, int panel, float (*kept)[TILE]) const {
        f32v totals[TILE_ROWS];
#pragma GCC unroll 16
        for (long row = 0; row < TILE_ROWS; ++row) totals[row] = load(kept[row] + panel * PANEL);
        const u8* weights = chunk.weights + panel * (FLOATS ? PANEL_BYTES : 4 * PANEL);
        PanelSums sums[2][UNITS];
        auto add = [&](long number, const PanelSums& own) __attribute__((always_inline)) {
            const f32v scale = load(chunk.scales[number - from] + panel * PANEL), minimum = load(chunk.minimums[number - from] + panel * PANEL);
            const float* scales = input_scales + block.first * num_groups + number * block.count;
            const float* of_inputs = input_sums + block.first * num_groups + number * block.count;
#pragma GCC unroll 16
            for (long row = 0; row < TILE_ROWS; ++row) {
                if constexpr (WIDE)
                    totals[row] += sum_of(own, row) * scale;
                else
                    totals[row] += sum_of(own, row) * (scale * scales[row]);
                if constexpr (MINIMUMS) totals[row] += minimum * of_inputs[row];
            }
        };
        // Sums are added after the next groups are multiplied: vectors are loaded late from what a tile has just stored.
        for (long next = from, turn = 0; next < to + UNITS; next += UNITS, turn ^= 1) {
            if (next < to)
                with_rows<UNITS>(to - next, [&](auto count) __attribute__((always_inline)) {
                    multiply_groups<decltype(count)::value>(*this, block, weights + (next - from) * group * (FLOATS ? PANEL * 2 : TILE), next, sums[turn]);
                });
            if (next > from)
                for (long number = next - UNITS; number < smaller(next, to); ++number) add(number, sums[turn ^ 1][number - next + UNITS]);
        }
#pragma GCC unroll 16
        for (long row = 0; row < TILE_ROWS; ++row) ::store(kept[row] + panel * PANEL, totals[row]);
    }

    static void multiply(const TiledGroupRows& rows, const LinearArgs& args, long tile, long first, long last, float (*kept)[TILE]) {
        const u8* weight = static_cast<const u8*>(args.weight) + tile * rows.form.tile_bytes(rows.form.padded(rows.in));
        const long at_once = larger(1, CHUNK / rows.group);
        __builtin_memset(kept, 0, static_cast<std::size_t>((last - first) * TILE_ROWS) * sizeof *kept);
        configure_step(FLOATS ? 64 : rows.planes.step);
        Chunk chunk;
        for (long number = 0; number < rows.num_groups; number += at_once) {
            const long end = smaller(number + at_once, rows.num_groups);
            rows.expand(weight, number, end, chunk);
            for (long block = first; block < last; ++block)
                for (int panel = 0; panel < 2; ++panel) {
                    float(*totals)[TILE] = kept + (block - first) * TILE_ROWS;
                    if (rows.form.minimums)
                        rows.template add_groups_of<true>(chunk, number, end, tile_block(args, block), panel, totals);
                    else
                        rows.template add_groups_of<false>(chunk, number, end, tile_block(args, block), panel, totals);
                }
        }
        for (long block = first; block < last; ++block, kept += TILE_ROWS) {
            const TileBlock at = tile_block(args, block);
            for (long row = 0; row < at.count; ++row)
                for (int vector = 0; vector < VECTORS; ++vector) {
                    float* place = kept[row] + vector * LANES;
                    if (WIDE)
                        ::store(place, load(place) * rows.scales[at.first + row]);
                    else if (!rows.form.group)
                        ::store(place, load(place) * load(reinterpret_cast<const float*>(weight) + vector * LANES));
                }
        }
    }
};

// Matmuls with such rows.
template <class Rows>
struct TiledProduct {
    static constexpr int BLOCK = TILE_ROWS;
    static constexpr long ROWS = CACHED_ROWS_OF_EXPANDED;

    static long row_bytes(const LinearArgs& args) { return Rows(args).row_bytes(); }

    static void prepare(const LinearArgs& args, long block) {
        args.dtype == FLOAT32 ? prepare_rows<float>(args, block) : prepare_rows<bf16>(args, block);
    }

    static void multiply(const LinearArgs& args, long tile, long first, long last) {
        const Rows rows(args);
        alignas(64) float kept[ROWS][TILE];
        Rows::multiply(rows, args, tile, first, last, kept);
        for (long block = first; block < last; ++block) {
            const TileBlock at = tile_block(args, block);
            prefetch_factors(args, tile, block - first, last - first);
            finish_rows(args, at.first, at.first + at.count, tile, kept + (block - first) * TILE_ROWS);
        }
    }

private:
    template <class T>
    INLINE void prepare_rows(const LinearArgs& args, long block) {
        const Rows rows(args);
        const TileBlock at = tile_block(args, block);
        for (long row = 0; row < at.count; ++row)
            rows.prepare(static_cast<const T*>(args.x) + source_row(args, at.first + row) * args.x_stride, at, row);
    }
};

}  // namespace

#endif
