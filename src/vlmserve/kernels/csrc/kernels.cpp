// All kernels for one instruction set. Compiled once per set, with its name as VLMSERVE_ISA.
#include "attention.h"
#include "convolution.h"
#include "delta.h"
#include "encoder_attention.h"
#include "experts.h"
#include "gate.h"
#include "norm.h"
#include "program.h"
#include "quantized.h"
#include "rotation.h"
#include "sampling.h"

namespace {

template <class Format>
void gather_as(const void* packed, const std::int64_t* ids, void* y, long count, long in, WeightForm form, int threads) {
    auto* rows = static_cast<typename Format::Element*>(y);
#if defined(INTEGER_INPUTS)
    if (form.bits == SUPERBLOCKS) return gather_superblocks(packed, ids, rows, count, in, threads);
#endif
    if (form.bits)
        gather_quantized(static_cast<const u8*>(packed), ids, rows, count, in, form, threads);
    else
        gather_rows<Format>(static_cast<const typename Format::Element*>(packed), ids, rows, count, in, threads);
}

void gather(const void* packed, const std::int64_t* ids, void* y, long count, long in, int dtype, int bits, long group,
            int minimums, int threads) {
    const WeightForm form(bits, group, minimums);
    if (dtype == FLOAT32)
        gather_as<Float32>(packed, ids, y, count, in, form, threads);
    else
        gather_as<BFloat16>(packed, ids, y, count, in, form, threads);
}

#if defined(INTEGER_INPUTS)
constexpr bool has_superblocks = true;
#else
constexpr bool has_superblocks = false;
#endif

void pack_blocks(const u8* blocks, const u8* ups, u8* packed, long out, long in, int kind, [[maybe_unused]] long first_tile,
                 long offset, int gated, int threads) {
#if defined(INTEGER_INPUTS)
    if (is_superblock(kind)) return pack_superblocks(blocks, ups, packed, out, in, kind, first_tile, offset, gated, threads);
#endif
    pack_group_blocks(blocks, ups, packed + offset, out, in, kind, gated, threads);
}

}  // namespace

#define QUOTED(name) #name
#define NAME_OF(name) QUOTED(name)
#define JOINED(a, b) a##b
#define TABLE_OF(name) JOINED(kernels_, name)

extern const Kernels TABLE_OF(VLMSERVE_ISA);
const Kernels TABLE_OF(VLMSERVE_ISA) = {
    NAME_OF(VLMSERVE_ISA), pack, pack_quantized, pack_blocks, has_superblocks, gather, linear_scratch, linear, norm,
    gate, attention_scratch, attention, encoder_attention_scratch, encoder_attention, rotation, delta_scratch,
    delta, convolution, experts_scratch, experts, program_scratch, program, sampling_scratch, sampling,
};
