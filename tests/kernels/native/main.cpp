// Compares all kernels of one instruction set with plain float64. A line for each case; the exit code says whether all are
// right. Without an argument: names the instruction sets that this processor runs, the best first. VLMSERVE_EMULATED:
// kernels that run here without the processor's instructions (emulated_x86.h), instead.
#include "isas.h"

#include "attention_cases.h"
#include "expert_cases.h"
#include "products.h"
#include "sampling_cases.h"
#include "state_cases.h"
#include "superblock_cases.h"
#include "thread_cases.h"

int main(int count, char** arguments) {
#if defined(VLMSERVE_EMULATED)
    const Kernels* found[] = {VLMSERVE_EMULATED};
    constexpr int isas = sizeof found / sizeof *found;
#else
    const Kernels* found[MOST_ISAS];
    int isas = supported(found);
#endif
    for (int i = 0; i < isas; ++i) {
        if (count < 2) std::printf("%s\n", found[i]->isa);
        if (count == 2 && std::strcmp(arguments[1], found[i]->isa) == 0) kernels = found[i];
    }
    if (count < 2) return 0;
    if (!kernels) {
        std::fprintf(stderr, "this processor cannot run %s\n", arguments[1]);
        return 2;
    }
    if (kernels == found[0]) test_threads();  // they know nothing of instruction sets
    test_products();
    for (int dtype : {FLOAT32, BFLOAT16})
        for (const WeightKind& kind : {PLAIN, INT8, INT4, GROUPS, GROUPS_WITH_MINIMUMS, CODES}) test_gathered_rows(kind, dtype);
    test_superblocks();
    if (kernels->attention) {  // not in products_only.cpp
        test_norms();
        test_gates();
        test_attention();
        test_states();
        test_mixtures();
        test_sampling();
    }
    std::printf("%ld cases failed\n", Case::failed());
    return Case::failed() ? 1 : 0;
}
