// The thread pool behind `share_work`, compiled once for every processor.
//
// The calling thread publishes work and takes part. Threads claim indices by a compare-and-swap on a word that includes the
// work's number, so latecomers claim nothing. A thread that finishes its range claims indices of others. The caller only waits
// for claimed indices. Waiting threads spin for some microseconds, which is faster than waking up, then sleep, because they may
// occupy the core that they wait for. If the caller waits longer than it would take alone, it computes alone for a while.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <pthread.h>
#include <time.h>

#include "threads.h"

namespace {

// Maximum threads, including the caller.
constexpr int MOST_THREADS = 256;
constexpr std::chrono::microseconds SPIN{30};
// Spin time if work last arrived this soon: between steps of a small model, Python takes this long.
constexpr std::chrono::microseconds STEP_SPIN{200};
// Period over which waits and work are compared, and for which the caller then computes alone.
constexpr std::chrono::milliseconds WINDOW{10}, ALONE{100};
// A word of claims: the work's number, and the claimed indices of a range.
constexpr int INDEX_BITS = 28;
constexpr std::uint64_t INDEX_MASK = (std::uint64_t{1} << INDEX_BITS) - 1;
// Bytes to prefetch between checks for work.
constexpr long AHEAD_STEP = 512;
// A claim takes this fraction of the rest of a range.
constexpr long CLAIM_SHARE = 4;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

typedef std::chrono::steady_clock Clock;

// CPU time of the calling thread.
Clock::duration cpu_time() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// Waits until `done()` is true, at most `time`. Returns whether it is.
template <class Done>
bool spin_until(std::chrono::microseconds time, Done done) {
    auto end = Clock::now() + time;
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            relax();
        }
    } while (Clock::now() < end);
    return done();
}

struct Job {
    Work work;
    const void* context;
    long count;
    int threads, ranges;
    Ahead ahead;

    long range_start(int range) const { return count * range / ranges; }
};

// Compares how long a caller waits for other threads with how long it computes.
class Patience {
public:
    // Whether to compute alone now.
    bool is_lost() {
        if (alone_until_ == Clock::time_point{}) return false;
        if (Clock::now() < alone_until_) return true;
        alone_until_ = {};
        begin(Clock::now());
        return false;
    }

    void waited(Clock::duration time, int threads) {
        Clock::time_point now = Clock::now();
        waits_ += time;
        if (!pthread_equal(caller_, pthread_self())) return begin(now);
        if (now - start_ < WINDOW) return;
        // At this share of waiting, all threads together are no faster than this one alone.
        if (waits_ > (cpu_time() - cpu_) * (threads - 1)) alone_until_ = now + ALONE;
        begin(now);
    }

private:
    void begin(Clock::time_point now) {
        start_ = now;
        cpu_ = cpu_time();
        waits_ = {};
        caller_ = pthread_self();
    }

    Clock::time_point start_{}, alone_until_{};
    Clock::duration cpu_{}, waits_{};
    pthread_t caller_{};
};

class Pool {
public:
    void run(const Job& job) {
        if (patience_.is_lost()) return job.work(job.context, 0, job.count, 0);
        start_threads(job.threads - 1);
        remaining_.store(job.count, std::memory_order_relaxed);
        std::uint64_t number = publish(job);
        finish(take_part(job, number, 0));
        if (is_done()) return;
        read_ahead(job.ahead, 0, [&] { return is_done(); });
        Clock::time_point start = Clock::now();
        if (spin_until(SPIN, [&] { return is_done(); })) return;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            caller_sleeps_.store(true);
            done_.wait(lock, [&] { return is_done(); });
            caller_sleeps_.store(false);
        }
        patience_.waited(Clock::now() - start, job.threads);
    }

    std::atomic<bool> busy{false};

private:
    bool is_done() const { return remaining_.load() == 0; }

    // If threads cannot be started, there are fewer. The caller can do everything alone.
    void start_threads(int wanted) {
        for (; num_threads_ < wanted; ++num_threads_) {
            auto* start = new (std::nothrow) Start{this, num_threads_ + 1};
            pthread_t thread;
            if (!start || pthread_create(&thread, nullptr, begin, start) != 0) {
                delete start;
                return;
            }
            pthread_detach(thread);
        }
    }

    struct Start {
        Pool* pool;
        int thread;
    };

    static void* begin(void* argument) {
        Start start = *static_cast<Start*>(argument);
        delete static_cast<Start*>(argument);
        start.pool->serve(start.thread);
        return nullptr;
    }

    // While the number is odd, the job is being written.
    std::uint64_t publish(const Job& job) {
        std::uint64_t number = number_.load(std::memory_order_relaxed) + 1;
        number_.store(number, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        work_.store(job.work, std::memory_order_relaxed);
        context_.store(job.context, std::memory_order_relaxed);
        count_.store(job.count, std::memory_order_relaxed);
        threads_.store(job.threads, std::memory_order_relaxed);
        ranges_.store(job.ranges, std::memory_order_relaxed);
        for (int i = 0; i < 2; ++i) spans_[i].store(job.ahead.spans[i]);
        number_.store(++number);
        if (threads_sleep_.load() && threads_sleep_.exchange(false)) {
            { std::lock_guard<std::mutex> lock(mutex_); }  // threads that announced sleep are asleep now
            published_.notify_all();
        }
        return number;
    }

    // Reads the published job. Returns its number, or 0 if it changes meanwhile.
    std::uint64_t read(Job& job) const {
        std::uint64_t number = number_.load(std::memory_order_acquire);
        job.work = work_.load(std::memory_order_relaxed);
        job.context = context_.load(std::memory_order_relaxed);
        job.count = count_.load(std::memory_order_relaxed);
        job.threads = threads_.load(std::memory_order_relaxed);
        job.ranges = ranges_.load(std::memory_order_relaxed);
        for (int i = 0; i < 2; ++i) job.ahead.spans[i] = spans_[i].load();
        std::atomic_thread_fence(std::memory_order_acquire);
        return number % 2 == 0 && number_.load(std::memory_order_relaxed) == number ? number : 0;
    }

    template <class Done>
    void sleep_until(Done is_new) {
        std::unique_lock<std::mutex> lock(mutex_);
        // Set before each wait, because the caller may wake a thread for a job that it has already seen.
        for (threads_sleep_.store(true); !is_new(); threads_sleep_.store(true)) published_.wait(lock);
    }

    void serve(int thread) {
        bool comes_soon = false;
        for (std::uint64_t seen = 0;;) {
            auto is_new = [&] { return number_.load() > seen; };
            if (!spin_until(SPIN, is_new)) {
                Clock::time_point start = Clock::now();
                if (!comes_soon || !spin_until(STEP_SPIN, is_new)) sleep_until(is_new);
                comes_soon = Clock::now() - start < STEP_SPIN;
            }
            Job job;
            std::uint64_t number = read(job);
            if (number <= seen) continue;
            seen = number;
            if (thread >= job.threads) continue;
            finish(take_part(job, number, thread));
            read_ahead(job.ahead, thread, [&] { return number_.load(std::memory_order_relaxed) != number; });
        }
    }

    // Prefetches a thread's next data until `done()`.
    template <class Done>
    static void read_ahead(const Ahead& ahead, int thread, Done done) {
        for (const Ahead::Span& span : ahead.spans) {
            const char* from = span.begin + span.stride * thread;
            for (long place = 0; place < span.bytes && !done(); place += AHEAD_STEP)
                for (long line = place; line < place + AHEAD_STEP; line += 64) __builtin_prefetch(from + line, 0, 2);
        }
    }

    // Claims indices `first <= i < last` of a range. Returns false if none are left, or the job is over.
    bool claim(const Job& job, std::uint64_t number, int range, long& first, long& last) {
        long start = job.range_start(range), size = job.range_start(range + 1) - start;
        std::uint64_t word = claims_[range].word.load(std::memory_order_relaxed);
        for (;;) {
            if (word >> INDEX_BITS > number) return false;
            long claimed = word >> INDEX_BITS == number ? static_cast<long>(word & INDEX_MASK) : 0;
            if (claimed >= size) return false;
            long taken = job.ranges == 1 ? 1 : larger(1, (size - claimed) / CLAIM_SHARE);
            std::uint64_t next = number << INDEX_BITS | static_cast<std::uint64_t>(claimed + taken);
            if (claims_[range].word.compare_exchange_weak(word, next, std::memory_order_acq_rel, std::memory_order_relaxed)) {
                first = start + claimed;
                last = first + taken;
                return true;
            }
        }
    }

    // Works until nothing is left to claim. Returns the number of indices done.
    long take_part(const Job& job, std::uint64_t number, int thread) {
        long done = 0, first, last;
        for (int i = 0; i < job.ranges; ++i)
            while (claim(job, number, (thread + i) % job.ranges, first, last)) {
                job.work(job.context, first, last, thread);
                done += last - first;
            }
        return done;
    }

    void finish(long done) {
        if (done == 0 || remaining_.fetch_sub(done) != done || !caller_sleeps_.load()) return;
        { std::lock_guard<std::mutex> lock(mutex_); }
        done_.notify_one();
    }

    struct SharedSpan {
        std::atomic<const char*> begin{nullptr};
        std::atomic<long> stride{0}, bytes{0};

        void store(const Ahead::Span& span) {
            begin.store(span.begin, std::memory_order_relaxed);
            stride.store(span.stride, std::memory_order_relaxed);
            bytes.store(span.bytes, std::memory_order_relaxed);
        }
        Ahead::Span load() const {
            return {begin.load(std::memory_order_relaxed), stride.load(std::memory_order_relaxed), bytes.load(std::memory_order_relaxed)};
        }
    };

    struct alignas(64) Claims {
        std::atomic<std::uint64_t> word{0};
    };

    // The caller writes these once per job; other threads poll them.
    alignas(64) std::atomic<std::uint64_t> number_{0};
    std::atomic<Work> work_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<long> count_{0};
    std::atomic<int> threads_{0}, ranges_{0};
    SharedSpan spans_[2];
    alignas(64) std::atomic<long> remaining_{0};
    alignas(64) std::atomic<bool> threads_sleep_{false}, caller_sleeps_{false};
    Claims claims_[MOST_THREADS];
    std::mutex mutex_;
    std::condition_variable published_, done_;
    int num_threads_ = 0;  // started threads
    Patience patience_;
};

// Never destroyed, because its threads run until the process ends.
std::atomic<Pool*> the_pool{nullptr};

// A forked child only has the forking thread, so it starts over.
void forget_pool() { the_pool.store(nullptr); }

Pool& pool() {
    Pool* found = the_pool.load(std::memory_order_acquire);
    if (found) return *found;
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    (void)registered;
    auto* made = new Pool;
    if (the_pool.compare_exchange_strong(found, made)) return *made;
    delete made;
    return *found;
}

}  // namespace

void share_work(int threads, long count, Order order, Work work, const void* context, Ahead ahead) {
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    if (threads > 1 && count > 1 && static_cast<std::uint64_t>(count) < INDEX_MASK) {
        Pool& shared = pool();
        // With simultaneous calls, the first uses the pool, and the others compute alone.
        if (!shared.busy.exchange(true, std::memory_order_acquire)) {
            shared.run({work, context, count, threads, order == Order::QUEUE ? 1 : threads, ahead});
            shared.busy.store(false, std::memory_order_release);
            return;
        }
    }
    if (count > 0) work(context, 0, count, 0);
}
