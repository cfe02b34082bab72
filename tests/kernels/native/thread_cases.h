// Threads share work: every index is done once, whoever calls, and however many call at a time.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "numbers.h"
#include "threads.h"

namespace {

// Whether every index of many jobs is done once, and no two threads have the same number at a time.
bool shares_all(unsigned seed, int jobs) {
    struct Context {
        std::vector<int> done = std::vector<int>(5000), at_work = std::vector<int>(8 * 16);
        std::vector<int> clashes = std::vector<int>(8 * 16);
    } context;
    for (int job = 0; job < jobs; ++job) {
        seed = seed * 1664525 + 1013904223;
        long count = job % 100 ? seed >> 16 & 127 : 5000;
        int threads = 1 + static_cast<int>(seed >> 24 & 7);
        std::fill(context.done.begin(), context.done.end(), 0);
        // Whatever is read ahead changes nothing.
        Ahead ahead;
        const char* memory = reinterpret_cast<const char*>(context.done.data());
        if (job % 3) ahead.spans[0] = {memory, 1000, 10000};
        if (job % 5) ahead.spans[1] = {memory, 0, 64};
        share_work(threads, count, job % 2 ? Order::RANGES : Order::QUEUE,
                   [](const void* shared, long first, long last, int thread) {
                       auto& all = *static_cast<Context*>(const_cast<void*>(shared));
                       std::size_t own = static_cast<std::size_t>(thread) * 16;
                       if (all.at_work[own]++) ++all.clashes[own];
                       for (long i = first; i < last; ++i) ++all.done[static_cast<std::size_t>(i)];
                       --all.at_work[own];
                   }, &context, ahead);
        for (long i = 0; i < 5000; ++i)
            if (context.done[static_cast<std::size_t>(i)] != (i < count)) return false;
    }
    for (int clashes : context.clashes)
        if (clashes) return false;
    return true;
}

void test_threads() {
    Case results("threads");
    results.require(shares_all(1, 3000), "one caller: an index was not done once");
    bool right[4] = {};
    std::vector<std::thread> callers;
    for (unsigned i = 0; i < 4; ++i) callers.emplace_back([&right, i] { right[i] = shares_all(i + 2, 3000); });
    bool children = true;
#if defined(__x86_64__)  // the emulator that runs the other builds fails when a process with threads forks
    // A child has none of the threads that its parent computes with at this moment.
    for (unsigned i = 0; i < 5; ++i) {
        pid_t child = fork();
        if (child == 0) _exit(shares_all(i + 9, 100) ? 0 : 1);
        int status = 1;
        children = children && child > 0 && waitpid(child, &status, 0) == child && status == 0;
    }
#endif
    for (std::thread& caller : callers) caller.join();
    for (bool one : right) results.require(one, "four callers: an index was not done once");
    results.require(children, "a child process cannot share work");
}

}  // namespace
