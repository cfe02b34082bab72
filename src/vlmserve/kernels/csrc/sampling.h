// Samples tokens with temperature, top-k, top-p and min-p, without sorting.
//
// Scores are logits minus their maximum, divided by the temperature, so they are at most 0, and the bits of their absolute
// values order them as integers. The cutoff of top-k and top-p is found digit by digit: a histogram of the highest bits finds
// the bin, one of the next bits finds the place within the bin, and a third one is exact.
#pragma once

#include "table.h"
#include "threads.h"
#include "vector.h"

namespace {

constexpr long BINS = 2048;
// Scores alternate between them, because repeated additions to one number wait for memory.
constexpr long HISTOGRAMS = 4;
constexpr long SUM_CHUNK = 256;

struct Bin {
    double mass;
    long count;
};

// The lowest kept score as an absolute value, and the mass above it.
struct Cut {
    std::uint32_t size;
    double mass;
    long count;
};

constexpr std::uint32_t ALL_SIZES = 0x7f800000;  // of infinity

INLINE std::uint32_t size_bits(float score) { return bit_cast<std::uint32_t>(score) & 0x7fffffffu; }

// Returns the first score, descending, where `enough(count, mass)` of the kept tokens holds, among absolute values up to
// `limit`. If it never holds, all are kept. scores: padded with -inf to a multiple of LANES.
template <class Enough>
Cut find_cut(const float* scores, const float* weights, long count, std::uint32_t limit, Bin* bins, Enough enough) {
    constexpr int SHIFTS[4] = {31, 20, 9, 0};
    Cut cut = {0, 0, 0};
    for (int level = 1; level < 4; ++level) {
        int shift = SHIFTS[level], before = SHIFTS[level - 1];
        long num_bins = 1L << (before - shift), bin = 0;
        const std::uint32_t above = cut.size >> before;
        for (long i = 0; i < HISTOGRAMS * num_bins; ++i) bins[i] = {0, 0};
        for (long start = 0; start < count; start += LANES) {
            i32v sizes = bit_cast<i32v>(load(scores + start)) & 0x7fffffff;
            if (level > 1 && !sum((sizes >> before) == static_cast<std::int32_t>(above))) continue;
            for (long i = start; i < smaller(count, start + LANES); ++i) {
                std::uint32_t size = size_bits(scores[i]);
                if (size > limit || size >> before != above) continue;
                long number = (size >> shift) & static_cast<std::uint32_t>(num_bins - 1);
                Bin& place = bins[HISTOGRAMS * number + i % HISTOGRAMS];
                place.mass += static_cast<double>(weights[i]);
                ++place.count;
            }
        }
        for (; bin < num_bins; ++bin) {
            Bin all = {0, 0};
            for (long i = 0; i < HISTOGRAMS; ++i) {
                all.mass += bins[HISTOGRAMS * bin + i].mass;
                all.count += bins[HISTOGRAMS * bin + i].count;
            }
            if (all.count && enough(cut.count + all.count, cut.mass + all.mass)) break;
            cut.count += all.count;
            cut.mass += all.mass;
        }
        if (bin == num_bins) return {limit, cut.mass, cut.count};
        cut.size |= static_cast<std::uint32_t>(bin) << shift;
    }
    return cut;
}

// A row's maximum logit, and its first token; NaN if any logit is.
struct Highest {
    float value;
    long token;
};

INLINE Highest highest_of(const float* logits, long count) {
    float highest = -__builtin_inff();
    long chunk = 0;
    i32v numbers = f32v{} == f32v{};
    for (long start = 0; start < count; start += SUM_CHUNK) {
        f32v most = broadcast(-__builtin_inff());
        for (long i = start; i < smaller(count, start + SUM_CHUNK); i += LANES) {
            f32v value = load_some(logits + i, smaller(LANES, count - i));
            // Lanes past the end are 0 and must not be the maximum.
            for (long lane = count - i; lane < LANES; ++lane) value[lane] = -__builtin_inff();
            numbers &= value == value;
            most = maximum(most, value);
        }
        if (float value = largest(most); value > highest) {
            highest = value;
            chunk = start;
        }
    }
    for (int lane = 0; lane < LANES; ++lane)
        if (!numbers[lane]) return {__builtin_nanf(""), -1};
    while (chunk < count && logits[chunk] != highest) ++chunk;
    return {highest, chunk};
}

// Logits minus the maximum, divided by the temperature. Padded with -inf.
INLINE f32v scaled_logits(const float* logits, long start, long count, float highest, float temperature) {
    if (start + LANES <= count) return (load(logits + start) - highest) / temperature;
    f32v scores = broadcast(-__builtin_inff());
    for (long lane = 0; lane < count - start; ++lane) scores[lane] = (logits[start + lane] - highest) / temperature;
    return scores;
}

// The token at a number in [0, 1). kept(i): weights of LANES tokens from i on. ends: memory for the chunks' cumulative sums.
// padded: tokens, a multiple of SUM_CHUNK.
template <class Kept>
long token_at(double number, long padded, double* ends, Kept kept) {
    // Sum chunks first. Only the chunk of the number is accumulated token by token.
    double total = 0;
    for (long chunk = 0; chunk < padded; chunk += SUM_CHUNK) {
        f32v sums{};
        for (long i = chunk; i < chunk + SUM_CHUNK; i += LANES) sums += kept(i);
        total += static_cast<double>(sum(sums));
        ends[chunk / SUM_CHUNK] = total;
    }
    double target = number * total;
    long chunk = 0;
    while (chunk + SUM_CHUNK < padded && ends[chunk / SUM_CHUNK] <= target) chunk += SUM_CHUNK;
    double before = chunk ? ends[chunk / SUM_CHUNK - 1] : 0;
    // Rounding may put the number after the last kept token, which is then chosen, from this chunk or an earlier one.
    long last = -1;
    for (; last < 0 && chunk >= 0; chunk -= SUM_CHUNK, target = __builtin_inf()) {
        float weights[SUM_CHUNK];
        for (long i = 0; i < SUM_CHUNK; i += LANES) store(weights + i, kept(chunk + i));
        for (long i = 0; i < SUM_CHUNK; ++i) {
            if (weights[i] <= 0) continue;
            last = chunk + i;
            before += static_cast<double>(weights[i]);
            if (before > target) break;
        }
    }
    return last;
}

INLINE long padded_vocabulary(const SamplingArgs& args) { return (args.vocabulary + SUM_CHUNK - 1) / SUM_CHUNK * SUM_CHUNK; }

// The sampled token, -1 if there is a NaN or no finite maximum. scores, weights: memory for the padded vocabulary.
long draw(const SamplingArgs& args, long row, float* scores, float* weights, double* ends, Bin* bins) {
    const float* logits = args.logits + row * args.vocabulary;
    const long count = args.vocabulary, padded = padded_vocabulary(args), top_k = args.top_ks[row];
    const Highest highest = highest_of(logits, count);
    if (!(highest.value > -__builtin_inff() && highest.value < __builtin_inff())) return -1;
    const float temperature = args.temperatures[row], min_p = args.min_ps[row];
    if (temperature == 0) return highest.token;

    const bool cuts_count = top_k > 0 && top_k < count, cuts_mass = args.top_ps[row] < 1;
    if (!cuts_count && !cuts_mass)
        return token_at(args.numbers[row], padded, ends, [&](long i) {
            f32v weight = exponential(scaled_logits(logits, i, count, highest.value, temperature));
            return choose(weight >= min_p, weight, f32v{});
        });

    double total = 0;
    for (long chunk = 0; chunk < padded; chunk += SUM_CHUNK) {
        f32v sums{};
        for (long i = chunk; i < chunk + SUM_CHUNK; i += LANES) {
            f32v score = scaled_logits(logits, i, count, highest.value, temperature), weight = exponential(score);
            store(scores + i, score);
            store(weights + i, weight);
            sums += weight;
        }
        total += static_cast<double>(sum(sums));
    }
    std::uint32_t limit = ALL_SIZES;
    if (cuts_count) {
        Cut cut = find_cut(scores, weights, count, limit, bins, [&](long kept, double) { return kept >= top_k; });
        limit = cut.size;
        // Ties with the last kept token, as many as fit.
        float last = exponential(broadcast(-bit_cast<float>(limit)))[0];
        total = cut.mass + static_cast<double>(top_k - cut.count) * static_cast<double>(last);
    }
    if (cuts_mass) {
        double wanted = static_cast<double>(args.top_ps[row]) * total;
        limit = find_cut(scores, weights, count, limit, bins, [&](long, double mass) { return mass >= wanted; }).size;
    }
    return token_at(args.numbers[row], padded, ends, [&](long i) {
        f32v weight = load(weights + i);
        i32v kept = (-load(scores + i) <= bit_cast<float>(limit)) & (weight >= min_p);
        return choose(kept, weight, f32v{});
    });
}

INLINE long sampling_bytes(const SamplingArgs& args) {
    long padded = padded_vocabulary(args);
    return cache_lines(2 * padded * static_cast<long>(sizeof(float)) + padded / SUM_CHUNK * static_cast<long>(sizeof(double)) +
                       HISTOGRAMS * BINS * static_cast<long>(sizeof(Bin)));
}

long sampling_scratch(const SamplingArgs& args) { return args.threads * sampling_bytes(args); }

void sampling(const SamplingArgs& args) {
    long padded = padded_vocabulary(args);
    each_in_turn(args.threads, args.rows, [&](long row, int thread) {
        auto* scores = reinterpret_cast<float*>(static_cast<char*>(args.scratch) + thread * sampling_bytes(args));
        float* weights = scores + padded;
        auto* bins = reinterpret_cast<Bin*>(weights + padded);
        args.tokens[row] = draw(args, row, scores, weights, reinterpret_cast<double*>(bins + HISTOGRAMS * BINS), bins);
    });
}

}  // namespace
