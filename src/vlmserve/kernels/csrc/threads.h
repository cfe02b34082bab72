// Shares a kernel's work among threads.
#pragma once

#include "vector.h"

// Processes indices `first <= i < last`. thread: a number that no other running thread has.
typedef void (*Work)(const void* context, long first, long last, int thread);

enum class Order {
    RANGES,  // each thread starts with its own range, so that it sees the same weights in each step
    QUEUE,   // one index after another, for work of unequal size
};

// What threads read next: of each span, thread t reads `bytes` from `begin` + t * `stride` on.
struct Ahead {
    struct Span {
        const char* begin = nullptr;
        long stride = 0, bytes = 0;
    };
    Span spans[2];
};

// Processes indices `0 <= i < count` on the calling thread and up to `threads - 1` others. Returns when all are done. It does
// not wait for late threads, whose core is busy: the others do their share. ahead: data to prefetch while threads wait for
// work.
void share_work(int threads, long count, Order order, Work work, const void* context, Ahead ahead = {});

namespace {

// Minimum work per thread, in elements read or written: handing work over takes a microsecond.
constexpr long LEAST_WORK = 1 << 14;

// Calls `body(first, last, thread)` for ranges of indices. each: approximate elements read or written per index.
template <class Body>
INLINE void each_range(int threads, long count, long each, const Body& body, Ahead ahead = {}) {
    long useful = larger(1, smaller(count, count * each / LEAST_WORK));
    share_work(static_cast<int>(smaller(threads, useful)), count, Order::RANGES,
               [](const void* context, long first, long last, int thread) {
                   (*static_cast<const Body*>(context))(first, last, thread);
               }, &body, ahead);
}

// Calls `body(i, thread)` for each index, in order.
template <class Body>
INLINE void each_in_turn(int threads, long count, const Body& body) {
    share_work(static_cast<int>(smaller(threads, count)), count, Order::QUEUE,
               [](const void* context, long first, long last, int thread) {
                   for (long i = first; i < last; ++i) (*static_cast<const Body*>(context))(i, thread);
               }, &body);
}

INLINE long cache_lines(long bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace
