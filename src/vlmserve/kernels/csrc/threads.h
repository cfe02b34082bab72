// Threads that share the work of a kernel, and memory that they do not share.
#pragma once

#include "vector.h"

// Does the indices `first <= i < last` of what `context` describes, as `thread`: no two at a time have the same number.
typedef void (*Work)(const void* context, long first, long last, int thread);

enum class Order {
    RANGES,  // each thread begins with a range of its own, so that it meets the same weights in each step
    QUEUE,   // one index after the other, for work of unequal size
};

// What threads will read next: of each span, thread t `bytes` from `begin` + t * `stride` on.
struct Ahead {
    struct Span {
        const char* begin = nullptr;
        long stride = 0, bytes = 0;
    };
    Span spans[2];
};

// Does all indices `0 <= i < count` by the calling thread and up to `threads - 1` others, and returns when they are done.
// A thread that is late, because something else computes on its core, is not waited for: the others do its share. ahead: what
// the others ask memory for when nothing is left to do, until there is.
void share_work(int threads, long count, Order order, Work work, const void* context, Ahead ahead = {});

namespace {

// How much a thread should have to do, in elements that it reads or writes: handing work over takes a microsecond.
constexpr long LEAST_WORK = 1 << 14;

// `body(first, last, thread)` for ranges of the indices; `each`: elements that one of them reads or writes, about.
template <class Body>
INLINE void each_range(int threads, long count, long each, const Body& body, Ahead ahead = {}) {
    long useful = larger(1, smaller(count, count * each / LEAST_WORK));
    share_work(static_cast<int>(smaller(threads, useful)), count, Order::RANGES,
               [](const void* context, long first, long last, int thread) {
                   (*static_cast<const Body*>(context))(first, last, thread);
               }, &body, ahead);
}

// `body(i, thread)` for each index, the first ones first.
template <class Body>
INLINE void each_in_turn(int threads, long count, const Body& body) {
    share_work(static_cast<int>(smaller(threads, count)), count, Order::QUEUE,
               [](const void* context, long first, long last, int thread) {
                   for (long i = first; i < last; ++i) (*static_cast<const Body*>(context))(i, thread);
               }, &body);
}

INLINE long cache_lines(long bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace
