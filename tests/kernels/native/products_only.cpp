// Products of one instruction set whose other kernels are those of another one: takes a third less time to compile.
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

// Nothing uses its table in a namespace without a name, so the compiler drops all kernels that no other table has.
namespace {
#include "kernels.cpp"
}

#define PRODUCTS_OF(name) JOINED(products_, name)

extern const Kernels PRODUCTS_OF(VLMSERVE_ISA) __asm__("kernels_" NAME_OF(VLMSERVE_ISA));
const Kernels PRODUCTS_OF(VLMSERVE_ISA) = {
    NAME_OF(VLMSERVE_ISA), pack, pack_quantized, pack_blocks, has_superblocks, gather, linear_scratch, linear,
};
