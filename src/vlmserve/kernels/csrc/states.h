// Shared code of layers with states: segments of a step, and causal convolutions that start from a slot's tail.
#pragma once

#include "table.h"
#include "vector.h"

namespace {

// Rows `first <= row < last` of one sequence, with the slots of the states before and after. source below 0: zeros.
// `accepted` rows of `StateRows.drafts`, from `kept` on, precede them; the last `drafts` rows change no state.
struct Segment {
    long first, last, source, target, position, kept = 0, accepted = 0, drafts = 0;

    Segment(const StateRows& rows, long i)
        : first(rows.starts[i]), last(rows.starts[i + 1]), source(rows.sources[i]), target(rows.targets[i]), position(rows.positions[i]) {
        if (!rows.drafts) return;
        kept = rows.drafts[3 * i];
        accepted = rows.drafts[3 * i + 1];
        drafts = rows.drafts[3 * i + 2];
    }
};

INLINE long num_rows(const StateRows& rows) { return rows.starts[rows.sequences[rows.count]]; }

// The memory of a slot; null for zeros.
template <class T>
INLINE T* slot_of(T* slots, long slot, long size) {
    return slot < 0 ? nullptr : slots + slot * size;
}

// Some channels of a convolution's inputs. A tail is [kernel - 1][channels], oldest first.
template <class T>
struct Inputs {
    const T* rows;  // the segment's first row
    long stride;    // elements from row to row
    const T* tail;  // inputs before accepted drafts; null: zeros
    long channels;  // of a tail
    long kernel;
    const T* drafts;  // the first accepted draft
    long draft_stride, accepted;

    // Row `row` of the segment, or an earlier row if negative; null: zeros.
    const T* at(long row) const {
        if (row >= 0) return rows + row * stride;
        row += accepted;
        if (row >= 0) return drafts + row * draft_stride;
        return tail ? tail + (kernel - 1 + row) * channels : nullptr;
    }
};

// The rows that a convolution reads, oldest first.
template <class T>
INLINE void find_taps(const Inputs<T>& inputs, long row, const T** taps) {
    for (long tap = 0; tap < inputs.kernel; ++tap) taps[tap] = inputs.at(row + tap - (inputs.kernel - 1));
}

// Writes the tail after `count` rows, possibly over the previous tail.
template <class T>
void keep_tail(const Inputs<T>& inputs, long count, T* tail, long size) {
    for (long row = 0; row < inputs.kernel - 1; ++row) {
        const T* from = inputs.at(count + row - (inputs.kernel - 1));
        T* to = tail + row * inputs.channels;
        if (!from)
            __builtin_memset(to, 0, static_cast<std::size_t>(size) * sizeof(T));
        else if (from != to)
            __builtin_memcpy(to, from, static_cast<std::size_t>(size) * sizeof(T));
    }
}

}  // namespace
