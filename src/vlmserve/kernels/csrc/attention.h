// Paged attention: writes new keys and values to their slots, then attends.
//
// A block holds tiles of 16 tokens per head. Key tiles are [head_size / pair][16][pair], so that vector lanes are tokens, and a
// broadcast query gives scores without horizontal sums. Value tiles are [16 / pair][columns][pair], with head_size rounded up
// to 16 columns. If the block size is no multiple of 16, the last tile has unused tokens. Quantized keys and values are bytes
// in the same places, always in pairs. Each tile then has scales [2][16]: quantized = round(x / scale), with the largest
// element of a token's head at 127.
//
// Query heads that share a KV head are rows of one matrix, row = token * group + head of the group, so decodes and prompts are
// the same work: rows against a range of tiles. Scores are kept for CHUNK tokens at a time, with a maximum and a sum for each
// chunk (https://arxiv.org/abs/2205.14135). Chunks are added in order. Ranges too long for one thread are split between chunks.
// Scores include the factor log2(e), so that weights are powers of two.
#pragma once

#include "attention_chunk.h"
#include "attention_few_rows.h"
#include "attention_formats.h"
#include "attention_plan.h"
#include "attention_rows.h"
#include "attention_tiled_items.h"
#include "linear.h"
#include "threads.h"

namespace {

// Rows that meet keys and values.
template <class Met>
struct MetRows : Results {
    float* query_scales;          // [rows]
    typename Met::Input* query;  // blocks of rows, each [units][rows of the block]

    MetRows(const Geometry& at, float* memory)
        : Results(at, ITEM_ROWS, memory),
          query_scales(memory + floats(at, ITEM_ROWS)),
          query(reinterpret_cast<typename Met::Input*>(query_scales + ITEM_ROWS)) {}
};

// One thread's part of the scratch.
template <class Format>
struct Workspace : MetRows<typename Format::Met> {
    float* expanded;  // keys and values of a chunk, if the format differs from the cache's

    static long expanded_floats(const Geometry& at) {
        return Format::EXPANDED ? CHUNK_TILES * (at.key_tile + at.value_tile) : 0;
    }

    static long bytes(const AttentionArgs& args) {
        Geometry at(args);
        long floats = expanded_floats(at) + Results::floats(at, ITEM_ROWS) + ITEM_ROWS;
        long inputs = ITEM_ROWS * (args.head_size / Format::PAIR);
        return inputs * static_cast<long>(sizeof(typename Format::Input)) + floats * static_cast<long>(sizeof(float));
    }

    Workspace(const Geometry& at, char* memory)
        : MetRows<typename Format::Met>(at, reinterpret_cast<float*>(memory) + expanded_floats(at)),
          expanded(reinterpret_cast<float*>(memory)) {}
};

INLINE long item_bytes(const Plan& plan) { return cache_lines(plan.items * static_cast<long>(sizeof(Item))); }

// Calls `work` with the format of queries and cache.
template <class Work>
INLINE auto with_format(const AttentionArgs& args, Work work) {
    if (args.scales) return args.dtype == FLOAT32 ? work(Quantized<float>{}) : work(Quantized<bf16>{});
    return args.dtype == FLOAT32 ? work(Unquantized<Float32>{}) : work(Unquantized<BFloat16>{});
}

// Whether items of many rows compute in `Expanded` instead of their format.
template <class Format>
constexpr bool MAY_EXPAND = EXPANDS_BFLOAT16 && sizeof(typename Format::Stored) == sizeof(bf16);

template <class Format>
INLINE long space_bytes(const AttentionArgs& args) {
    long bytes = Workspace<Format>::bytes(args);
    if constexpr (MAY_EXPAND<Format>) bytes = larger(bytes, Workspace<Expanded>::bytes(args));
#if defined(AMX)
    if (is_tiled(args)) {
        bytes = larger(bytes, TiledWorkspace::bytes(args));
        bytes = larger(bytes, Workspace<FewRows>::bytes(args));
    }
#endif
    return cache_lines(bytes);
}

// Scratch bytes in addition to the items.
long attention_memory(const AttentionArgs& args, const Plan& plan) {
    long own = with_format(args, [&](auto format) { return space_bytes<decltype(format)>(args); });
    return plan.partials * static_cast<long>(sizeof(float)) + args.threads * own;
}

long attention_scratch(const AttentionArgs& args, long* work) {
    Plan plan = plan_items(args, Geometry(args), nullptr);
    *work = plan.cost * args.head_size * 2;
    return item_bytes(plan) + attention_memory(args, plan);
}

// Writes a token's key and value of one head to its slot.
template <class Format>
void append(const AttentionArgs& args, const Geometry& at, long token, long head) {
    typedef typename Format::Element Element;
    typedef typename Format::Stored Stored;
    constexpr long PAIR = Format::PAIR;
    Element buffer[MAX_HEAD_SIZE];
    long slot = args.slots[token], block = slot / args.block_size, offset = slot % args.block_size;
    long tile = (block * args.kv_heads + head) * at.tiles_per_block + offset / TOKENS, lane = offset % TOKENS;

    auto place = [&](const Stored* key, const Stored* value) __attribute__((always_inline)) {
        Stored* keys = static_cast<Stored*>(args.keys) + tile * at.key_tile + lane * PAIR;
        for (long unit = 0; unit < args.head_size / PAIR; ++unit)
            __builtin_memcpy(keys + unit * TOKENS * PAIR, key + unit * PAIR, PAIR * sizeof(Stored));
        Stored* values =
            static_cast<Stored*>(args.values) + tile * at.value_tile + lane / PAIR * at.columns * PAIR + lane % PAIR;
        for (long i = 0; i < args.head_size; ++i) values[i * PAIR] = value[i];
    };
    const Element* key = static_cast<const Element*>(args.key) + token * args.key_stride + head * args.head_size;
    const Element* value = static_cast<const Element*>(args.value) + token * args.value_stride + head * args.head_size;
    key = rotated(args, key, token, buffer);
    if constexpr (Format::QUANTIZED) {
        Stored keys[MAX_HEAD_SIZE], values[MAX_HEAD_SIZE];
        float* scales = args.scales + tile * TILE_SCALES + lane;
        scales[KEY_SCALES] = quantize_row(key, args.head_size, keys);
        scales[VALUE_SCALES] = quantize_row(value, args.head_size, values);
        place(keys, values);
    } else {
        place(key, value);
    }
}

// Packs an item's rotated queries of one KV head as [units][rows of the block] per block of rows.
template <class Format>
void arrange_queries(const AttentionArgs& args, const Geometry& at, const Item& item, long kv_head,
                     typename Format::Input* to, float* scales) {
    typedef typename Format::Element Element;
    Element buffer[MAX_HEAD_SIZE];
    long units = args.head_size / Format::PAIR;
    for (long block = 0; block < num_blocks(item.rows, Format::BLOCK); ++block) {
        long first = block_start(item.rows, block, Format::BLOCK), count = block_start(item.rows, block + 1, Format::BLOCK) - first;
        for (long i = 0; i < count; ++i) {
            long row = item.first_row + first + i, token = args.query_starts[item.sequence] + row / at.group;
            long head = kv_head * at.group + row % at.group;
            const Element* query = static_cast<const Element*>(args.query) + token * args.query_stride + head * args.head_size;
            query = rotated(args, query, token, buffer);
            scales[first + i] = Format::arrange(query, args.head_size, to + first * units + i, count);
        }
    }
}

// Attends rows of one head to the tiles `chunk <= tile < end`. later: the next tiles, to prefetch.
template <class Format>
void attend_tiles(const AttentionArgs& args, const Geometry& at, const Item& item, const MetRows<Format>& space, long row,
                  long chunk, long end, const Tile<Format>* tiles, const Tile<Format>* later, long num_later) {
    long units = args.head_size / Format::PAIR, before = position_of(args, at, item.sequence, 0);
    for (long block = 0; block < num_blocks(item.rows, Format::BLOCK); ++block) {
        long first = block_start(item.rows, block, Format::BLOCK), rows = block_start(item.rows, block + 1, Format::BLOCK) - first;
        long oldest = first_visible(args, item.sequence, before + (item.first_row + first) / at.group);
        long newest = before + (item.first_row + first + rows - 1) / at.group;
        long from = larger(chunk, at.tile_of(args, oldest)), to = smaller(end, at.tile_of(args, newest) + 1);
        if (Format::TILED) from = from / 2 * 2;
        if (from >= to) continue;
        long place = row + first;
        Meeting<Format> meeting{args, at, space.query + place * units, tiles + (from - chunk), to - from, later, num_later,
                                item.sequence, before, item.first_row + first, space.totals + place * at.columns,
                                space.sums + place * LANES, space.highest + place, space.query_scales + place};
        with_rows<Format::BLOCK>(rows, [&](auto count) { meet<decltype(count)::value>(meeting); });
    }
}

// The same with tiles in the cache's layout.
template <class Format>
INLINE void attend_chunk(const AttentionArgs& args, const Geometry& at, const Item& item, const Workspace<Format>& space,
                         long row, long chunk, long end, const Tile<typename Format::Storage>* tiles,
                         const Tile<typename Format::Storage>* later, long num_later) {
    if constexpr (Format::EXPANDED) {
        Tile<typename Format::Met> expanded[CHUNK_TILES];
        for (long i = 0; i < end - chunk; ++i) {
            float* keys = space.expanded + i * (at.key_tile + at.value_tile);
            float* values = keys + at.key_tile;
            expand_pairs(tiles[i].keys, args.head_size / 2, TOKENS, keys);
            expand_pairs(tiles[i].values, TOKENS / 2, at.columns, values);
            expanded[i] = {keys, values, nullptr, tiles[i].start, tiles[i].tokens};
        }
        attend_tiles<typename Format::Met>(args, at, item, space, row, chunk, end, expanded, expanded, 1);
    } else {
        attend_tiles<typename Format::Met>(args, at, item, space, row, chunk, end, tiles, later, num_later);
    }
}

// partial: where the chunks' results go; null: write the output.
template <class Format>
void attend_item(const AttentionArgs& args, const Geometry& at, const Item& item, Workspace<Format> space, float* partial) {
    typedef typename Format::Element Element;
    long units = args.head_size / Format::PAIR;
    for (long head = 0; head < item.heads; ++head)
        arrange_queries<Format>(args, at, item, item.kv_head + head, space.query + head * item.rows * units,
                                space.query_scales + head * item.rows);
    Chunks<Element> chunks{args, at, item, space, partial};
    chunks.begin();

    Tile<typename Format::Storage> tiles[2][CHUNK_TILES];
    int now = 0;
    long end = item.end_of_chunk(item.low), low = Format::Met::TILED ? item.low / 2 * 2 : item.low;
    find_tiles(args, at, item, item.kv_head, low, end, tiles[now]);
    for (long chunk = low, head = 0; chunk < item.high; now = 1 - now) {
        // The next head's part of this chunk, or the first head's part of the next.
        bool last_head = head + 1 == item.heads;
        long next_head = last_head ? 0 : head + 1, next = last_head ? end : chunk;
        long next_end = item.end_of_chunk(next), num_later = next_end - next;
        find_tiles(args, at, item, item.kv_head + next_head, next, next_end, tiles[1 - now]);
        // At the end, prefetch something already loaded.
        const auto* later = num_later > 0 ? tiles[1 - now] : tiles[now];
        if (head == 0) chunks.begin_chunk();
        attend_chunk<Format>(args, at, item, space, head * item.rows, chunk, end, tiles[now], later, larger(num_later, 1));
        if (last_head) chunks.end_chunk();
        head = next_head;
        chunk = next;
        end = next_end;
    }
    chunks.end();
}

// Adds the results of all chunks of an item. splits: the first of its splits.
template <class Element>
void merge_splits(const AttentionArgs& args, const Geometry& at, const Item* splits, float* partials) {
    const Item& item = splits[0];
    long size = partial_floats(at, item.all_rows()), chunks = 0;
    for (long split = 0; split < item.splits; ++split) chunks += splits[split].chunks();
    float* first = partials + item.partial;
    for (long row = 0; row < item.all_rows(); ++row) {
        long place = item.all_rows() * at.columns + row;
        float highest = first[place], weight = first[place + item.all_rows()], *totals = first + row * at.columns;
        for (const float* other = first + size; other < first + chunks * size; other += size)
            add_chunk(at, totals, highest, weight, other + row * at.columns, other[place], other[place + item.all_rows()]);
        write_row<Element>(args, at, item, row, totals, 1.0f / weight);
    }
}

// memory: `attention_memory` bytes.
template <class Format>
void attend_with(const AttentionArgs& args, const Plan& plan, const Item* items, char* memory) {
    Geometry at(args);
    auto* partials = reinterpret_cast<float*>(memory);
    char* spaces = memory + plan.partials * static_cast<long>(sizeof(float));
    if (args.key) each_range(args.threads, args.tokens * args.kv_heads, 4 * args.head_size, [&](long first, long last, int) {
        for (long i = first; i < last; ++i) append<Format>(args, at, i / args.kv_heads, i % args.kv_heads);
    });
    auto attend_to = [&](long i, int thread) {
        char* own = spaces + thread * space_bytes<Format>(args);
        float* partial = items[i].splits > 1 ? partials + items[i].partial : nullptr;
#if defined(AMX)
        if constexpr (sizeof(typename Format::Element) == sizeof(bf16)) {
            if (items[i].rows > few_rows(args)) return attend_tiled_item<Format>(args, at, items[i], own, partial);
            if constexpr (!Format::QUANTIZED)
                return attend_item<FewRows>(args, at, items[i], Workspace<FewRows>(at, own), partial);
        }
#endif
        if constexpr (MAY_EXPAND<Format>)
            if (items[i].rows > few_rows(args))
                return attend_item<Expanded>(args, at, items[i], Workspace<Expanded>(at, own), partial);
        attend_item<Format>(args, at, items[i], Workspace<Format>(at, own), partial);
    };
    each_in_turn(plan.cost < SPLIT_COST ? 1 : args.threads, plan.items, attend_to);
    if (!plan.split) return;
    auto merge = [&](long i, int) {
        // The first split of an item follows no split of the same rows.
        const Item &item = items[i], &other = items[i > 0 ? i - 1 : 0];
        bool first = i == 0 || item.sequence != other.sequence || item.kv_head != other.kv_head ||
                     item.first_row != other.first_row;
        if (item.splits > 1 && first) merge_splits<typename Format::Element>(args, at, &item, partials);
    };
    each_in_turn(args.threads, plan.items, merge);
}

void attend(const AttentionArgs& args, const Plan& plan, const Item* items, char* memory) {
    with_format(args, [&](auto format) { attend_with<decltype(format)>(args, plan, items, memory); });
}

void attention(const AttentionArgs& args) {
    auto* items = static_cast<Item*>(args.scratch);
    Plan plan = plan_items(args, Geometry(args), items);
    char* memory = static_cast<char*>(args.scratch) + item_bytes(plan);
    attend(args, plan, items, memory);
}

}  // namespace
