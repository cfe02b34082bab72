// Matrix tiles of Intel AMX: eight registers of up to 16 rows of 64 bytes.
//
// A dot product adds to tile C [16 rows][16 float32 or int32] the matmul of A [16 rows][64 bytes] and B [16 units][16 columns]
// [4 bytes]. A unit is a pair of bfloat16 or four bytes, so a panel of packed bfloat16 weights is a sequence of B tiles.
//
// The functions are assembly, because GCC's intrinsics do not tell the compiler that loads read memory.
#pragma once

#include <cstdint>

#include "vector.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define AMX

namespace {

constexpr long TILE_ROWS = 16, TILE_BYTES = 64;

// Rows and bytes per row of each tile register.
struct alignas(64) TileShapes {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES};
    std::uint8_t rows[16] = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS};
};
static_assert(sizeof(TileShapes) == 64, "the instruction reads 64 bytes");
constexpr TileShapes FULL_TILES;

// Configures the calling thread's tiles, if they are not. They stay configured: asking takes 8 ns, configuring 90 ns, and a
// context switch little more than without. oneDNN asks as well before it uses tiles.
struct Tiles {
    explicit Tiles(const TileShapes& shapes = FULL_TILES) {
        TileShapes now;
        asm volatile("sttilecfg %0" : "=m"(now));
        if (__builtin_memcmp(&now, &shapes, sizeof now) != 0) asm volatile("ldtilecfg %0" : : "m"(shapes));
    }
};

template <int TILE>
INLINE void clear_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}

// stride: bytes between rows.
template <int TILE>
INLINE void load_tile(const void* from, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
INLINE void store_tile(void* to, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}

// C += A B for pairs of bfloat16, with float32 sums. Denormal numbers count as 0.
template <int C, int A, int B>
INLINE void multiply_bf16_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// C += A B for signed bytes, with int32 sums.
template <int C, int A, int B>
INLINE void multiply_s8_tiles() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// C += A B for signed bytes of A and unsigned bytes of B.
template <int C, int A, int B>
INLINE void multiply_s8_u8_tiles() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace

#endif
