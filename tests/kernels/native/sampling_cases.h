// Drawing tokens.
#pragma once

#include <algorithm>
#include <numeric>

#include "numbers.h"

struct Limits {
    float temperature, top_p, min_p;
    long top_k;
};

// The tokens that may be drawn with a number, allowing for sums in float32.
class Draw {
public:
    Draw(const float* logits, long count, const Limits& limits) : weights_(static_cast<std::size_t>(count)) {
        double most = static_cast<double>(*std::max_element(logits, logits + count));
        for (std::size_t i = 0; i < weights_.size(); ++i)
            weights_[i] = std::exp((static_cast<double>(logits[i]) - most) / static_cast<double>(limits.temperature));
        std::vector<std::size_t> order(weights_.size());
        std::iota(order.begin(), order.end(), 0u);
        std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return weights_[a] > weights_[b]; });
        std::size_t kept = limits.top_k > 0 ? std::min(order.size(), static_cast<std::size_t>(limits.top_k)) : order.size();
        double total = 0, mass = 0;
        for (std::size_t i = 0; i < kept; ++i) total += weights_[order[i]];
        std::vector<bool> keep(weights_.size());
        for (std::size_t i = 0; i < kept; ++i) {
            // The cut must not be so close that rounding decides.
            double wanted = static_cast<double>(limits.top_p) * total;
            near_ = near_ || (limits.top_p < 1 && std::fabs(mass - wanted) < 1e-5 * total);
            if (limits.top_p < 1 && mass >= wanted) break;
            mass += weights_[order[i]];
            keep[order[i]] = weights_[order[i]] >= static_cast<double>(limits.min_p);
        }
        for (std::size_t i = 0; i < weights_.size(); ++i) {
            if (!keep[i]) weights_[i] = 0;
            sum_ += weights_[i];
        }
    }

    // Whether the cut is where rounding decides.
    bool undecided() const { return near_; }

    bool may_be(std::int64_t token, double number) const {
        if (token < 0 || token >= static_cast<std::int64_t>(weights_.size())) return false;
        auto place = weights_.begin() + token;
        double before = std::accumulate(weights_.begin(), place, 0.0), slack = 1e-5 * sum_;
        return *place > 0 && before - slack <= number * sum_ && number * sum_ <= before + *place + slack;
    }

private:
    std::vector<double> weights_;
    double sum_ = 0;
    bool near_ = false;
};

// Rows of logits and what is drawn from each.
struct Rows {
    long rows, vocabulary;
    std::vector<float> logits, temperatures, top_ps, min_ps;
    std::vector<long> top_ks;
    std::vector<double> numbers;
    std::vector<std::int64_t> tokens;

    Rows(long rows, long vocabulary, const Limits& limits, Random& random) : rows(rows), vocabulary(vocabulary) {
        auto count = static_cast<std::size_t>(rows);
        for (long i = 0; i < rows * vocabulary; ++i) logits.push_back(static_cast<float>(8 * random.symmetric()));
        temperatures.assign(count, limits.temperature);
        top_ps.assign(count, limits.top_p);
        min_ps.assign(count, limits.min_p);
        top_ks.assign(count, limits.top_k);
        for (long i = 0; i < rows; ++i) numbers.push_back(random.uniform());
        tokens.assign(count, -2);
    }

    bool draw() {
        SamplingArgs args = {logits.data(),  temperatures.data(), top_ps.data(), min_ps.data(), top_ks.data(),
                             numbers.data(), tokens.data(),       nullptr,       rows,          vocabulary,   2};
        Memory scratch(kernels->sampling_scratch(args), 0xff);
        args.scratch = scratch.data();
        kernels->sampling(args);
        return scratch.intact();
    }
};

inline void test_drawing(const char* name, const Limits& limits, long vocabulary) {
    Random random(static_cast<std::uint64_t>(vocabulary));
    Case results("sampling: " + std::string(name) + " of " + std::to_string(vocabulary));
    Rows all(24, vocabulary, limits, random);
    results.require(all.draw(), "memory behind the scratch was written");
    for (long row = 0; row < all.rows; ++row) {
        auto place = static_cast<std::size_t>(row);
        Draw draw(all.logits.data() + row * vocabulary, vocabulary, limits);
        if (draw.undecided()) continue;
        results.require(draw.may_be(all.tokens[place], all.numbers[place]), "another token was drawn");
    }
}

// The first of the highest; nothing from what is not a number.
inline void test_highest() {
    Random random(3);
    Case results("sampling: the highest");
    Rows all(4, 71, {0, 1, 0, 0}, random);
    all.logits[50] = all.logits[69] = 9;
    all.logits[71 + 70] = 9;
    all.logits[2 * 71 + 70] = NAN;
    all.logits[3 * 71 + 4] = INFINITY;
    all.draw();
    const std::int64_t expected[] = {50, 70, -1, -1};
    for (std::size_t row = 0; row < 4; ++row)
        results.require(all.tokens[row] == expected[row], "another token was drawn");
}

inline void test_sampling() {
    for (long vocabulary : {1L, 37L, 1001L}) {
        test_drawing("all", {0.7f, 1, 0, 0}, vocabulary);
        test_drawing("top 5", {1, 1, 0, 5}, vocabulary);
        test_drawing("top-p 0.6", {1.3f, 0.6f, 0, 0}, vocabulary);
        test_drawing("top 20, top-p 0.9, min-p 0.05", {1, 0.9f, 0.05f, 20}, vocabulary);
    }
    test_highest();
}
