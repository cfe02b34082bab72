// Gated short convolutions: C * convolution(B * x) of rows [B | C | x], per channel.
#pragma once

#include "states.h"
#include "threads.h"

namespace {

// Channels that a thread computes at once.
constexpr long CONVOLVED_CHANNELS = 128;

// A segment's inputs of the convolution, B * x, rounded as in tails.
template <class T>
struct GatedInputs {
    Inputs<T> rows;
    long gated;  // elements from B to x

    f32v load_tap(const T* row, long before, long column, long count) const {
        f32v input = load_some(row + column, count);
        if (before < 0) return input;
        T rounded[LANES];
        store(rounded, input * load_some(row + gated + column, count));
        return load(rounded);
    }
};

// `size` channels of a segment, from `first` on.
template <class T>
void convolve_segment(const ConvolutionArgs& args, const Segment& segment, long first, long size) {
    const long width = 3 * args.channels, of_slot = (args.kernel - 1) * args.channels;
    const T* mixed = static_cast<const T*>(args.mixed) + segment.first * width + first;
    const T* tail = slot_of(static_cast<const T*>(args.tail), segment.source, of_slot);
    T* kept = slot_of(static_cast<T*>(args.tail), segment.target, of_slot) + first;
    T* drafts = args.drafts ? static_cast<T*>(args.drafts) + segment.kept * args.channels + first : nullptr;
    const GatedInputs<T> inputs{{mixed, width, tail ? tail + first : nullptr, args.channels, args.kernel, drafts, args.channels,
                                 segment.accepted},
                                2 * args.channels};
    T* output = static_cast<T*>(args.output) + segment.first * args.channels + first;
    const long rows = segment.last - segment.first;
    const T* taps[MAX_KERNEL];
    for (long row = 0; row < rows; ++row, output += args.channels) {
        find_taps(inputs.rows, row, taps);
        for (long column = 0; column < size; column += LANES) {
            long count = smaller(LANES, size - column);
            f32v sum{};
            for (long tap = 0; tap < args.kernel; ++tap)
                if (taps[tap])
                    sum += inputs.load_tap(taps[tap], row + tap - (args.kernel - 1), column, count) *
                           load_some(args.weight + tap * args.channels + first + column, count);
            store_some(output + column, sum * load_some(mixed + row * width + args.channels + column, count), count);
        }
    }
    auto keep = [&](long row, T* to) {
        const T* from = inputs.rows.at(row);
        for (long column = 0; column < size; column += LANES) {
            long count = smaller(LANES, size - column);
            store_some(to + column, from ? inputs.load_tap(from, row, column, count) : f32v{}, count);
        }
    };
    const long reached = rows - segment.drafts;
    for (long place = 0; place < args.kernel - 1; ++place)
        keep(reached + place - (args.kernel - 1), kept + place * args.channels);
    for (long draft = 0; draft < segment.drafts; ++draft) keep(reached + draft, drafts + draft * args.channels);
}

template <class T>
void run_convolution(const ConvolutionArgs& args) {
    const long parts = (args.channels + CONVOLVED_CHANNELS - 1) / CONVOLVED_CHANNELS, items = args.rows.count * parts;
    const long each = args.kernel * CONVOLVED_CHANNELS * (num_rows(args.rows) / larger(1, args.rows.count) + 1);
    each_range(args.threads, items, each, [&](long item, long last, int) {
        for (; item < last; ++item) {
            long sequence = item / parts, first = item % parts * CONVOLVED_CHANNELS;
            for (long i = args.rows.sequences[sequence]; i < args.rows.sequences[sequence + 1]; ++i)
                convolve_segment<T>(args, Segment(args.rows, i), first, smaller(CONVOLVED_CHANNELS, args.channels - first));
        }
    });
}

void convolution(const ConvolutionArgs& args) {
    if (args.dtype == FLOAT32)
        run_convolution<float>(args);
    else
        run_convolution<bf16>(args);
}

}  // namespace
