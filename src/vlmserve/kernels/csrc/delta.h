// The gated delta rule (https://arxiv.org/abs/2412.06464), with the convolution before it and the gated norm after it.
//
// A state S is [key_size][value_size]. A token changes it to S' = decay S + k^T u, with u = beta (v - decay k S), and its
// result is q S'. Single rows read and write a state once. More rows are computed CHUNK_ROWS at a time as matmuls. With
// `total`, the sum of the log decays, and D[i][j] = exp(total[i] - total[j]) for j <= i:
//
// - (1 + A) U = beta (V - exp(total) K S), A = beta K K^T D below the diagonal
// - O = exp(total) Q S + (Q K^T D) U
// - S' = exp(total[last]) S + K^T exp(total[last] - total) U
//
// Columns of values are independent, so panels of 16 columns run separately, and their state stays in the first-level cache.
// A segment with drafts is one chunk: accepted drafts of the last step, its own row, and drafts. S' is that of the rows before
// its drafts.
//
// Forward substitution in blocks of rows solves the triangular system. All intermediate numbers are float32; where matrix tiles
// multiply them (delta_tiles.h), each is a sum of two bfloat16. Chunks end at absolute multiples of CHUNK_ROWS, so a state does not
// depend on how a prompt is chunked.
#pragma once

#include "delta_chunk.h"
#include "delta_tiles.h"
#include "formats.h"
#include "states.h"
#include "threads.h"

namespace {

// Prefetches the next state, a part with each row of the current one.
struct NextState {
    const float* from;  // null: unknown
    long size;

    void prefetch(long count) {
        if (!from) return;
        count = smaller(count, size);
        for (long i = 0; i < count; i += 64 / static_cast<long>(sizeof(float))) __builtin_prefetch(from + i, 0, 2);
        from += count;
        size -= count;
    }
};

// One row of a head. The result replaces the value. source, target: [key_size][value_size], may be the same.
void step_state(const DeltaArgs& args, const DeltaScratch& own, float log_decay, float beta, const float* source, float* target,
                NextState next) {
    const long size = args.value_size;
    float *known = own.panel, *result = own.panel + size;
    for (long i = 0; i < 2 * size; i += LANES) store(known + i, f32v{});
    for (long row = 0; source && row < args.key_size; row += STATE_ROWS) {
        f32v keys[STATE_ROWS], queries[STATE_ROWS];
        for (int i = 0; i < STATE_ROWS; ++i) {
            keys[i] = broadcast(own.key[row + i]);
            queries[i] = broadcast(own.query[row + i]);
        }
        const float* rows = source + row * size;
        for (long column = 0; column < size; column += LANES) {
            f32v of_key = load(known + column), of_query = load(result + column);
#pragma GCC unroll 4
            for (int i = 0; i < STATE_ROWS; ++i) {
                f32v state = load(rows + i * size + column);
                of_key += keys[i] * state;
                of_query += queries[i] * state;
            }
            store(known + column, of_key);
            store(result + column, of_query);
        }
        next.prefetch(STATE_ROWS * size / 2);
    }
    float decay = exponential(broadcast(log_decay))[0], score = dot(own.query, own.key, args.key_size);
    float* update = known;
    for (long column = 0; column < size; column += LANES) {
        f32v own_update = (load(own.value + column) - decay * load(known + column)) * beta;
        store(update + column, own_update);
        store(own.value + column, decay * load(result + column) + score * own_update);
    }
    for (long row = 0; row < args.key_size; row += STATE_ROWS) {
        f32v keys[STATE_ROWS];
        for (int i = 0; i < STATE_ROWS; ++i) keys[i] = broadcast(own.key[row + i]);
        for (long column = 0; column < size; column += LANES) {
            f32v own_update = load(update + column);
#pragma GCC unroll 4
            for (int i = 0; i < STATE_ROWS; ++i) {
                long place = (row + i) * size + column;
                f32v state = source ? load(source + place) * decay : f32v{};
                store(target + place, state + keys[i] * own_update);
            }
        }
        next.prefetch(STATE_ROWS * size / 2);
    }
}

// One key head of a sequence, with the value heads that share it.
template <class T>
class DeltaHead {
public:
    // next: the state that this thread reads next.
    DeltaHead(const DeltaArgs& args, const DeltaScratch& own, long head, const float* next)
        : args_(args), shape_(args), own_(own), head_(head), next_(next) {}

    void run(long sequence) {
        for (long i = args_.rows.sequences[sequence]; i < args_.rows.sequences[sequence + 1]; ++i) {
            const Segment segment(args_.rows, i);
            const float* source = slot_of(args_.states, segment.source, args_.value_heads * shape_.state);
            float* target = slot_of(args_.states, segment.target, args_.value_heads * shape_.state);
            const T* tail = slot_of(static_cast<const T*>(args_.tail), segment.source, (args_.kernel - 1) * shape_.channels);
            for (long row = segment.first - segment.accepted; row < segment.last;) {
                long position = segment.position + row - segment.first;
                bool whole = segment.accepted || segment.drafts;
                long last = whole ? segment.last : smaller(segment.last, row + CHUNK_ROWS - position % CHUNK_ROWS);
                run_chunk(segment, tail, row, last, source, target);
                source = target;
                row = last;
            }
            if (segment.first == segment.last) copy(source, target);
            T* kept = slot_of(static_cast<T*>(args_.tail), segment.target, (args_.kernel - 1) * shape_.channels);
            const long reached = segment.last - segment.drafts;
            for (const Part& part : parts())
                keep_tail(inputs(segment, tail, part.first), reached - segment.first, kept + part.first, part.size);
            for (long row = reached; row < segment.last; ++row) keep_draft(row, drafts(segment) + (row - reached) * shape_.draft_width);
        }
    }

private:
    // Adjacent channels of the convolution.
    struct Part {
        long first, size;
    };
    struct Parts {
        Part all[3];
        const Part* begin() const { return all; }
        const Part* end() const { return all + 3; }
    };
    Parts parts() const {
        long of_values = shape_.group * args_.value_size;
        return {{{head_ * args_.key_size, args_.key_size},
                 {shape_.keys + head_ * args_.key_size, args_.key_size},
                 {2 * shape_.keys + head_ * of_values, of_values}}};
    }

    const T* mixed(long row, long column) const { return static_cast<const T*>(args_.mixed) + row * shape_.width + column; }

    Inputs<T> inputs(const Segment& segment, const T* tail, long channel) const {
        return {mixed(segment.first, channel), shape_.width, tail ? tail + channel : nullptr, shape_.channels, args_.kernel,
                drafts(segment, channel), shape_.draft_width, segment.accepted};
    }

    T* drafts(const Segment& segment, long column = 0) const {
        return args_.drafts ? static_cast<T*>(args_.drafts) + segment.kept * shape_.draft_width + column : nullptr;
    }

    const T* gates(long row) const { return static_cast<const T*>(args_.gates) + 2 * row * args_.value_heads; }

    // The inputs of this head.
    void keep_draft(long row, T* to) const {
        for (const Part& part : parts())
            __builtin_memcpy(to + part.first, mixed(row, part.first), static_cast<std::size_t>(part.size) * sizeof(T));
        for (long i = head_ * shape_.group; i < (head_ + 1) * shape_.group; ++i) {
            to[shape_.channels + i] = gates(row)[i];
            to[shape_.channels + args_.value_heads + i] = gates(row)[args_.value_heads + i];
        }
    }

    void copy(const float* source, float* target) const {
        long first = head_ * shape_.group * shape_.state, count = shape_.group * shape_.state;
        for (long i = first; i < first + count; i += LANES) store(target + i, source ? load(source + i) : f32v{});
    }

    // Rows `first` to `last` of a segment, at most one chunk. Rows before the segment's are accepted drafts.
    void run_chunk(const Segment& segment, const T* tail, long first, long last, const float* source, float* target) {
        const long rows = last - first, reached = smaller(rows, segment.last - segment.drafts - first);
        const long padded = rows == 1 ? 1 : (rows + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
        const Parts all = parts();
        auto convolved = [&](long channel, long size, float* to, long stride) {
            convolve(inputs(segment, tail, channel), args_.convolution + channel, first - segment.first, last - segment.first,
                     size, to, stride);
            for (long row = rows; row < padded; ++row) clear(to + row * stride, size);
        };
        convolved(all.all[0].first, args_.key_size, own_.query, shape_.key_stride);
        convolved(all.all[1].first, args_.key_size, own_.key, shape_.key_stride);
        const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(args_.key_size));
        for (long row = 0; row < rows; ++row) {
            normalize(own_.query + row * shape_.key_stride, scale);
            normalize(own_.key + row * shape_.key_stride, 1);
        }
        multiply_chunk_keys(rows, padded);
        for (long i = 0; i < shape_.group; ++i) {
            const long head = head_ * shape_.group + i, place = head * shape_.state;
            convolved(2 * shape_.keys + head * args_.value_size, args_.value_size, own_.value, shape_.value_stride);
            find_gates(segment, head, first, rows, reached, padded);
            const float* from = source ? source + place : nullptr;
            if (rows == 1) {
                const float* next = i + 1 < shape_.group ? (from ? from + shape_.state : nullptr) : next_;
                step_state(args_, own_, own_.total[0], own_.beta[0], from, target + place, {next, shape_.state});
            } else {
                weigh_keys(own_, padded);
                run_panels(rows, padded, reached, from, target + place);
            }
            for (long row = larger(0, segment.first - first); row < rows; ++row)
                finish_row(head, first + row, own_.value + row * shape_.value_stride);
        }
    }

#if defined(AMX)
    TiledDelta tiled(long padded) const { return {args_, shape_, own_, DeltaTiles(args_, own_.rest), padded}; }
#endif

    void multiply_chunk_keys(long rows, long padded) const {
        if (rows == 1) return;
#if defined(AMX)
        if (is_tiled(args_, rows)) return tiled(padded).multiply_keys();
#endif
        multiply_keys(args_, shape_, own_, padded);
    }

    void run_panels(long rows, [[maybe_unused]] long padded, long reached, const float* source, float* target) const {
#if defined(AMX)
        if (is_tiled(args_, rows)) return tiled(padded).run(reached, source, target);
#endif
        for (long column = 0; column < args_.value_size; column += PANEL)
            run_panel(args_, shape_, own_, rows, reached, source ? source + column : nullptr, target + column, own_.value + column);
    }

    static void clear(float* row, long count) { __builtin_memset(row, 0, static_cast<std::size_t>(count) * sizeof *row); }

    void normalize(float* row, float scale) const {
        scale_row(row, args_.key_size, scale / __builtin_sqrtf(dot(row, row, args_.key_size) + NORM_EPS));
    }

    // Decays and step sizes of a head's rows. Padding rows change nothing.
    void find_gates(const Segment& segment, long head, long first, long rows, long reached, long padded) const {
        const T* accepted = drafts(segment, shape_.channels);
        for (long row = 0; row < rows; ++row) {
            const T* from = first + row < segment.first ? accepted + row * shape_.draft_width : gates(first + row);
            own_.beta[row] = to_float(from[head]);
            own_.total[row] = to_float(from[args_.value_heads + head]) + args_.dt_bias[head];
        }
        for (long row = 0; row < rows; row += LANES) {
            store(own_.beta + row, sigmoid(load(own_.beta + row)));
            store(own_.grown + row, exponential(load(own_.total + row)));
        }
        float total = 0;
        for (long row = 0; row < padded; ++row) {
            if (row < rows) total += args_.decay[head] * softplus(own_.total[row], own_.grown[row]);
            own_.total[row] = total;
            if (row >= rows) own_.beta[row] = 0;
        }
        for (long row = 0; row < padded && rows > 1; row += LANES) {
            f32v totals = load(own_.total + row);
            store(own_.grown + row, exponential(totals));
            store(own_.to_end + row, exponential(own_.total[reached - 1] - totals));
        }
    }

    // Norm and gate of a head's result.
    void finish_row(long head, long row, const float* result) const {
        const T* gates = mixed(row, shape_.channels + head * args_.value_size);
        prefetch_row(gates + CHUNK_ROWS * shape_.width, args_.value_size);
        T* to = static_cast<T*>(args_.output) + row * shape_.values + head * args_.value_size;
        float mean = dot(result, result, args_.value_size) / static_cast<float>(args_.value_size);
        float scale = 1.0f / __builtin_sqrtf(mean + args_.eps);
        for (long column = 0; column < args_.value_size; column += LANES)
            store(to + column, load(result + column) * scale * load(args_.norm + column) * activate(SILU, load(gates + column)));
    }

    const DeltaArgs& args_;
    const DeltaShape shape_;
    const DeltaScratch& own_;
    const long head_;
    const float* next_;
};

// Whether a segment has more than one row, accepted drafts included.
INLINE bool has_chunks(const StateRows& rows) {
    for (long i = 0; i < rows.sequences[rows.count]; ++i)
        if (rows.starts[i + 1] - rows.starts[i] > 1 || (rows.drafts && rows.drafts[3 * i + 1])) return true;
    return false;
}

long thread_bytes(const DeltaArgs& args) {
    long floats = DeltaScratch(args, nullptr, has_chunks(args.rows)).floats;
#if defined(AMX)
    if (args.dtype == BFLOAT16 && has_chunks(args.rows)) floats += DeltaTiles(args, nullptr).floats;
#endif
    return cache_lines(floats * static_cast<long>(sizeof(float)));
}

long delta_scratch(const DeltaArgs& args) {
    return args.threads * thread_bytes(args);
}

template <class T>
void run_delta(const DeltaArgs& args) {
    const DeltaShape shape(args);
    const bool chunks = has_chunks(args.rows);
    const long bytes = thread_bytes(args), items = args.rows.count * args.key_heads;
    auto state_of = [&](long item) -> const float* {
        long first = args.rows.sequences[item / args.key_heads];
        const float* slot = slot_of(args.states, args.rows.sources[first], args.value_heads * shape.state);
        return slot ? slot + item % args.key_heads * shape.group * shape.state : nullptr;
    };
    auto run = [&](long item, const float* next, int thread) {
        DeltaScratch own(args, reinterpret_cast<float*>(static_cast<char*>(args.scratch) + thread * bytes), chunks);
        DeltaHead<T>(args, own, item % args.key_heads, next).run(item / args.key_heads);
    };
    // The longest sequences are last in a batch, and first here.
    if (chunks)
        return each_in_turn(args.threads, items, [&](long i, int thread) { run(items - 1 - i, nullptr, thread); });
    each_range(args.threads, items, 2 * shape.group * shape.state, [&](long first, long last, int thread) {
        for (long i = first; i < last; ++i) run(i, i + 1 < last ? state_of(i + 1) : nullptr, thread);
    });
}

void delta(const DeltaArgs& args) {
    if (args.dtype == FLOAT32)
        run_delta<float>(args);
    else
        run_delta<bf16>(args);
}

}  // namespace
