// A mixture of experts: a router selects experts for each row, which gets their weighted sum.
//
// Rows are sorted by expert, so that only the selected experts' weights are read, once for all of their rows. All experts'
// tiles form one list of work, so threads do not wait between experts. A row's results are summed in the order of the experts'
// numbers, independent of the batch.
#pragma once

#include "norm.h"
#include "quantized.h"

namespace {

// Bytes of experts' results that wait to be summed, for rows that are computed together.
constexpr long MOST_RESULTS = 64L << 20;

class Experts {
public:
    // Computes the memory of each part.
    explicit Experts(const ExpertsArgs& args) : args_(args), layer_(*args.layer), memory_(args.scratch) {
        const long element = args.dtype == FLOAT32 ? 4 : 2, result = layer_.size * static_cast<long>(sizeof(float));
        most_rows_ = smaller(args.rows, larger(1, MOST_RESULTS / (layer_.top_k * result)));
        const long pairs = most_rows_ * layer_.top_k, experts = smaller(layer_.count, pairs);
        if (args.dtype != FLOAT32 || layer_.router_norm) floats_ = take<float>(most_rows_ * layer_.size);
        if (layer_.input_norm) normed_ = take<char>(most_rows_ * layer_.size * element);
        scores_ = take<float>(most_rows_ * layer_.count);
        weights_ = take<float>(pairs);
        chosen_ = take<std::int32_t>(pairs);
        places_ = take<std::int32_t>(pairs);
        order_ = take<std::int32_t>(pairs);
        ends_ = take<std::int32_t>(layer_.count);
        groups_ = take<Group>(experts);
        pieces_ = take<Piece>(pairs);
        inner_ = take<char>(pairs * layer_.inner * element);
        results_ = take<float>(pairs * layer_.size);
        long largest = larger(row_bytes(UP), row_bytes(DOWN));
        prepared_ = take<char>(larger(weight_scratch(router(most_rows_)), pairs * largest + experts * 128 + OVERREAD));
    }

    long bytes() const { return used_; }

    void run() {
        for (first_ = 0; first_ < args_.rows; first_ += most_rows_) {
            rows_ = smaller(most_rows_, args_.rows - first_);
            score();
            each_range(args_.threads, rows_, layer_.count * 4, [&](long first, long last, int) {
                for (long row = first; row < last; ++row) choose(row);
            });
            sort();
            multiply(UP);
            multiply(DOWN);
            each_range(args_.threads, rows_, (layer_.top_k + 2) * layer_.size, [&](long first, long last, int) {
                for (long row = first; row < last; ++row) add_up(row);
            });
        }
    }

private:
    enum Part { UP, DOWN };
    // An expert's rows in sorted order.
    struct Group {
        long expert, first, last;
    };
    // Blocks of a group's rows that run through its tiles together.
    struct Piece {
        long group, first, last;
    };

    template <class T>
    T* take(long count) {
        auto place = reinterpret_cast<std::uintptr_t>(memory_) + static_cast<std::uintptr_t>(used_);
        used_ += cache_lines(count * static_cast<long>(sizeof(T)));
        return reinterpret_cast<T*>(place);
    }

    // The first computed row.
    const void* x() const { return static_cast<const char*>(args_.x) + first_ * layer_.size * (args_.dtype == FLOAT32 ? 4 : 2); }

    // y = the norm of the rows at x, of `dtype`.
    void normalize(const void* x, const float* weight, void* y, int dtype) const {
        NormArgs args = {};
        args.x = x;
        args.weight = weight;
        args.y = y;
        args.rows = rows_;
        args.groups = 1;
        args.size = args.stride = layer_.size;
        args.eps = static_cast<float>(layer_.eps);
        args.dtype = dtype;
        args.threads = args_.threads;
        norm(args);
    }

    LinearArgs router(long rows) const {
        LinearArgs args = {};
        args.x = floats_ ? floats_ : x();
        args.weight = layer_.router;
        args.y = scores_;
        args.scratch = prepared_;
        args.rows = rows;
        args.in = args.x_stride = layer_.size;
        args.out = args.y_stride = layer_.count;
        args.dtype = FLOAT32;
        args.threads = args_.threads;
        return args;
    }

    // A group's matmul. prepared: its prepared rows.
    LinearArgs product(Part part, const Group& group, void* prepared) const {
        const ExpertForm& form = part == UP ? layer_.up : layer_.down;
        const long element = args_.dtype == FLOAT32 ? 4 : 2;
        char* inner = inner_ + group.first * layer_.inner * element;
        LinearArgs args = {};
        args.scratch = prepared;
        args.rows = group.last - group.first;
        args.dtype = args_.dtype;
        args.threads = args_.threads;
        args.weight_bits = static_cast<int>(form.weight_bits);
        args.group = static_cast<int>(form.group);
        args.minimums = static_cast<int>(form.minimums);
        args.input_bits = static_cast<int>(form.input_bits);
        if (part == UP) {
            args.x = normed_ ? normed_ : x();
            args.x_rows = order_ + group.first;
            args.weight = layer_.experts[group.expert].up;
            args.y = inner;
            args.in = args.x_stride = layer_.size;
            args.out = 2 * layer_.inner;
            args.y_stride = layer_.inner;
            args.gated = 1;
            args.activation = static_cast<int>(layer_.activation);
        } else {
            args.x = inner;
            args.weight = layer_.experts[group.expert].down;
            args.y = results_ + group.first * layer_.size;
            args.in = args.x_stride = layer_.inner;
            args.out = args.y_stride = layer_.size;
            args.float_output = 1;
        }
        return args;
    }

    LinearArgs product(Part part, long group) const {
        const Group& rows = groups_[group];
        return product(part, rows, prepared_ + cache_lines(rows.first * row_bytes_[part]) + group * 64);
    }

    long row_bytes(Part part) { return row_bytes_[part] = prepared_bytes(product(part, {0, 0, 1}, nullptr)); }

    void score() {
        if (args_.dtype != FLOAT32) {
            const auto* rows = static_cast<const bf16*>(x());
            each_range(args_.threads, rows_, layer_.size, [&](long first, long last, int) {
                for (long i = first * layer_.size; i < last * layer_.size; i += LANES) {
                    long count = smaller(LANES, last * layer_.size - i);
                    store_some(floats_ + i, load_some(rows + i, count), count);
                }
            });
        }
        if (layer_.router_norm) normalize(args_.dtype == FLOAT32 ? x() : floats_, layer_.router_norm, floats_, FLOAT32);
        if (layer_.input_norm) normalize(x(), layer_.input_norm, normed_, args_.dtype);
        const LinearArgs args = router(rows_);
        each_tile(args, choose_product(args));
    }

    void choose(long row) {
        const long count = layer_.count, top_k = layer_.top_k;
        float* scores = scores_ + row * count;
        std::int32_t* chosen = chosen_ + row * top_k;
        float* weights = weights_ + row * top_k;  // until all are selected: the scores to select by
        auto each = [&](auto change) __attribute__((always_inline)) {
            for (long i = 0; i < count; i += LANES) {
                long some = smaller(LANES, count - i);
                store_some(scores + i, change(load_some(scores + i, some)), some);
            }
        };
        if (layer_.is_sigmoid) {
            each([](f32v score) __attribute__((always_inline)) { return sigmoid(score); });
        } else {
            float most = scores[0], total = 0;
            for (long i = 1; i < count; ++i) most = scores[i] > most ? scores[i] : most;
            each([&](f32v score) __attribute__((always_inline)) { return exponential(score - most); });
            for (long i = 0; i < count; ++i) total += scores[i];
            each([&](f32v score) __attribute__((always_inline)) { return score / total; });
        }
        // The highest first; on ties, the lowest number.
        for (long i = 0, found = 0; i < count; ++i) {
            float value = scores[i] + (layer_.correction ? layer_.correction[i] : 0);
            if (found == top_k && !(value > weights[top_k - 1])) continue;
            long place = found < top_k ? found++ : top_k - 1;
            for (; place > 0 && value > weights[place - 1]; --place) {
                weights[place] = weights[place - 1];
                chosen[place] = chosen[place - 1];
            }
            weights[place] = value;
            chosen[place] = static_cast<std::int32_t>(i);
        }
        for (long i = 1; i < top_k; ++i)
            for (long place = i; place > 0 && chosen[place] < chosen[place - 1]; --place) {
                std::int32_t lower = chosen[place];
                chosen[place] = chosen[place - 1];
                chosen[place - 1] = lower;
            }
        float total = 0, factor = static_cast<float>(layer_.scale);
        for (long i = 0; i < top_k; ++i) total += weights[i] = scores[chosen[i]];
        if (layer_.renormalized) factor /= total + 1e-20f;
        for (long i = 0; i < top_k; ++i) weights[i] *= layer_.factors ? factor * layer_.factors[chosen[i]] : factor;
    }

    // Sorts rows by expert.
    void sort() {
        const long pairs = rows_ * layer_.top_k;
        for (long i = 0; i < layer_.count; ++i) ends_[i] = 0;
        for (long i = 0; i < pairs; ++i) ++ends_[chosen_[i]];
        num_groups_ = 0;
        long end = 0;
        for (long i = 0; i < layer_.count; ++i) {
            const long first = end;
            if (layer_.experts[i].up) end += ends_[i];
            if (end > first) groups_[num_groups_++] = {i, first, end};
            ends_[i] = static_cast<std::int32_t>(first);
        }
        for (long i = 0; i < pairs; ++i) {
            places_[i] = layer_.experts[chosen_[i]].up ? ends_[chosen_[i]]++ : -1;
            if (places_[i] >= 0) order_[places_[i]] = static_cast<std::int32_t>(i / layer_.top_k);
        }
        num_sorted_ = end;
    }

    void multiply(Part part) {
        long count = 0;
        for (long i = 0; i < num_groups_; ++i) {
            const LinearArgs args = product(part, i);
            const Product kind = choose_product(args);
            const long blocks = num_blocks(args.rows, kind.block), cached = kind.cached_blocks();
            for (long first = 0; first < blocks; first += cached) pieces_[count++] = {i, first, smaller(blocks, first + cached)};
        }
        if (!count) return;
        const long in = part == UP ? layer_.size : layer_.inner;
        const long tiles = part == UP ? num_tiles(2 * layer_.inner, true) : num_tiles(layer_.size, false);
        each_range(args_.threads, count, num_sorted_ * in * PREPARED_INPUT / count, [&](long first, long last, int) {
            for (long i = first; i < last; ++i) {
                const LinearArgs args = product(part, pieces_[i].group);
                const Product kind = choose_product(args);
                for (long block = pieces_[i].first; block < pieces_[i].last; ++block) kind.prepare(args, block);
            }
        });
        auto work = [&](long first, long last, int) {
            for (long i = first; i < last;) {
                const Piece& piece = pieces_[i / tiles];
                const LinearArgs args = product(part, piece.group);
                const long end = smaller(last, (i / tiles + 1) * tiles);
                const Product kind = choose_product(args);
                for (; i < end; ++i) kind.multiply(args, i % tiles, piece.first, piece.last);
            }
        };
        each_range(args_.threads, count * tiles, in * TILE, work, part == DOWN ? ahead() : Ahead{});
    }

    Ahead ahead() const {
        LinearArgs args = {};
        args.dtype = args_.dtype;
        args.threads = args_.threads;
        args.next = args_.next;
        args.adapted = args_.next ? args_.next->adapted : nullptr;
        return ahead_of(args);
    }

    void add_up(long row) const {
        if (args_.float_output)
            add_up<float>(row);
        else
            args_.dtype == FLOAT32 ? add_up<float>(row) : add_up<bf16>(row);
    }

    template <class Out>
    void add_up(long row) const {
        const float* weights = weights_ + row * layer_.top_k;
        const std::int32_t* places = places_ + row * layer_.top_k;
        Out* y = static_cast<Out*>(args_.y) + (first_ + row) * layer_.size;
        for (long column = 0; column < layer_.size; column += LANES) {
            const long count = smaller(LANES, layer_.size - column);
            f32v sum{};
            for (long i = 0; i < layer_.top_k; ++i)
                if (places[i] >= 0) sum += weights[i] * load_some(results_ + places[i] * layer_.size + column, count);
            if (args_.residual) sum += load_some(static_cast<const Out*>(args_.residual) + (first_ + row) * layer_.size + column, count);
            store_some(y + column, sum, count);
        }
    }

    const ExpertsArgs& args_;
    const ExpertsLayer& layer_;
    void* memory_;
    long used_ = 0, most_rows_ = 0, first_ = 0, rows_ = 0, num_groups_ = 0, num_sorted_ = 0, row_bytes_[2] = {};
    float* floats_ = nullptr;  // [rows, size], for the router
    char* normed_ = nullptr;   // [rows, size] of `dtype`, for experts
    float* scores_;            // [rows, count]
    float* weights_;           // [rows, top_k], as the next two
    std::int32_t *chosen_, *places_;
    std::int32_t *order_, *ends_;  // rows sorted by expert; end of each expert's rows
    Group* groups_;
    Piece* pieces_;
    char *inner_, *prepared_;
    float* results_;
};

long experts_scratch(const ExpertsArgs& args) {
    ExpertsArgs sizes = args;
    sizes.scratch = nullptr;
    return Experts(sizes).bytes();
}

void experts(const ExpertsArgs& args) { Experts(args).run(); }

}  // namespace
