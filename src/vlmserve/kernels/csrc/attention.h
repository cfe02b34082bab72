// Paged attention: new keys and values go into their slots, then queries meet all that they can see.
//
// A block holds, for each head, tiles of 16 tokens. A tile of keys lies as [head_size / pair][16][pair], so that the lanes
// of a vector are tokens and a broadcast query gives scores without sums across lanes; one of values lies as
// [16 / pair][columns][pair], columns being head_size rounded up to 16. A block size that is no multiple of 16 leaves
// tokens of its last tile unused.
//
// The query heads that share a head of keys are rows of one matrix, row = token * group + head of the group, so that
// decodes and prompts are the same work: some rows against a range of tiles. Scores are kept for CHUNK tokens at a time,
// with a running maximum and sum (https://arxiv.org/abs/2205.14135). A range that is too long for one thread is cut, and
// the pieces are merged by their maxima and sums. Scores carry a factor of log2(e), so that weights are powers of two.
#pragma once

#include "attention_plan.h"
#include "linear.h"
#include "threads.h"

namespace {

constexpr long CHUNK_TILES = 16;
constexpr long CHUNK = CHUNK_TILES * TOKENS;
constexpr float LOWEST = -3.0e38f;

// Weights as `Format::Input`s: pairs of bfloat16 where the processor multiplies such pairs, else floats.
INLINE void store_probabilities(float* to, f32v p) { store(to, p); }
INLINE void store_probabilities(std::uint32_t* to, f32v p) { store(reinterpret_cast<bf16*>(to), p); }
template <class Pair>
INLINE void store_probabilities(Pair* to, f32v p) {
    store(to->values, p);
}

// One thread's part of the scratch.
template <class Format>
struct Workspace {
    typename Format::Input* query;  // blocks of rows, [units][rows of the block] each
    float *totals, *sums, *highest;  // [rows][columns], [rows][LANES], [rows]

    static long bytes(const AttentionArgs& args) {
        Geometry at(args);
        long floats = ITEM_ROWS * (at.columns + LANES + 1);
        long inputs = ITEM_ROWS * (args.head_size / Format::PAIR);
        return inputs * static_cast<long>(sizeof(typename Format::Input)) + floats * static_cast<long>(sizeof(float));
    }

    Workspace(const Geometry& at, char* memory) {
        totals = reinterpret_cast<float*>(memory);
        sums = totals + ITEM_ROWS * at.columns;
        highest = sums + ITEM_ROWS * LANES;
        query = reinterpret_cast<typename Format::Input*>(highest + ITEM_ROWS);
    }
};

INLINE long item_bytes(const Plan& plan) { return cache_lines(plan.items * static_cast<long>(sizeof(Item))); }

// What the threads need beside the items.
long attention_memory(const AttentionArgs& args, const Plan& plan) {
    long own = args.dtype == FLOAT32 ? Workspace<Float32>::bytes(args) : Workspace<BFloat16>::bytes(args);
    return plan.partials * static_cast<long>(sizeof(float)) + args.threads * cache_lines(own);
}

long attention_scratch(const AttentionArgs& args, long* work) {
    Plan plan = plan_items(args, Geometry(args), nullptr);
    *work = plan.cost * args.head_size * 2;
    return item_bytes(plan) + attention_memory(args, plan);
}

// One head of a token with its rotary position applied: `row` itself if there is none, else `buffer`.
template <class Element>
INLINE const Element* turned(const AttentionArgs& args, const Element* row, long token, Element* buffer) {
    if (!args.cos) return row;
    long half = args.rope_size / 2, place = (args.positions ? args.positions[token] : token) * half;
    for (long i = 0; i < half; i += LANES) {
        long count = smaller(LANES, half - i);
        f32v cos = load_some(args.cos + place + i, count), sin = load_some(args.sin + place + i, count);
        f32v first = load_some(row + i, count), second = load_some(row + half + i, count);
        store_some(buffer + i, first * cos - second * sin, count);
        store_some(buffer + half + i, second * cos + first * sin, count);
    }
    for (long i = args.rope_size; i < args.head_size; ++i) buffer[i] = row[i];
    return buffer;
}

// Writes a token's key and value for one head into its slot.
template <class Format>
void append(const AttentionArgs& args, const Geometry& at, long token, long head) {
    typedef typename Format::Element Element;
    constexpr long PAIR = Format::PAIR;
    Element buffer[MAX_HEAD_SIZE];
    long slot = args.slots[token], block = slot / args.block_size, offset = slot % args.block_size;
    long tile = (block * args.kv_heads + head) * at.tiles_per_block + offset / TOKENS, lane = offset % TOKENS;

    const Element* key = static_cast<const Element*>(args.key) + token * args.key_stride + head * args.head_size;
    key = turned(args, key, token, buffer);
    Element* keys = static_cast<Element*>(args.keys) + tile * at.key_tile + lane * PAIR;
    for (long unit = 0; unit < args.head_size / PAIR; ++unit)
        __builtin_memcpy(keys + unit * TOKENS * PAIR, key + unit * PAIR, PAIR * sizeof(Element));

    const Element* value = static_cast<const Element*>(args.value) + token * args.value_stride + head * args.head_size;
    Element* values =
        static_cast<Element*>(args.values) + tile * at.value_tile + lane / PAIR * at.columns * PAIR + lane % PAIR;
    for (long i = 0; i < args.head_size; ++i) values[i * PAIR] = value[i];
}

template <class Element>
struct Tile {
    const Element *keys, *values;
    long start, tokens;  // the position of its first token, how many tokens it has room for
};

template <class Element>
INLINE void find_tiles(const AttentionArgs& args, const Geometry& at, long sequence, long kv_head, long first, long end,
                       Tile<Element>* tiles) {
    const std::int32_t* table = args.block_tables + sequence * args.table_stride;
    for (long i = 0; first + i < end; ++i) {
        long index = first + i;
        long block = at.tiles_per_block == 1 ? index : index / at.tiles_per_block;
        long part = index - block * at.tiles_per_block;
        long tile = (table[block] * args.kv_heads + kv_head) * at.tiles_per_block + part;
        tiles[i].keys = static_cast<const Element*>(args.keys) + tile * at.key_tile;
        tiles[i].values = static_cast<const Element*>(args.values) + tile * at.value_tile;
        tiles[i].start = block * args.block_size + part * TOKENS;
        tiles[i].tokens = smaller(TOKENS, args.block_size - part * TOKENS);
    }
}

// A block of rows and the tiles of a chunk that any of them can see.
template <class Format>
struct Meeting {
    const AttentionArgs& args;
    const Geometry& at;
    const typename Format::Input* query;      // [units][rows]
    const Tile<typename Format::Element>* tiles;
    long num_tiles;
    const Tile<typename Format::Element>* later;  // tiles of the next chunk, to be asked for
    long num_later;
    long before, first_row;  // tokens before the sequence's first row; the first row of this block
    float *totals, *sums, *highest;
};

// Into the second level: what is asked for would take the first level's place for what is needed sooner.
template <class Element>
INLINE void prefetch(const Element* from) {
    __builtin_prefetch(from, 0, 2);
}

// Scores of ROWS rows with WIDE tiles from the tile `first` on.
template <class Format, int ROWS, int WIDE>
INLINE void score_tiles(const Meeting<Format>& with, long first, float (*scores)[CHUNK]) {
    constexpr long STEP = TOKENS * Format::PAIR;
    constexpr int WIDTH = WIDE * TOKEN_VECTORS;
    const typename Format::Element *keys[WIDE], *values[WIDE];
    for (int i = 0; i < WIDE; ++i) {
        // Past the end the last one is computed again: its scores are not looked at.
        const auto& tile = with.tiles[smaller(first + i, with.num_tiles - 1)];
        keys[i] = tile.keys;
        values[i] = tile.values;
    }
    f32v sums[ROWS][WIDTH];
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < WIDTH; ++i) sums[row][i] = f32v{};
    for (long unit = 0; unit < with.args.head_size / Format::PAIR; ++unit) {
#pragma GCC unroll 4
        for (int i = 0; i < WIDE; ++i) prefetch(values[i] + unit * STEP);
#pragma GCC unroll 2
        for (int step = 0; step < Format::STEPS; ++step) {
            typename Format::Weights w[WIDTH];
#pragma GCC unroll 8
            for (int i = 0; i < WIDTH; ++i)
                w[i] = Format::weights(keys[i / TOKEN_VECTORS] + unit * STEP + i % TOKEN_VECTORS * LANES * Format::PAIR, step);
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; ++i) Format::multiply(sums[row][i], with.query[unit * ROWS + row], w[i], step);
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < WIDTH; ++i) store(&scores[row][first * TOKENS + i * LANES], sums[row][i]);
}

// The numbers of lanes, from `first` on.
INLINE i32v lanes_from(long first) {
    i32v lanes{};
    for (int i = 0; i < LANES; ++i) lanes[i] = i;
    return lanes + static_cast<std::int32_t>(first);
}

// Scores of one row to weights, with the running maximum and sum. Returns what totals so far are to be scaled by.
template <class Format>
INLINE float weigh(const Meeting<Format>& with, long row, float* scores, typename Format::Input* probabilities) {
    const AttentionArgs& args = with.args;
    long position = with.before + (with.first_row + row) / with.at.group, oldest = first_visible(args, position);
    float scale = args.soft_cap > 0 ? args.scale / args.soft_cap : args.scale * LOG2_E;
    f32v most = broadcast(LOWEST);
    for (long i = 0; i < with.num_tiles; ++i) {
        const auto& tile = with.tiles[i];
        long end = larger(smaller(tile.tokens, position + 1 - tile.start), 0), start = smaller(oldest - tile.start, TOKENS);
        for (int part = 0; part < TOKEN_VECTORS; ++part) {
            float* place = scores + i * TOKENS + part * LANES;
            f32v score = load(place) * scale;
            if (args.soft_cap > 0) score = hyperbolic_tangent(score) * (args.soft_cap * LOG2_E);
            if (start > 0 || end < TOKENS) {
                i32v token = lanes_from(part * LANES);
                i32v seen = (token < static_cast<std::int32_t>(end)) & (token >= static_cast<std::int32_t>(start));
                score = choose(seen, score, broadcast(-__builtin_inff()));
            }
            store(place, score);
            most = choose(score > most, score, most);
        }
    }
    float highest = largest(most), before = with.highest[row];
    if (before > highest) highest = before;
    float decay = power_of_two(before - highest);
    f32v sums = load(with.sums + row * LANES) * decay;
    for (long i = 0; i < with.num_tiles * TOKEN_VECTORS; ++i) {
        f32v p = power_of_two(load(scores + i * LANES) - highest);
        sums += p;
        store_probabilities(probabilities + i * (LANES / Format::PAIR), p);
    }
    store(with.sums + row * LANES, sums);
    with.highest[row] = highest;
    return decay;
}

// totals[:, column ...] = totals * decays + probabilities times WIDTH vectors of the values' columns.
template <class Format, int ROWS, int WIDTH>
INLINE void add_values(const Meeting<Format>& with, const typename Format::Input (*probabilities)[CHUNK / Format::PAIR],
                       const float* decays, long column, long seen_of_last) {
    constexpr long PAIR = Format::PAIR, UNITS = TOKENS / PAIR;
    const long stride = with.at.columns;
    f32v totals[ROWS][WIDTH];
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < WIDTH; ++i) totals[row][i] = load(with.totals + row * stride + column + i * LANES) * decays[row];
    auto add = [&](const typename Format::Element* values, long place, auto half) __attribute__((always_inline)) {
        // What lies behind a sequence's last token may be anything, and 0 times anything is not 0.
        constexpr bool HALF = decltype(half)::value;
#pragma GCC unroll 2
        for (int step = 0; step < (HALF ? 1 : Format::STEPS); ++step) {
            typename Format::Weights w[WIDTH];
#pragma GCC unroll 8
            for (int i = 0; i < WIDTH; ++i) {
                const auto* from = values + i * LANES * PAIR;
                w[i] = HALF ? Format::first_of_pair(from) : Format::weights(from, step);
            }
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; ++i) Format::multiply(totals[row][i], probabilities[row][place], w[i], step);
        }
    };
    for (long t = 0; t < with.num_tiles; ++t) {
        const auto& tile = with.tiles[t];
        const auto* values = tile.values + column * PAIR;
        const auto* later = with.later[smaller(t, with.num_later - 1)].keys + column * PAIR;
        long seen = t + 1 < with.num_tiles ? tile.tokens : seen_of_last, units = seen / PAIR;
        for (long unit = 0; unit < units; ++unit) {
            for (long line = 0; line < WIDTH * LANES * PAIR; line += 64 / static_cast<long>(sizeof *values))
                prefetch(later + unit * stride * PAIR + line);
            add(values + unit * stride * PAIR, t * UNITS + unit, Count<0>{});
        }
        if (PAIR > 1 && seen % PAIR) add(values + units * stride * PAIR, t * UNITS + units, Count<1>{});
    }
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < WIDTH; ++i) store(with.totals + row * stride + column + i * LANES, totals[row][i]);
}

// Tiles, or as many vectors of columns as tiles have, that are computed at a time with some rows.
constexpr int tiles_with(int rows, int steps) {
    int tiles = 4;
    while (tiles > 1 && !sums_fit(rows, tiles * TOKEN_VECTORS, SUMS, 1, steps)) tiles /= 2;
    return tiles;
}

template <class Format, int ROWS>
void meet(const Meeting<Format>& with) {
    constexpr int WIDE = tiles_with(ROWS, Format::STEPS), WIDTH = WIDE * TOKEN_VECTORS;
    alignas(64) float scores[ROWS][CHUNK];
    alignas(64) typename Format::Input probabilities[ROWS][CHUNK / Format::PAIR];
    float decays[ROWS];
    for (long first = 0; first < with.num_tiles; first += WIDE) score_tiles<Format, ROWS, WIDE>(with, first, scores);
    for (long row = 0; row < ROWS; ++row) decays[row] = weigh(with, row, scores[row], probabilities[row]);

    const auto& last = with.tiles[with.num_tiles - 1];
    long newest = with.before + (with.first_row + ROWS - 1) / with.at.group;
    long seen = smaller(last.tokens, newest + 1 - last.start), column = 0;
    for (; column + WIDTH * LANES <= with.at.columns; column += WIDTH * LANES)
        add_values<Format, ROWS, WIDTH>(with, probabilities, decays, column, seen);
    for (; column < with.at.columns; column += TOKENS)
        add_values<Format, ROWS, TOKEN_VECTORS>(with, probabilities, decays, column, seen);
}

// An item's queries of one head of keys, turned, as [units][rows of the block] for each block of rows.
template <class Format>
void arrange_queries(const AttentionArgs& args, const Geometry& at, const Item& item, long kv_head,
                     typename Format::Input* to) {
    typedef typename Format::Element Element;
    Element buffer[MAX_HEAD_SIZE];
    long units = args.head_size / Format::PAIR;
    for (long block = 0; block < num_blocks(item.rows, Format::BLOCK); ++block) {
        long first = block_start(item.rows, block, Format::BLOCK), count = block_start(item.rows, block + 1, Format::BLOCK) - first;
        for (long i = 0; i < count; ++i) {
            long row = item.first_row + first + i, token = args.query_starts[item.sequence] + row / at.group;
            long head = kv_head * at.group + row % at.group;
            const Element* query = static_cast<const Element*>(args.query) + token * args.query_stride + head * args.head_size;
            query = turned(args, query, token, buffer);
            for (long unit = 0; unit < units; ++unit)
                to[first * units + unit * count + i] = Format::input(query + unit * Format::PAIR);
        }
    }
}

// Writes the result of one of all rows of an item, `scale` times the totals.
template <class Element>
INLINE void write_row(const AttentionArgs& args, const Geometry& at, const Item& item, long row, const float* totals,
                      float scale) {
    long kv_head = item.kv_head + row / item.rows;
    row = item.first_row + row % item.rows;
    long token = args.query_starts[item.sequence] + row / at.group, head = kv_head * at.group + row % at.group;
    Element* output = static_cast<Element*>(args.output) + (token * args.heads + head) * args.head_size;
    for (long i = 0; i < args.head_size; i += LANES)
        store_some(output + i, load(totals + i) * scale, smaller(LANES, args.head_size - i));
}

// The rows of one head of an item with the tiles `chunk <= tile < end`, which `tiles` are; `later` ones come next.
template <class Format>
void attend_chunk(const AttentionArgs& args, const Geometry& at, const Item& item, const Workspace<Format>& space, long row,
                  long chunk, long end, const Tile<typename Format::Element>* tiles,
                  const Tile<typename Format::Element>* later, long num_later) {
    long units = args.head_size / Format::PAIR, before = position_of(args, at, item.sequence, 0);
    for (long block = 0; block < num_blocks(item.rows, Format::BLOCK); ++block) {
        long first = block_start(item.rows, block, Format::BLOCK), rows = block_start(item.rows, block + 1, Format::BLOCK) - first;
        long oldest = first_visible(args, before + (item.first_row + first) / at.group);
        long newest = before + (item.first_row + first + rows - 1) / at.group;
        long from = larger(chunk, at.tile_of(args, oldest)), to = smaller(end, at.tile_of(args, newest) + 1);
        if (from >= to) continue;
        long place = row + first;
        Meeting<Format> meeting{args, at, space.query + place * units, tiles + (from - chunk), to - from, later, num_later,
                                before, item.first_row + first, space.totals + place * at.columns,
                                space.sums + place * LANES, space.highest + place};
        with_rows<Format::BLOCK>(rows, [&](auto count) { meet<Format, decltype(count)::value>(meeting); });
    }
}

template <class Format>
void attend_item(const AttentionArgs& args, const Geometry& at, const Item& item, Workspace<Format> space, float* partial) {
    typedef typename Format::Element Element;
    if (partial) space.totals = partial;
    long all_rows = item.all_rows(), units = args.head_size / Format::PAIR;
    for (long head = 0; head < item.heads; ++head)
        arrange_queries<Format>(args, at, item, item.kv_head + head, space.query + head * item.rows * units);
    __builtin_memset(space.totals, 0, static_cast<std::size_t>(all_rows * at.columns) * sizeof(float));
    __builtin_memset(space.sums, 0, static_cast<std::size_t>(all_rows * LANES) * sizeof(float));
    for (long row = 0; row < all_rows; ++row) space.highest[row] = LOWEST;

    Tile<Element> tiles[2][CHUNK_TILES];
    int now = 0;
    long end = smaller(item.high, item.low + CHUNK_TILES);
    find_tiles(args, at, item.sequence, item.kv_head, item.low, end, tiles[now]);
    for (long chunk = item.low, head = 0; chunk < item.high; now = 1 - now) {
        // The next head's part of this chunk, or the first one's of the next.
        bool last_head = head + 1 == item.heads;
        long next_head = last_head ? 0 : head + 1, next = last_head ? end : chunk;
        long next_end = smaller(item.high, next + CHUNK_TILES), num_later = next_end - next;
        find_tiles(args, at, item.sequence, item.kv_head + next_head, next, next_end, tiles[1 - now]);
        // At the end, something that is there already is asked for.
        const Tile<Element>* later = num_later > 0 ? tiles[1 - now] : tiles[now];
        attend_chunk<Format>(args, at, item, space, head * item.rows, chunk, end, tiles[now], later, larger(num_later, 1));
        head = next_head;
        chunk = next;
        end = next_end;
    }
    for (long row = 0; row < all_rows; ++row) {
        float total = sum(load(space.sums + row * LANES));
        if (partial) {
            partial[all_rows * at.columns + row] = space.highest[row];
            partial[all_rows * (at.columns + 1) + row] = total;
        } else {
            write_row<Element>(args, at, item, row, space.totals + row * at.columns, 1.0f / total);
        }
    }
}

// Adds the pieces of a cut item up, `item` being the first of them, in its memory.
template <class Element>
void merge_pieces(const AttentionArgs& args, const Geometry& at, const Item& item, float* partials) {
    long size = partial_floats(at, item.all_rows());
    float* totals = partials + item.partial;
    for (long row = 0; row < item.all_rows(); ++row) {
        long place = item.all_rows() * at.columns + row;
        float highest = totals[place], weight = 0;
        for (long piece = 1; piece < item.pieces; ++piece)
            if (totals[piece * size + place] > highest) highest = totals[piece * size + place];
        for (long piece = 0; piece < item.pieces; ++piece) {
            const float* other = totals + piece * size;
            float share = power_of_two(other[place] - highest);
            weight += share * other[place + item.all_rows()];
            for (long column = row * at.columns; column < (row + 1) * at.columns; column += LANES) {
                f32v added = load(other + column) * share;
                store(totals + column, piece ? load(totals + column) + added : added);
            }
        }
        write_row<Element>(args, at, item, row, totals + row * at.columns, 1.0f / weight);
    }
}

// By the team of threads that calls it. memory: `attention_memory` bytes.
template <class Format>
void attend(const AttentionArgs& args, const Plan& plan, const Item* items, char* memory) {
    Geometry at(args);
    auto* partials = reinterpret_cast<float*>(memory);
    char* spaces = memory + plan.partials * static_cast<long>(sizeof(float));
#pragma omp for schedule(static)
    for (long i = 0; i < args.tokens * args.kv_heads; ++i) append<Format>(args, at, i / args.kv_heads, i % args.kv_heads);

    Workspace<Format> space(at, spaces + thread_index() * cache_lines(Workspace<Format>::bytes(args)));
#pragma omp for schedule(dynamic)
    for (long i = 0; i < plan.items; ++i)
        attend_item<Format>(args, at, items[i], space, items[i].pieces > 1 ? partials + items[i].partial : nullptr);

    if (plan.split) {
#pragma omp for schedule(static)
        for (long i = 0; i < plan.items; ++i) {
            // The first piece of an item is the one that does not follow another of the same rows.
            const Item &item = items[i], &other = items[i > 0 ? i - 1 : 0];
            bool first = i == 0 || item.sequence != other.sequence || item.kv_head != other.kv_head ||
                         item.first_row != other.first_row;
            if (item.pieces > 1 && first) merge_pieces<typename Format::Element>(args, at, item, partials);
        }
    }
}

void attention_by_team(const AttentionArgs& args, const Plan& plan, const Item* items, char* memory) {
    if (args.dtype == FLOAT32)
        attend<Float32>(args, plan, items, memory);
    else
        attend<BFloat16>(args, plan, items, memory);
}

void attention(const AttentionArgs& args) {
    auto* items = static_cast<Item*>(args.scratch);
    Plan plan = plan_items(args, Geometry(args), items);
    char* memory = static_cast<char*>(args.scratch) + item_bytes(plan);
    // Either all threads or one: a team that shrinks ends its threads, and the next call would start them anew.
    int threads = plan.cost < PIECE_COST && args.tokens < 64 ? 1 : args.threads;
#pragma omp parallel num_threads(threads)
    attention_by_team(args, plan, items, memory);
}

}  // namespace
