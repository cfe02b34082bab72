// The gated delta rule and gated short convolutions, row by row in float64.
#pragma once

#include <algorithm>

#include "numbers.h"

// Two sequences: a decode, and a prompt of two segments that leaves a checkpoint, each in slots of its own.
struct StateBatch {
    static constexpr long SLOTS = 5, TOKENS = 82;
    std::int32_t starts[4] = {0, 1, 74, TOKENS}, sources[3] = {1, 3, 4}, targets[3] = {1, 4, 2}, positions[3] = {9, 60, 133},
                 sequences[3] = {0, 1, 3};

    StateRows rows() const { return {starts, sources, targets, positions, sequences, nullptr, 2}; }
};

// What causal convolutions read: tails before the rows of each segment.
class Convolved {
public:
    Convolved(const Numbers& tail, long channels, long kernel) : channels_(channels), kernel_(kernel) {
        for (long i = 0; i < StateBatch::SLOTS * (kernel - 1) * channels; ++i) tail_.push_back(tail[i]);
    }

    // input(row, channel): of the convolution. Returns [tokens][channels]; tails become those after the segments.
    template <class Input>
    std::vector<double> run(const StateBatch& batch, const Numbers& weight, Input input) {
        std::vector<double> output;
        for (long segment = 0; segment < 3; ++segment) {
            auto value = [&](long row, long channel) {
                if (row >= batch.starts[segment]) return input(row, channel);
                long place = kernel_ - 1 + row - batch.starts[segment];
                return tail_[static_cast<std::size_t>((batch.sources[segment] * (kernel_ - 1) + place) * channels_ + channel)];
            };
            for (long row = batch.starts[segment]; row < batch.starts[segment + 1]; ++row)
                for (long channel = 0; channel < channels_; ++channel) {
                    double sum = 0;
                    for (long tap = 0; tap < kernel_; ++tap)
                        sum += value(row + tap - kernel_ + 1, channel) * weight[tap * channels_ + channel];
                    output.push_back(sum);
                }
            std::vector<double> kept;
            for (long place = 0; place < kernel_ - 1; ++place)
                for (long channel = 0; channel < channels_; ++channel)
                    kept.push_back(value(batch.starts[segment + 1] + place - kernel_ + 1, channel));
            for (std::size_t i = 0; i < kept.size(); ++i)
                tail_[static_cast<std::size_t>(batch.targets[segment]) * kept.size() + i] = kept[i];
        }
        return output;
    }

    void compare(const Numbers& tail, Case& results) const {
        for (std::size_t i = 0; i < tail_.size(); ++i) results.compare(tail[static_cast<long>(i)], tail_[i], 1e-6);
    }

private:
    long channels_, kernel_;
    std::vector<double> tail_;
};

inline void test_delta(int dtype) {
    const long key_heads = 2, group = 2, key_size = 16, value_size = 32, kernel = 4, heads = key_heads * group;
    const long keys = key_heads * key_size, values = heads * value_size, channels = 2 * keys + values;
    const long width = channels + values, state = key_size * value_size, tokens = StateBatch::TOKENS;
    Random random(11);
    Case results(std::string("gated delta rule, ") + name_of(dtype));
    StateBatch batch;
    Numbers mixed(dtype, tokens * width, random, 2), gates(dtype, tokens * 2 * heads, random, 2),
        weight(FLOAT32, kernel * channels, random), decay(FLOAT32, heads),
        dt_bias(FLOAT32, heads, random), norm(FLOAT32, value_size, random), tail(dtype, StateBatch::SLOTS * (kernel - 1) * channels, random),
        states(FLOAT32, StateBatch::SLOTS * heads * state, random), output(dtype, tokens * values);
    for (long head = 0; head < heads; ++head) decay.set(head, static_cast<float>(-2 * random.uniform()));
    std::vector<double> kept;
    for (long i = 0; i < StateBatch::SLOTS * heads * state; ++i) kept.push_back(states[i]);
    Convolved convolved(tail, channels, kernel);
    auto qkv = convolved.run(batch, weight, [&](long row, long channel) { return mixed[row * width + channel]; });
    auto silu = [](double x) { return x / (1 + std::exp(-x)); };

    DeltaArgs args = {};
    args.mixed = mixed.data();
    args.gates = gates.data();
    args.convolution = static_cast<const float*>(weight.data());
    args.decay = static_cast<const float*>(decay.data());
    args.dt_bias = static_cast<const float*>(dt_bias.data());
    args.norm = static_cast<const float*>(norm.data());
    args.states = static_cast<float*>(states.data());
    args.tail = tail.data();
    args.output = output.data();
    args.rows = batch.rows();
    args.key_heads = key_heads;
    args.value_heads = heads;
    args.key_size = key_size;
    args.value_size = value_size;
    args.kernel = kernel;
    args.eps = 1e-6f;
    args.dtype = dtype;
    args.threads = 2;
    Memory scratch(kernels->delta_scratch(args), 0xff);
    args.scratch = scratch.data();
    kernels->delta(args);

    for (long segment = 0; segment < 3; ++segment)
        for (long head = 0; head < heads; ++head) {
            auto* from = kept.data() + (batch.sources[segment] * heads + head) * state;
            std::vector<double> own(from, from + state);
            for (long row = batch.starts[segment]; row < batch.starts[segment + 1]; ++row) {
                auto at = [&](long place) { return silu(qkv[static_cast<std::size_t>(row * channels + place)]); };
                auto normed = [&](long first, std::vector<double>& to, double scale) {
                    double squares = 1e-6;
                    for (long i = 0; i < key_size; ++i) squares += at(first + i) * at(first + i);
                    for (long i = 0; i < key_size; ++i) to.push_back(at(first + i) / std::sqrt(squares) * scale);
                };
                std::vector<double> query, key, result;
                normed(head / group * key_size, query, 1 / std::sqrt(static_cast<double>(key_size)));
                normed(keys + head / group * key_size, key, 1);
                double step = gates[(2 * row + 1) * heads + head] + dt_bias[head], mean = 1e-6;
                double kept_share = std::exp(decay[head] * std::log1p(std::exp(step)));
                double beta = 1 / (1 + std::exp(-gates[2 * row * heads + head]));
                for (long column = 0; column < value_size; ++column) {
                    double known = 0, sum = 0;
                    for (long i = 0; i < key_size; ++i) known += key[i] * (own[i * value_size + column] *= kept_share);
                    double update = beta * (at(2 * keys + head * value_size + column) - known);
                    for (long i = 0; i < key_size; ++i) sum += query[i] * (own[i * value_size + column] += key[i] * update);
                    result.push_back(sum);
                    mean += sum * sum / value_size;
                }
                for (long column = 0; column < value_size; ++column) {
                    double gate = silu(mixed[row * width + channels + head * value_size + column]);
                    double expected = result[column] / std::sqrt(mean) * norm[column] * gate;
                    results.compare(output[row * values + head * value_size + column], expected,
                                    dtype == FLOAT32 ? 1e-4 : 1e-4 + std::fabs(expected) * 0x1p-7);
                }
            }
            std::copy(own.begin(), own.end(), kept.data() + (batch.targets[segment] * heads + head) * state);
        }
    for (std::size_t i = 0; i < kept.size(); ++i) results.compare(states[static_cast<long>(i)], kept[i], 1e-5);
    convolved.compare(tail, results);
    results.require(scratch.intact() && output.intact() && states.intact() && tail.intact(), "memory behind an array was written");
}

inline void test_convolution(int dtype) {
    const long channels = 37, kernel = 3, width = 3 * channels, tokens = StateBatch::TOKENS;
    Random random(12);
    Case results(std::string("gated short convolution, ") + name_of(dtype));
    StateBatch batch;
    Numbers mixed(dtype, tokens * width, random, 2), weight(FLOAT32, kernel * channels, random),
        tail(dtype, StateBatch::SLOTS * (kernel - 1) * channels, random), output(dtype, tokens * channels);
    Convolved convolved(tail, channels, kernel);
    auto expected = convolved.run(batch, weight, [&](long row, long channel) {
        return rounded(dtype, mixed[row * width + channel] * mixed[row * width + 2 * channels + channel]);
    });
    kernels->convolution({mixed.data(), static_cast<const float*>(weight.data()), tail.data(), nullptr, output.data(), batch.rows(), channels,
                          kernel, dtype, 2});
    for (long i = 0; i < tokens * channels; ++i) {
        double gated = mixed[i / channels * width + channels + i % channels] * expected[static_cast<std::size_t>(i)];
        results.compare(output[i], gated, 1e-5 + (dtype == FLOAT32 ? 0 : std::fabs(gated) * 0x1p-7));
    }
    convolved.compare(tail, results);
    results.require(output.intact() && tail.intact(), "memory behind an array was written");
}

inline void test_states() {
    for (int dtype : {FLOAT32, BFLOAT16}) {
        test_delta(dtype);
        test_convolution(dtype);
    }
}
