// All kernels for one instruction set: compiled once for each, with VLMSERVE_ISA as its name.
#include "attention.h"
#include "encoder_attention.h"
#include "linear.h"
#include "norm.h"

#define QUOTED(name) #name
#define NAME_OF(name) QUOTED(name)
#define JOINED(a, b) a##b
#define TABLE_OF(name) JOINED(kernels_, name)

extern const Kernels TABLE_OF(VLMSERVE_ISA);
const Kernels TABLE_OF(VLMSERVE_ISA) = {
    NAME_OF(VLMSERVE_ISA), pack, gather, linear_scratch, linear, norm,
    attention_scratch, attention, encoder_attention_scratch, encoder_attention,
};
