// Divides a step's attention into items for the threads.
#pragma once

#include "amx.h"
#include "attention_formats.h"
#include "linear.h"
#include "table.h"

namespace {

// Tokens of a tile.
constexpr long TOKENS = 16;
constexpr int TOKEN_VECTORS = TOKENS / LANES;
// Tiles of a chunk. Chunks start at multiples of this in a sequence. Each has a result of its own, and results are added in
// order, so that a row's result depends neither on the rows beside it nor on splits.
constexpr long CHUNK_TILES = 16;

// Rows of an item: several blocks of rows read a chunk of keys and values while it is cached. Expanded chunks serve more rows.
constexpr long ITEM_ROWS = EXPANDS_BFLOAT16 ? 96 : 48;
// Rows of an item that matrix tiles compute, and whether they compute items of more than `few_rows`.
constexpr long TILED_ITEM_ROWS = 128;
INLINE bool is_tiled([[maybe_unused]] const AttentionArgs& args) {
#if defined(AMX)
    return args.dtype == BFLOAT16;
#else
    return false;
#endif
}
// Up to this many rows, an item has several heads, which are adjacent in a block: long runs of memory are read faster.
INLINE long few_rows(const AttentionArgs& args) { return is_tiled(args) ? 8 : 12; }
// Cost of reading a tile, in rows computed with it.
constexpr long TILE_COST = 4;
// Smaller splits cost more to merge than they save.
constexpr long SPLIT_COST = 16 * (TILE_COST + 3);
// Minimum items per thread, so that threads end at about the same time.
constexpr long ITEMS_PER_THREAD = 4;

// Derived sizes, and the places of a sequence's tokens.
struct Geometry {
    long group, columns, tiles_per_block, key_tile, value_tile;

    explicit Geometry(const AttentionArgs& args)
        : group(args.heads / args.kv_heads),
          columns((args.head_size + TOKENS - 1) / TOKENS * TOKENS),
          tiles_per_block((args.block_size + TOKENS - 1) / TOKENS),
          key_tile(args.head_size * TOKENS),
          value_tile(columns * TOKENS) {}

    long tile_of(const AttentionArgs& args, long position) const {
        return position / args.block_size * tiles_per_block + position % args.block_size / TOKENS;
    }
};

// Rows `first_row <= row < first_row + rows` of a sequence, for each of some KV heads, against tiles `low <= tile < high`. It
// is one of `splits` adjacent splits; if there are several, `partial` is the place of its chunks' results in the scratch, in
// floats.
struct Item {
    long sequence, kv_head, heads, first_row, rows, low, high, splits, partial;

    long all_rows() const { return heads * rows; }
    long chunks() const { return (high - 1) / CHUNK_TILES - low / CHUNK_TILES + 1; }
    long end_of_chunk(long tile) const { return smaller(high, (tile / CHUNK_TILES + 1) * CHUNK_TILES); }
};

struct Plan {
    long items = 0, partials = 0, cost = 0;
    bool split = false;
};

INLINE long new_tokens(const AttentionArgs& args, long sequence) {
    return args.query_starts[sequence + 1] - args.query_starts[sequence];
}

// Position of a row's token.
INLINE long position_of(const AttentionArgs& args, const Geometry& at, long sequence, long row) {
    return args.context_lens[sequence] - new_tokens(args, sequence) + row / at.group;
}

// First position that a row sees, if its last one is `position`.
INLINE long first_visible(const AttentionArgs& args, long sequence, long position) {
    if (args.window <= 0) return 0;
    if (args.ahead) position -= args.ahead[sequence];
    return larger(0, position - args.window + 1);
}

// Visits all items before splitting, roughly the largest first: prompts come last in a batch, and their last rows see most.
// parts_wanted: minimum of chunks and groups of heads that threads can share, for each sequence.
template <class Visit>
INLINE void each_item(const AttentionArgs& args, const Geometry& at, long parts_wanted, Visit visit) {
    const long most_rows = is_tiled(args) ? TILED_ITEM_ROWS : ITEM_ROWS;
    for (long sequence = args.sequences - 1; sequence >= 0; --sequence) {
        long rows = new_tokens(args, sequence) * at.group, parts = (rows + most_rows - 1) / most_rows;
        long most_heads = rows <= few_rows(args) ? ITEM_ROWS / rows : 1;
        long chunks = (args.context_lens[sequence] + CHUNK_TILES * TOKENS - 1) / (CHUNK_TILES * TOKENS);
        long wanted = smaller(args.kv_heads, (parts_wanted + chunks - 1) / chunks);
        long head_groups = larger((args.kv_heads + most_heads - 1) / most_heads, wanted);
        for (long group = 0; group < head_groups; ++group) {
            long kv_head = args.kv_heads * group / head_groups;
            long heads = args.kv_heads * (group + 1) / head_groups - kv_head;
            for (long part = parts - 1; part >= 0; --part) {
                long first = rows * part / parts, last = rows * (part + 1) / parts;
                long low = at.tile_of(args, first_visible(args, sequence, position_of(args, at, sequence, first)));
                long high = at.tile_of(args, position_of(args, at, sequence, last - 1)) + 1;
                visit(Item{sequence, kv_head, heads, first, last - first, low, high, 1, 0});
            }
        }
    }
}

INLINE long cost_of(const Item& item) { return (item.high - item.low) * (item.rows + TILE_COST) * item.heads; }

INLINE long partial_floats(const Geometry& at, long rows) { return (rows * (at.columns + 2) + TOKENS - 1) / TOKENS * TOKENS; }

// Splits items that are too long for one thread. Writes them to `items` unless that is null.
INLINE Plan plan_items(const AttentionArgs& args, const Geometry& at, Item* items) {
    Plan plan;
    each_item(args, at, 1, [&](const Item& item) { plan.cost += cost_of(item); });
    long most = larger(SPLIT_COST, plan.cost / (args.threads * ITEMS_PER_THREAD));
    long wanted = plan.cost < 2 * SPLIT_COST ? 1 : (args.threads + args.sequences - 1) / args.sequences;
    each_item(args, at, wanted, [&](Item item) {
        long low = item.low, high = item.high, start = low / CHUNK_TILES, chunks = item.chunks();
        item.splits = smaller(chunks, (cost_of(item) + most - 1) / most);
        // Hardly longer items stay whole.
        if (cost_of(item) < 2 * most) item.splits = 1;
        for (long split = 0; split < item.splits; ++split) {
            item.low = larger(low, (start + chunks * split / item.splits) * CHUNK_TILES);
            item.high = smaller(high, (start + chunks * (split + 1) / item.splits) * CHUNK_TILES);
            item.partial = plan.partials;
            if (items) items[plan.items] = item;
            ++plan.items;
            if (item.splits > 1) {
                plan.partials += item.chunks() * partial_floats(at, item.all_rows());
                plan.split = true;
            }
        }
    });
    return plan;
}

}  // namespace
