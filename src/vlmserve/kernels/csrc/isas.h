// Instruction sets of this build, and the ones that this processor supports.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <cstring>

#include "table.h"

namespace {

#if defined(__x86_64__)

// Includes whether the operating system saves the registers, which the compiler's builtin checks.
struct Processor {
    bool avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16, amx;

    Processor() {
        __builtin_cpu_init();
        avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        avx2_vnni = avx2 && leaf_7_1_eax() >> 4 & 1;
        avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
        avx512_bf16 = avx512_vnni && leaf_7_1_eax() >> 5 & 1;
        amx = avx512_bf16 && has_tiles() && may_use_tiles();
    }

private:
    static bool has_tiles() {
        constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, ALL = BF16 | TILE | INT8;
        constexpr unsigned XSAVE = 1u << 27, SAVED = 3u << 17;
        unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
        if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & ALL) != ALL) return false;
        if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & XSAVE)) return false;
        asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
        return (eax & SAVED) == SAVED;
    }

    // Linux gives a process tiles only if it asks. Threads and forked processes inherit the permission.
    static bool may_use_tiles() {
#if defined(__linux__)
        constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
        return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
        return false;
#endif
    }

    static unsigned leaf_7_1_eax() {
        unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
        return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) ? eax : 0;
    }
};

#elif defined(__aarch64__)

struct Processor {
    bool neon_dot, neon_bf16;

    Processor() {
#if defined(__linux__)
        unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
        constexpr unsigned long DOT = 1UL << 20, I8MM = 1UL << 13, BF16 = 1UL << 14;
        neon_dot = first & DOT;
        neon_bf16 = neon_dot && second & I8MM && second & BF16;
#elif defined(__APPLE__)
        neon_dot = has("hw.optional.arm.FEAT_DotProd");
        neon_bf16 = neon_dot && has("hw.optional.arm.FEAT_I8MM") && has("hw.optional.arm.FEAT_BF16");
#else
        neon_dot = neon_bf16 = false;
#endif
    }

private:
#if defined(__APPLE__)
    static bool has(const char* name) {
        int value = 0;
        size_t size = sizeof value;
        return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
    }
#endif
};

#endif

}  // namespace

#define KERNELS_FOR(isa) extern const Kernels kernels_##isa;
#if defined(VLMSERVE_WITH_amx)
KERNELS_FOR(amx)
#endif
#if defined(VLMSERVE_WITH_avx512_bf16)
KERNELS_FOR(avx512_bf16)
#endif
#if defined(VLMSERVE_WITH_avx512_vnni)
KERNELS_FOR(avx512_vnni)
#endif
#if defined(VLMSERVE_WITH_avx512)
KERNELS_FOR(avx512)
#endif
#if defined(VLMSERVE_WITH_avx2_vnni)
KERNELS_FOR(avx2_vnni)
#endif
#if defined(VLMSERVE_WITH_avx2)
KERNELS_FOR(avx2)
#endif
#if defined(VLMSERVE_WITH_neon_bf16)
KERNELS_FOR(neon_bf16)
#endif
#if defined(VLMSERVE_WITH_neon_dot)
KERNELS_FOR(neon_dot)
#endif
#if defined(VLMSERVE_WITH_neon)
KERNELS_FOR(neon)
#endif
#if defined(VLMSERVE_WITH_portable)
KERNELS_FOR(portable)
#endif
#undef KERNELS_FOR

namespace {

constexpr int MOST_ISAS = 7;

// Names of the instruction sets that this processor supports, best first, whether this build has their kernels or not.
int runnable(const char** names) {
    int count = 0;
    auto add = [&](bool condition, const char* name) {
        if (condition) names[count++] = name;
    };
#if defined(__x86_64__)
    static const Processor processor;
    add(processor.amx, "amx");
    add(processor.avx512_bf16, "avx512_bf16");
    add(processor.avx512_vnni, "avx512_vnni");
    add(processor.avx512, "avx512");
    add(processor.avx2_vnni, "avx2_vnni");
    add(processor.avx2, "avx2");
    add(true, "portable");
#elif defined(__aarch64__)
    static const Processor processor;
    add(processor.neon_bf16, "neon_bf16");
    add(processor.neon_dot, "neon_dot");
    add(true, "neon");
#else
    add(true, "portable");
#endif
    return count;
}

// The supported instruction sets of this build, best first.
int supported(const Kernels** found) {
    static const Kernels* const built[] = {
#if defined(VLMSERVE_WITH_amx)
        &kernels_amx,
#endif
#if defined(VLMSERVE_WITH_avx512_bf16)
        &kernels_avx512_bf16,
#endif
#if defined(VLMSERVE_WITH_avx512_vnni)
        &kernels_avx512_vnni,
#endif
#if defined(VLMSERVE_WITH_avx512)
        &kernels_avx512,
#endif
#if defined(VLMSERVE_WITH_avx2_vnni)
        &kernels_avx2_vnni,
#endif
#if defined(VLMSERVE_WITH_avx2)
        &kernels_avx2,
#endif
#if defined(VLMSERVE_WITH_neon_bf16)
        &kernels_neon_bf16,
#endif
#if defined(VLMSERVE_WITH_neon_dot)
        &kernels_neon_dot,
#endif
#if defined(VLMSERVE_WITH_neon)
        &kernels_neon,
#endif
#if defined(VLMSERVE_WITH_portable)
        &kernels_portable,
#endif
    };
    const char* names[MOST_ISAS];
    const int num_names = runnable(names);
    int count = 0;
    for (int i = 0; i < num_names; ++i)
        for (const Kernels* kernels : built)
            if (!strcmp(kernels->isa, names[i])) found[count++] = kernels;
    return count;
}

}  // namespace
