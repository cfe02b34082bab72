// Draws tokens from logits that temperature, top-k, top-p and min-p restrict, without sorting them.
//
// Divided by the temperature and less their maximum, all scores are zero or negative, so that the bits of their sizes, read
// as integers, order them. Where top-k and top-p cut is found digit by digit: a histogram over the highest bits says in
// which bin the cut lies, one over the next bits of that bin's scores where in there, and a third one exactly.
#pragma once

#include "table.h"
#include "threads.h"
#include "vector.h"

namespace {

constexpr long BINS = 2048;
constexpr long SUM_CHUNK = 256;

struct Bin {
    double mass;
    long count;
};

// The lowest score that is kept, by its size; what is kept above it.
struct Cut {
    std::uint32_t size;
    double mass;
    long count;
};

constexpr std::uint32_t ALL_SIZES = 0x7f800000;  // of infinity

INLINE std::uint32_t size_bits(float score) { return bit_cast<std::uint32_t>(score) & 0x7fffffffu; }

// The first score, from the highest one down, with which `enough(count, mass)` of what is kept holds, of those whose size
// is at most `limit`. If it never does, all are kept.
template <class Enough>
Cut find_cut(const float* scores, const float* weights, long count, std::uint32_t limit, Bin* bins, Enough enough) {
    constexpr int SHIFTS[4] = {31, 20, 9, 0};
    Cut cut = {0, 0, 0};
    for (int level = 1; level < 4; ++level) {
        int shift = SHIFTS[level], before = SHIFTS[level - 1];
        long num_bins = 1L << (before - shift), bin = 0;
        for (long i = 0; i < num_bins; ++i) bins[i] = {0, 0};
        for (long i = 0; i < count; ++i) {
            std::uint32_t size = size_bits(scores[i]);
            if (size > limit || size >> before != cut.size >> before) continue;
            Bin& place = bins[(size >> shift) & static_cast<std::uint32_t>(num_bins - 1)];
            place.mass += static_cast<double>(weights[i]);
            ++place.count;
        }
        for (; bin < num_bins; ++bin) {
            if (bins[bin].count && enough(cut.count + bins[bin].count, cut.mass + bins[bin].mass)) break;
            cut.count += bins[bin].count;
            cut.mass += bins[bin].mass;
        }
        if (bin == num_bins) return {limit, cut.mass, cut.count};
        cut.size |= static_cast<std::uint32_t>(bin) << shift;
    }
    return cut;
}

// The first of the highest logits.
INLINE long first_of(const float* logits, long count, float highest) {
    for (long i = 0; i < count; i += LANES) {
        long end = smaller(count, i + LANES);
        if (end - i == LANES) {
            i32v equal = load(logits + i) == highest;
            if (!sum(equal)) continue;
        }
        for (long j = i; j < end; ++j)
            if (logits[j] == highest) return j;
    }
    return -1;
}

// The number that is drawn, -1 if there is a NaN or no finite maximum. scores, weights: memory for the vocabulary, rounded up
// to a multiple of SUM_CHUNK.
long draw(const SamplingArgs& args, long row, float* scores, float* weights, Bin* bins) {
    const float* logits = args.logits + row * args.vocabulary;
    long count = args.vocabulary, padded = (count + SUM_CHUNK - 1) / SUM_CHUNK * SUM_CHUNK;
    f32v most = broadcast(-__builtin_inff());
    i32v numbers = most == most;
    for (long i = 0; i < count; i += LANES) {
        f32v value = load_some(logits + i, smaller(LANES, count - i));
        // The lanes after the last one are 0 and must not be the maximum.
        for (long lane = count - i; lane < LANES; ++lane) value[lane] = -__builtin_inff();
        numbers &= value == value;
        most = maximum(most, value);
    }
    float highest = largest(most);
    for (int lane = 0; lane < LANES; ++lane)
        if (!numbers[lane]) return -1;
    if (!(highest > -__builtin_inff() && highest < __builtin_inff())) return -1;
    if (args.temperatures[row] == 0) return first_of(logits, count, highest);

    for (long i = 0; i < padded; i += LANES) {
        f32v score = broadcast(-__builtin_inff());
        if (i + LANES <= count)
            score = (load(logits + i) - highest) / args.temperatures[row];
        else
            for (long lane = 0; lane < count - i; ++lane) score[lane] = (logits[i + lane] - highest) / args.temperatures[row];
        store(scores + i, score);
        store(weights + i, exponential(score));
    }

    std::uint32_t limit = ALL_SIZES;
    double total = -1;
    long top_k = args.top_ks[row];
    if (top_k > 0 && top_k < count) {
        Cut cut = find_cut(scores, weights, count, limit, bins, [&](long kept, double) { return kept >= top_k; });
        limit = cut.size;
        // Of those that tie with the last one, as many as there is room for.
        float last = exponential(broadcast(-bit_cast<float>(limit)))[0];
        total = cut.mass + static_cast<double>(top_k - cut.count) * static_cast<double>(last);
    }
    if (args.top_ps[row] < 1) {
        if (total < 0) {
            total = 0;
            for (long i = 0; i < count; ++i) total += static_cast<double>(weights[i]);
        }
        double wanted = static_cast<double>(args.top_ps[row]) * total;
        limit = find_cut(scores, weights, count, limit, bins, [&](long, double mass) { return mass >= wanted; }).size;
    }

    // Sums of chunks first: the one in which the number lies is all that is added up token by token.
    double sum_so_far = 0;
    for (long chunk = 0; chunk < padded; chunk += SUM_CHUNK) {
        f32v sums{};
        for (long i = chunk; i < chunk + SUM_CHUNK; i += LANES) {
            f32v weight = load(weights + i), score = load(scores + i);
            i32v kept = (-score <= bit_cast<float>(limit)) & (weight >= args.min_ps[row]);
            weight = choose(kept, weight, f32v{});
            store(weights + i, weight);
            sums += weight;
        }
        sum_so_far += static_cast<double>(sum(sums));
        // Nobody reads the scores of a chunk again.
        __builtin_memcpy(scores + chunk, &sum_so_far, sizeof sum_so_far);
    }
    double target = args.numbers[row] * sum_so_far, before = 0;
    long chunk = 0;
    for (; chunk + SUM_CHUNK < padded; chunk += SUM_CHUNK) {
        double end;
        __builtin_memcpy(&end, scores + chunk, sizeof end);
        if (end > target) break;
        before = end;
    }
    // Rounding may carry the number past a chunk's last token that is kept: then it is that one.
    long last = -1;
    for (long i = chunk; i < chunk + SUM_CHUNK; ++i) {
        if (weights[i] <= 0) continue;
        last = i;
        before += static_cast<double>(weights[i]);
        if (before > target) break;
    }
    for (long i = chunk; last < 0 && i-- > 0;)
        if (weights[i] > 0) last = i;
    return last;
}

INLINE long sampling_bytes(const SamplingArgs& args) {
    long padded = (args.vocabulary + SUM_CHUNK - 1) / SUM_CHUNK * SUM_CHUNK;
    return cache_lines(2 * padded * static_cast<long>(sizeof(float)) + BINS * static_cast<long>(sizeof(Bin)));
}

long sampling_scratch(const SamplingArgs& args) { return args.threads * sampling_bytes(args); }

void sampling(const SamplingArgs& args) {
    long padded = (args.vocabulary + SUM_CHUNK - 1) / SUM_CHUNK * SUM_CHUNK;
    each_in_turn(args.threads, args.rows, [&](long row, int thread) {
        auto* scores = reinterpret_cast<float*>(static_cast<char*>(args.scratch) + thread * sampling_bytes(args));
        float* weights = scores + padded;
        args.tokens[row] = draw(args, row, scores, weights, reinterpret_cast<Bin*>(weights + padded));
    });
}

}  // namespace
