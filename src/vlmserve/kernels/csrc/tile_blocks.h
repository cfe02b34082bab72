// Blocks of matrix tiles (amx.h), as attention and the delta rule use them.
#pragma once

#include "amx.h"

#if defined(AMX)

namespace {

// Multiplies tiles of one or two rows and columns: A tiles are in registers 4 and 5, B tiles in 6 and 7, sums in 0 to 3.
template <int ROWS, int COLUMNS>
INLINE void multiply_block() {
    multiply_bf16_tiles<0, 4, 6>();
    if constexpr (COLUMNS > 1) multiply_bf16_tiles<1, 4, 7>();
    if constexpr (ROWS > 1) multiply_bf16_tiles<2, 5, 6>();
    if constexpr (ROWS > 1 && COLUMNS > 1) multiply_bf16_tiles<3, 5, 7>();
}

// Transposes 16 vectors of 16 numbers, in steps of 1, 2, 4 and 8 numbers.
INLINE void transpose(u32v (&rows)[16]) {
    const auto exchange = [&](int step, const u32v& low, const u32v& high) __attribute__((always_inline)) {
        for (int row = 0; row < 16; ++row) {
            if (row & step) continue;
            const __m512i one = bit_cast<__m512i>(rows[row]), other = bit_cast<__m512i>(rows[row + step]);
            rows[row] = bit_cast<u32v>(_mm512_permutex2var_epi32(one, bit_cast<__m512i>(low), other));
            rows[row + step] = bit_cast<u32v>(_mm512_permutex2var_epi32(one, bit_cast<__m512i>(high), other));
        }
    };
    const u32v lanes = bit_cast<u32v>(lanes_from(0));
#pragma GCC unroll 4
    for (int step = 1; step < 16; step *= 2) {
        const auto bit = static_cast<std::uint32_t>(step);
        // Lanes with the bit come from the other row, `step` lanes before; and the reverse.
        const u32v is_set = bit_cast<u32v>((lanes & bit) != 0u);
        exchange(step, (is_set & (lanes - bit + 16)) | (~is_set & lanes), (is_set & (lanes + 16)) | (~is_set & (lanes + bit)));
    }
}

}  // namespace

#endif
