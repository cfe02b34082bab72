// Attention of a vision tower by matrix tiles, with the dtype bfloat16.
#pragma once

#include "attention_tiles.h"

#if defined(AMX)

namespace {

// With fewer tokens, most of a block's rows and columns would be padding.
constexpr long TILED_LENGTH = 24;

INLINE bool is_tiled(const EncoderAttentionArgs& args) { return args.dtype == BFLOAT16 && args.length >= TILED_LENGTH; }

// One thread's part of the scratch: a head's keys and values, and the data of a block of queries.
struct EncoderTiles {
    bf16 *keys, *values, *query;
    float *totals, *sums, *highest;
    TiledScores* scores;

    EncoderTiles(const EncoderAttentionArgs& args, long thread) {
        lay_out(args, static_cast<char*>(args.scratch) + thread * bytes(args));
    }
    static long bytes(const EncoderAttentionArgs& args) { return EncoderTiles().lay_out(args, nullptr); }

private:
    EncoderTiles() = default;

    // Places the arrays in `memory`, unless it is null. Returns their bytes.
    long lay_out(const EncoderAttentionArgs& args, char* memory) {
        long end = 0;
        auto take = [&](auto*& place, long count) {
            place = memory ? reinterpret_cast<decltype(+place)>(memory + end) : nullptr;
            end += cache_lines(count * static_cast<long>(sizeof *place));
        };
        const long tokens = (args.length + TILED_STEP - 1) / TILED_STEP * TILED_STEP;
        const long size = tiled_units(args.head_size) * TILED_STEP, columns = tiled_columns(args.head_size) * TILE_ROWS;
        take(keys, tokens * size);
        take(values, tokens * columns);
        take(query, TILED_BLOCK_ROWS * size);
        take(totals, TILED_BLOCK_ROWS * columns);
        take(sums, TILED_BLOCK_ROWS * LANES);
        take(highest, TILED_BLOCK_ROWS);
        take(scores, 1);
        return end;
    }
};

class TiledEncoder {
public:
    TiledEncoder(const EncoderAttentionArgs& all, long thread) : args(all), own(all, thread) {}

    // The queries `first <= query < last` of a head.
    void attend(long image, long head, long first, long last) {
        qkv = static_cast<const bf16*>(args.qkv) + image * args.length * 3 * width + head * args.head_size;
        // Query `args.first` has the first row of the output.
        y = static_cast<bf16*>(args.y) + (image * (args.last - args.first) - args.first) * width + head * args.head_size;
        for (long token = 0; token < steps * TILED_STEP; token += TILE_ROWS) tile_keys(token);
        for (long token = 0; token < steps * TILED_STEP; token += 2) tile_values(token);
        const Tiles configured;
        for (; first < last; first += TILED_BLOCK_ROWS) attend_block(first, smaller(TILED_BLOCK_ROWS, last - first));
    }

private:
    const EncoderAttentionArgs& args;
    const EncoderTiles own;
    const long width = args.heads * args.head_size, steps = (args.length + TILED_STEP - 1) / TILED_STEP;
    const long units = tiled_units(args.head_size), columns = tiled_columns(args.head_size);
    const bf16* qkv = nullptr;  // of the current head
    bf16* y = nullptr;

    // Tokens `first` to `first` + 15, with zeros after the last token and after the head's elements.
    void tile_keys(long first) {
        for (long unit = 0; unit < units; ++unit) {
            const long count = smaller(TILED_STEP, args.head_size - unit * TILED_STEP);
            u32v rows[TILE_ROWS];
            for (long i = 0; i < TILE_ROWS; ++i) {
                const bf16* from = qkv + (first + i) * 3 * width + width + unit * TILED_STEP;
                rows[i] = u32v{};
                if (first + i >= args.length) continue;
                if (count == TILED_STEP)
                    __builtin_memcpy(&rows[i], from, sizeof rows[i]);
                else
                    __builtin_memcpy(&rows[i], from, static_cast<std::size_t>(count) * sizeof *from);
            }
            transpose(rows);
            __builtin_memcpy(own.keys + (first / TILE_ROWS * units + unit) * TILE_ELEMENTS, rows, sizeof rows);
        }
    }

    // A pair of tokens, likewise.
    void tile_values(long token) {
        const bf16* from = qkv + token * 3 * width + 2 * width;
        bf16* to = own.values + token / TILED_STEP * columns * TILE_ELEMENTS + token % TILED_STEP / 2 * TILED_STEP;
        for (long column = 0; column < args.head_size; column += LANES, to += TILE_ELEMENTS) {
            const long count = smaller(LANES, args.head_size - column);
            const f32v first = token < args.length ? load_some(from + column, count) : f32v{};
            const f32v second = token + 1 < args.length ? load_some(from + column + 3 * width, count) : f32v{};
            const u32v pairs = bit_cast<u32v>(first) >> 16 | bit_cast<u32v>(second);
            __builtin_memcpy(to, &pairs, sizeof pairs);
        }
    }

    void attend_block(long first, long rows) {
        for (long row = 0; row < rows; ++row) {
            tile_query(qkv + (first + row) * 3 * width, args.head_size, row, own.query);
            for (long i = 0; i < columns * TILE_ROWS; i += LANES) store(own.totals + row * columns * TILE_ROWS + i, f32v{});
            store(own.sums + row * LANES, f32v{});
            own.highest[row] = NO_SCORE;
        }
        const TiledBlock block{own.query, own.totals, own.sums, own.highest, rows};
        for (long step = 0; step < steps; step += TILED_STEPS) {
            TiledChunk chunk;
            chunk.steps = smaller(TILED_STEPS, steps - step);
            for (long i = 0; i < chunk.steps; ++i) chunk.values[i] = own.values + (step + i) * columns * TILE_ELEMENTS;
            for (long i = 0; i < 2 * chunk.steps; ++i) chunk.keys[i] = own.keys + (2 * step + i) * units * TILE_ELEMENTS;
            const long tokens = args.length - step * TILED_STEP;
            const WholeVectors whole{0, smaller(2 * chunk.steps, tokens / LANES)};
            auto hide = [&](long i, f32v score) __attribute__((always_inline)) {
                return choose(lanes_from(i * LANES) < static_cast<std::int32_t>(tokens), score, broadcast(-__builtin_inff()));
            };
            meet_tiles<true>(block, chunk, units, columns, *own.scores, [&](long row) __attribute__((always_inline)) {
                float* scores = own.scores->rows[row];
                auto convert = [&](long i, f32v exponents) __attribute__((always_inline)) {
                    const f32v p = rounded_to_bf16(tiled_power(exponents));
                    store(reinterpret_cast<bf16*>(scores) + i * LANES, p);
                    return p;
                };
                return weigh_tiled<false>(scores, own.sums + row * LANES, own.highest[row], chunk.steps, whole, args.scale * LOG2_E, hide,
                                          convert);
            });
        }
        for (long row = 0; row < rows; ++row) {
            const float share = 1.0f / sum(load(own.sums + row * LANES));
            for (long i = 0; i < args.head_size; i += LANES)
                store_some(y + (first + row) * width + i, load(own.totals + row * columns * TILE_ROWS + i) * share,
                           smaller(LANES, args.head_size - i));
        }
    }
};

}  // namespace

#endif
