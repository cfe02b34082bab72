// Paged attention and the attention of vision towers.
#pragma once

#include <algorithm>

#include "numbers.h"

// A model's attention, and how its cache is cut.
struct Shape {
    const char* name;
    long heads, kv_heads, head_size, block_size, window, rope_size;
    double soft_cap;
};
constexpr Shape SHAPES[] = {
    {"one head", 1, 1, 16, 16, 0, 0, 0},
    {"groups of 3, rotary", 6, 2, 40, 8, 0, 40, 0},
    {"groups of 7, part of a head rotary", 7, 1, 24, 32, 0, 8, 0},
    {"window, odd half of a head", 4, 2, 6, 16, 20, 6, 0},
    {"soft cap, blocks of 8", 2, 2, 72, 8, 0, 0, 3},
    {"window in blocks of 40, groups of 2", 4, 2, 32, 40, 33, 32, 0},
    {"13 query heads, one of keys", 13, 1, 18, 16, 0, 18, 0},
    {"heads of 512", 2, 1, 512, 16, 40, 512, 0},
};

// Sequences over a cache whose free memory is no number, and their keys and values as the reference keeps them.
class PagedCache {
public:
    // quantized: keys and values are stored in 8 bits, whose scales are no numbers at first.
    PagedCache(const Shape& shape, int dtype, bool quantized, long sequences, Random& random)
        : shape_(shape),
          dtype_(dtype),
          quantized_(quantized),
          random_(random),
          columns_((shape.head_size + 15) / 16 * 16),
          tiles_((shape.block_size + 15) / 16),
          table_stride_(MOST_TOKENS / shape.block_size + 1),
          keys_(num_tiles(sequences) * shape.head_size * 16 * stored_bytes(), 0xff),
          values_(num_tiles(sequences) * columns_ * 16 * stored_bytes(), 0xff),
          scales_(FLOAT32, num_tiles(sequences) * 32),
          kept_keys_(static_cast<std::size_t>(sequences)),
          kept_values_(static_cast<std::size_t>(sequences)) {
        // Blocks in no order.
        for (long i = 0; i < sequences * table_stride_; ++i) blocks_.push_back(static_cast<std::int32_t>(i));
        for (std::size_t i = blocks_.size(); i-- > 1;)
            std::swap(blocks_[i], blocks_[static_cast<std::size_t>(random.below(static_cast<long>(i) + 1))]);
        std::vector<double> frequencies;
        for (long i = 0; i < shape.rope_size / 2; ++i)
            frequencies.push_back(std::pow(100.0, -2.0 * static_cast<double>(i) / static_cast<double>(shape.rope_size)));
        for (long position = 0; position < MOST_ROTATED; ++position)
            for (double frequency : frequencies) {
                cos_.push_back(static_cast<float>(std::cos(static_cast<double>(position) * frequency)));
                sin_.push_back(static_cast<float>(std::sin(static_cast<double>(position) * frequency)));
            }
    }

    // counts: new tokens of each sequence, some of them 0.
    void step(const std::vector<long>& counts, int threads, Case& results) {
        Batch batch(*this, counts);
        const Shape& s = shape_;
        long width = (s.heads + 2 * s.kv_heads) * s.head_size, tokens = batch.tokens();
        Numbers qkv(dtype_, tokens * width, random_), output(dtype_, tokens * s.heads * s.head_size);
        AttentionArgs args = {};
        args.query = qkv.data();
        args.key = qkv.at(s.heads * s.head_size);
        args.value = qkv.at((s.heads + s.kv_heads) * s.head_size);
        args.cos = s.rope_size ? cos_.data() : nullptr;
        args.sin = s.rope_size ? sin_.data() : nullptr;
        args.positions = batch.positions.data();
        args.keys = keys_.data();
        args.values = values_.data();
        args.scales = quantized_ ? static_cast<float*>(scales_.data()) : nullptr;
        args.output = output.data();
        args.query_starts = batch.starts.data();
        args.context_lens = batch.lengths.data();
        args.block_tables = batch.tables.data();
        args.slots = batch.slots.data();
        args.sequences = static_cast<long>(batch.sequences.size());
        args.tokens = tokens;
        args.heads = s.heads;
        args.kv_heads = s.kv_heads;
        args.head_size = s.head_size;
        args.block_size = s.block_size;
        args.table_stride = table_stride_;
        args.query_stride = args.key_stride = args.value_stride = width;
        args.rope_size = s.rope_size;
        args.window = s.window;
        args.scale = static_cast<float>(scale());
        args.soft_cap = static_cast<float>(s.soft_cap);
        args.dtype = dtype_;
        args.threads = threads;
        long work = 0;
        Memory scratch(kernels->attention_scratch(args, &work), 0xff);
        args.scratch = scratch.data();
        kernels->attention(args);
        for (long token = 0; token < tokens; ++token) compare(batch, qkv, output, token, width, results);
        results.require(scratch.intact() && output.intact() && keys_.intact() && values_.intact() && scales_.intact(),
                        "memory behind an array was written");
    }

private:
    static constexpr long MOST_TOKENS = 700;
    static constexpr long MOST_ROTATED = 64;  // tokens of a sequence whose heads are rotated

    // What a step's arguments say of its tokens.
    struct Batch {
        std::vector<long> sequences;
        std::vector<std::int32_t> starts{0}, lengths, tables;
        std::vector<std::int64_t> slots, positions;
        std::vector<long> sequence_of;

        Batch(PagedCache& cache, const std::vector<long>& counts) {
            for (std::size_t i = 0; i < counts.size(); ++i) {
                if (counts[i] == 0) continue;
                const auto* table = cache.blocks_.data() + static_cast<long>(i) * cache.table_stride_;
                const Shape& s = cache.shape_;
                long before = static_cast<long>(cache.kept_values_[i].size()) / (s.kv_heads * s.head_size);
                for (long token = before; token < before + counts[i]; ++token) {
                    slots.push_back(table[token / s.block_size] * s.block_size + token % s.block_size);
                    positions.push_back(token);
                    sequence_of.push_back(static_cast<long>(i));
                }
                sequences.push_back(static_cast<long>(i));
                starts.push_back(static_cast<std::int32_t>(starts.back() + counts[i]));
                lengths.push_back(static_cast<std::int32_t>(before + counts[i]));
                tables.insert(tables.end(), table, table + cache.table_stride_);
            }
        }
        long tokens() const { return static_cast<long>(slots.size()); }
    };

    long num_tiles(long sequences) const { return sequences * table_stride_ * shape_.kv_heads * tiles_; }
    long stored_bytes() const { return quantized_ ? 1 : dtype_ == FLOAT32 ? 4 : 2; }

    // A head as the cache gives it back.
    std::vector<double> stored(std::vector<double> head) const {
        float most = 0;
        for (double x : head) most = std::max(most, static_cast<float>(std::fabs(x)));
        float factor = 127 / most, one = most / 127;
        if (quantized_)
            for (double& x : head) x = static_cast<double>(std::nearbyint(static_cast<float>(x) * factor)) * static_cast<double>(one);
        return head;
    }

    double tolerance() const {
        // A key that is rotated in another order of operations may be rounded to the other side.
        if (quantized_) return dtype_ == FLOAT32 ? 2e-3 : 0.04;
        return dtype_ == FLOAT32 ? 5e-6 : 0.02;
    }

    double scale() const { return 2 / std::sqrt(static_cast<double>(shape_.head_size)); }

    // A head at its position.
    std::vector<double> rotated(const Numbers& qkv, long place, long position) const {
        std::vector<double> head;
        for (long i = 0; i < shape_.head_size; ++i) head.push_back(qkv[place + i]);
        long half = shape_.rope_size / 2;
        for (long i = 0; i < half; ++i) {
            double x = head[i], y = head[half + i];
            double c = static_cast<double>(cos_[position * half + i]), s = static_cast<double>(sin_[position * half + i]);
            head[i] = rounded(dtype_, x * c - y * s);
            head[half + i] = rounded(dtype_, y * c + x * s);
        }
        return head;
    }

    void compare(const Batch& batch, const Numbers& qkv, const Numbers& output, long token, long width, Case& results) {
        const Shape& s = shape_;
        auto number = static_cast<std::size_t>(token);
        long position = batch.positions[number];
        auto &keys = kept_keys_[static_cast<std::size_t>(batch.sequence_of[number])],
             &values = kept_values_[static_cast<std::size_t>(batch.sequence_of[number])];
        for (long head = 0; head < s.kv_heads; ++head) {
            auto key = stored(rotated(qkv, token * width + (s.heads + head) * s.head_size, position));
            keys.insert(keys.end(), key.begin(), key.end());
            std::vector<double> value;
            for (long i = 0; i < s.head_size; ++i)
                value.push_back(qkv[token * width + (s.heads + s.kv_heads + head) * s.head_size + i]);
            value = stored(value);
            values.insert(values.end(), value.begin(), value.end());
        }
        // Of a long chunk, some tokens will do.
        if (batch.tokens() > 100 && token % 37) return;
        for (long head = 0; head < s.heads; ++head) {
            auto query = rotated(qkv, token * width + head * s.head_size, position);
            auto expected = attend(query, keys, values, head / (s.heads / s.kv_heads), position);
            for (long i = 0; i < s.head_size; ++i)
                results.compare(output[(token * s.heads + head) * s.head_size + i], expected[i], tolerance());
        }
    }

    std::vector<double> attend(const std::vector<double>& query, const std::vector<double>& keys,
                               const std::vector<double>& values, long kv_head, long position) const {
        const Shape& s = shape_;
        std::vector<double> total(query.size());
        double sum = 0;
        for (long other = s.window > 0 ? std::max(0L, position - s.window + 1) : 0; other <= position; ++other) {
            long place = (other * s.kv_heads + kv_head) * s.head_size;
            double score = 0;
            for (long i = 0; i < s.head_size; ++i) score += query[i] * keys[place + i];
            score *= scale();
            if (s.soft_cap > 0) score = s.soft_cap * std::tanh(score / s.soft_cap);
            double weight = std::exp(score);
            sum += weight;
            for (long i = 0; i < s.head_size; ++i) total[i] += weight * values[place + i];
        }
        for (double& value : total) value /= sum;
        return total;
    }

    const Shape& shape_;
    int dtype_;
    bool quantized_;
    Random& random_;
    long columns_, tiles_, table_stride_;
    Memory keys_, values_;
    Numbers scales_;
    std::vector<std::int32_t> blocks_;
    std::vector<float> cos_, sin_;
    std::vector<std::vector<double>> kept_keys_, kept_values_;
};

inline std::string name_of_cache(bool quantized) { return quantized ? ", cache in 8 bits" : ""; }

inline void test_paged_attention(const Shape& shape, int dtype, bool quantized) {
    Random random(static_cast<std::uint64_t>(shape.head_size));
    Case results(std::string("paged attention: ") + shape.name + ", " + name_of(dtype) + name_of_cache(quantized));
    PagedCache cache(shape, dtype, quantized, 3, random);
    // Prompts in chunks, decodes, and both at once.
    cache.step({1, 37, 0}, 1, results);
    cache.step({1, 18, 5}, 2, results);
    cache.step({14, 1, 1}, 3, results);
    cache.step({1, 1, 1}, 2, results);
}

// A decode whose keys are more than one thread takes: its splits are merged.
inline void test_long_context(int dtype, bool quantized) {
    const Shape shape = {"a long context in splits", 2, 1, 8, 16, 0, 0, 0};
    Random random(9);
    Case results(std::string("paged attention: ") + shape.name + ", " + name_of(dtype) + name_of_cache(quantized));
    PagedCache cache(shape, dtype, quantized, 1, random);
    cache.step({640}, 2, results);
    cache.step({1}, 3, results);
}

inline void test_encoder_attention(int dtype, long images, long length, long heads, long head_size, int threads) {
    Random random(static_cast<std::uint64_t>(length));
    Case results("encoder attention: " + std::to_string(images) + " images of " + std::to_string(length) + " tokens, " +
                 std::to_string(heads) + " heads of " + std::to_string(head_size) + ", " + name_of(dtype));
    long width = heads * head_size;
    Numbers qkv(dtype, images * length * 3 * width, random, 1.5), y(dtype, images * length * width);
    EncoderAttentionArgs args = {};
    args.qkv = qkv.data();
    args.y = y.data();
    args.images = images;
    args.length = length;
    args.heads = heads;
    args.head_size = head_size;
    args.first = 0;
    args.last = length;
    args.scale = 0.5f;
    args.dtype = dtype;
    args.threads = threads;
    Memory scratch(kernels->encoder_attention_scratch(args), 0xff);
    args.scratch = scratch.data();
    kernels->encoder_attention(args);
    // A third of the queries alone, in memory of just their size, gives the same numbers.
    args.first = length / 3;
    args.last = std::max(args.first + 1, 2 * length / 3);
    long some = args.last - args.first;
    Numbers part(dtype, images * some * width);
    args.y = part.data();
    kernels->encoder_attention(args);
    for (long i = 0; i < images * some * width; ++i)
        results.compare(part[i], y[i / (some * width) * length * width + args.first * width + i % (some * width)], 0);
    for (long row = 0; row < images * length * heads; ++row) {
        long image = row / (length * heads), token = row / heads % length, head = row % heads;
        auto place = [&](long other, long part) { return ((image * length + other) * 3 + part) * width + head * head_size; };
        std::vector<double> total(static_cast<std::size_t>(head_size));
        double sum = 0;
        for (long other = 0; other < length; ++other) {
            double score = 0;
            for (long i = 0; i < head_size; ++i) score += qkv[place(token, 0) + i] * qkv[place(other, 1) + i];
            double weight = std::exp(0.5 * score);
            sum += weight;
            for (long i = 0; i < head_size; ++i) total[i] += weight * qkv[place(other, 2) + i];
        }
        for (long i = 0; i < head_size; ++i)
            results.compare(y[(image * length + token) * width + head * head_size + i], total[i] / sum,
                            dtype == FLOAT32 ? 1e-5 : 0.02);
    }
    results.require(scratch.intact() && y.intact(), "memory behind an array was written");
}

inline void test_attention() {
    for (int dtype : {FLOAT32, BFLOAT16}) {
        for (bool quantized : {false, true}) {
            for (const Shape& shape : SHAPES) test_paged_attention(shape, dtype, quantized);
            test_long_context(dtype, quantized);
        }
        test_encoder_attention(dtype, 2, 17, 2, 10, 2);
        test_encoder_attention(dtype, 1, 70, 1, 24, 3);
        test_encoder_attention(dtype, 1, 1, 3, 72, 1);
    }
    test_encoder_attention(FLOAT32, 1, 33, 2, 7, 2);
}
