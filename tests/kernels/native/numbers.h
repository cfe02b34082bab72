// Deterministic numbers, the types that kernels store, and how results are compared.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "table.h"

// The kernels that are tested.
inline const Kernels* kernels = nullptr;

// A generator whose numbers are the same on every machine (https://prng.di.unimi.it/splitmix64.c).
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u) {}

    std::uint64_t bits() {
        std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    long below(long end) { return static_cast<long>(bits() % static_cast<std::uint64_t>(end)); }
    double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
    double symmetric() { return 2 * uniform() - 1; }

private:
    std::uint64_t state_;
};

inline std::uint16_t to_bfloat16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float from_bfloat16(std::uint16_t value) {
    std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// Bytes on a cache line's border. What lies behind them is guarded: `intact` says whether anybody wrote there.
class Memory {
public:
    explicit Memory(long bytes, int fill = 0) : bytes_(static_cast<std::size_t>(bytes)) {
        begin_.reset(static_cast<unsigned char*>(std::aligned_alloc(64, (bytes_ + GUARD + 63) / 64 * 64)));
        if (!begin_) std::abort();
        std::memset(begin_.get(), fill, bytes_);
        std::memset(begin_.get() + bytes_, MARK, GUARD);
    }
    void* data() const { return begin_.get(); }
    bool intact() const {
        for (std::size_t i = 0; i < GUARD; ++i)
            if (begin_.get()[bytes_ + i] != MARK) return false;
        return true;
    }

private:
    static constexpr std::size_t GUARD = 256;
    static constexpr unsigned char MARK = 0xa5;
    struct Free {
        void operator()(unsigned char* memory) const { std::free(memory); }
    };
    std::size_t bytes_;
    std::unique_ptr<unsigned char, Free> begin_;
};

// Numbers as a kernel stores them; `[]` gives them as the reference computes with them. All bits are set at first, which is
// a NaN in both types.
class Numbers {
public:
    Numbers(int dtype, long count) : dtype_(dtype), memory_(count * (dtype == FLOAT32 ? 4 : 2), 0xff) {}
    Numbers(int dtype, long count, Random& random, double scale = 1) : Numbers(dtype, count) {
        for (long i = 0; i < count; ++i) set(i, static_cast<float>(scale * random.symmetric()));
    }

    double operator[](long i) const { return dtype_ == FLOAT32 ? floats()[i] : from_bfloat16(halves()[i]); }
    void set(long i, float value) {
        if (dtype_ == FLOAT32)
            floats()[i] = value;
        else
            halves()[i] = to_bfloat16(value);
    }
    void* at(long i) const {
        return dtype_ == FLOAT32 ? static_cast<void*>(floats() + i) : static_cast<void*>(halves() + i);
    }
    void* data() const { return memory_.data(); }
    bool intact() const { return memory_.intact(); }

private:
    float* floats() const { return static_cast<float*>(memory_.data()); }
    std::uint16_t* halves() const { return static_cast<std::uint16_t*>(memory_.data()); }

    int dtype_;
    Memory memory_;
};

// A value as `dtype` holds it.
inline double rounded(int dtype, double value) {
    return dtype == FLOAT32 ? static_cast<float>(value) : from_bfloat16(to_bfloat16(static_cast<float>(value)));
}

// One line of the output: how the largest error of a case relates to the largest that is allowed.
class Case {
public:
    explicit Case(std::string name) : name_(std::move(name)) {}
    ~Case() {
        bool good = failures_ == 0 && compared_ > 0;
        std::printf("%s %s: %ld compared, largest error %.3f of what is allowed%s%s\n", good ? "ok" : "FAILED",
                    name_.c_str(), compared_, worst_, what_.empty() ? "" : "; ", what_.c_str());
        failed() += !good;
    }
    Case(const Case&) = delete;
    Case& operator=(const Case&) = delete;

    void compare(double actual, double expected, double allowed) {
        double ratio = actual == expected ? 0 : std::fabs(actual - expected) / allowed;
        if (!(ratio <= worst_)) worst_ = ratio;
        ++compared_;
        if (ratio <= 1 || failures_++ > 0) return;
        char text[96];
        std::snprintf(text, sizeof text, "%.9g instead of %.9g (allowed: %.3g)", actual, expected, allowed);
        what_ = text;
    }
    void require(bool condition, const char* what) {
        ++compared_;
        if (!condition && failures_++ == 0) what_ = what;
    }

    static long& failed() {
        static long count = 0;
        return count;
    }

private:
    std::string name_, what_;
    long compared_ = 0, failures_ = 0;
    double worst_ = 0;
};

inline const char* name_of(int dtype) { return dtype == FLOAT32 ? "float32" : "bfloat16"; }
